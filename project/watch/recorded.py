"""What a profile says without being opened: where the steps' time went, the operators that took most of it, how long nothing
was computed, and how much of the communication went on beside the computing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.profiler import DeviceType

Span = tuple[float, float]  # microseconds

RANGE = "step: "
"""What the names of our own ranges begin with."""
_SHOWN = 12  # operators
_WIDTH = 60  # characters of an operator's name
_SEEN = 1000  # bytes a step: less is 0 in the table


@dataclass(frozen=True)
class Event:
    """Something that took its time."""

    name: str
    start: float
    end: float
    self_time: float
    """Without what it called; microseconds."""
    allocated: float
    """Bytes, likewise; 0 where that was not recorded."""
    kind: str
    """'range': one of ours; 'computing': on the device that computes; 'communication'; 'other'."""


def events_of(found: Iterable[Any], on_gpu: bool) -> list[Event]:
    """Of torch's profiler."""
    events = []
    for one in found:
        device = one.device_type == DeviceType.CUDA
        span = one.time_range.start, one.time_range.end
        spent = span[1] - span[0] if device else one.self_cpu_time_total
        bytes_ = one.self_device_memory_usage if on_gpu else one.self_cpu_memory_usage
        events.append(Event(one.name, *span, spent, max(0, bytes_), _kind(one, device, on_gpu)))
    return events


def _kind(event: Any, device: bool, on_gpu: bool) -> str:
    name = event.name.lower()
    if event.is_user_annotation and not event.is_async:  # what it spans is counted by itself
        return "range" if name.startswith(RANGE) and not device else "other"
    if name.startswith("gloo:") or (device and "nccl" in name):
        return "communication"
    return "computing" if device == on_gpu and not event.is_async and not name.startswith("c10d::") else "other"


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time, without overlaps, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def shared(some: Sequence[Span], others: Sequence[Span]) -> float:
    """How long both go on; each without overlaps."""
    return length(some) + length(others) - length(union([*some, *others]))


def gaps(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    """Of this time, what they leave."""
    edges = [start, *(edge for span in spans for edge in span), end]
    return [(one, other) for one, other in zip(edges[::2], edges[1::2], strict=True) if other > one]


def lines(events: Sequence[Event], steps: int, on_gpu: bool) -> list[str]:
    """For people. `steps`: how many were recorded."""
    ranges = [one for one in events if one.kind == "range"]
    if not ranges:
        return ["Nothing was recorded."]
    start, end = min(one.start for one in ranges), max(one.end for one in ranges)
    if on_gpu:  # it is behind the host
        end = max([end, *(one.end for one in events if one.kind in ("computing", "communication") and one.start < end)])
    whole = end - start
    device = "GPU" if on_gpu else "CPU"
    events = [one for one in events if one.end > start and one.start < end]
    spent: Counter[str] = Counter()
    for one in ranges:
        spent[one.name.removeprefix(RANGE)] += one.end - one.start  # type: ignore[assignment]
    if (between := whole - length(union((one.start, one.end) for one in ranges))) > 0:
        spent["between steps"] += between  # type: ignore[assignment]
    said = [
        f"{_ms(whole / steps)} a step: "
        + ", ".join(f"{name} {time / whole:.0%}" for name, time in spent.most_common() if time / whole >= 0.005)
    ]

    def busy(kind: str) -> list[Span]:
        return union((max(one.start, start), min(one.end, end)) for one in events if one.kind == kind)

    computing, communicating = busy("computing"), busy("communication")
    idle = gaps(computing, start, end)
    longest = max(idle, key=lambda one: one[1] - one[0], default=(start, start))
    where = next((one.name for one in ranges if one.start <= longest[0] < one.end), "between steps").removeprefix(RANGE)
    said.append(
        f"The {device} computes nothing for {length(idle) / whole:.0%} of the time; the longest gap is "
        f"{_ms(longest[1] - longest[0])}" + f", in {where}"
    )
    if communicating:
        took, beside = length(communicating), shared(communicating, computing)
        said.append(
            f"Communication goes on for {_ms(took / steps)} a step, {beside / took:.0%} of it beside computing; for "
            f"{(took - beside) / whole:.0%} of the time nothing else goes on"
        )
    return [*said, "", *_table(events, steps, whole, device), *_allocations(events, steps)]


def _table(events: Sequence[Event], steps: int, whole: float, device: str) -> list[str]:
    """The operators that take most of the time by themselves."""
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for one in events:
        if one.kind in ("computing", "communication"):
            times[one.name] += one.self_time  # type: ignore[assignment]
            calls[one.name] += 1
    said = [f"{f'Operators, by their own {device} time':<{_WIDTH}} {'calls a step':>12} {'time a step':>13} {'share':>8}"]
    for name, time in times.most_common(_SHOWN):
        said.append(f"{_short(name)} {calls[name] / steps:>12.5g} {_ms(time / steps):>13} {time / whole:>8.1%}")
    return said


def _allocations(events: Sequence[Event], steps: int) -> list[str]:
    """The operators that ask for most memory, given back or not."""
    sizes: Counter[str] = Counter()
    for one in events:
        sizes[one.name] += one.allocated  # type: ignore[assignment]
    largest = [(name, size) for name, size in sizes.most_common(_SHOWN) if size / steps >= _SEEN]
    said = ["", f"{'Operators, by what they allocate':<{_WIDTH}} {'MB a step':>12}"] if largest else []
    return [*said, *(f"{_short(name)} {size / 1e6 / steps:>12,.3f}" for name, size in largest)]


def _short(name: str) -> str:
    return f"{name if len(name) <= _WIDTH else name[: _WIDTH - 3] + '...':<{_WIDTH}}"


def _ms(microseconds: float) -> str:
    milliseconds = microseconds / 1e3
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"
