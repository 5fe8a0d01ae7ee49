"""The table of a profile: where the steps' time went, the operators that took most of it, how long nothing
was computed, and how much of the communication ran beside the computing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.profiler import DeviceType

Span = tuple[float, float]  # microseconds

RANGE = "step: "
"""The prefix of the names of our own ranges."""
_SHOWN = 12  # operators
_WIDTH = 60  # characters of an operator's name
_SEEN = 1000  # bytes a step: less is 0 in the table


@dataclass(frozen=True)
class Event:
    """An event of a profile, with the time that it took."""

    name: str
    start: float
    end: float
    self_time: float
    """Without what it called; microseconds."""
    allocated: float
    """Bytes, likewise; 0 where that was not recorded."""
    kind: str
    """'range': one of ours; 'computing': on the device that computes; 'communication'; 'other'."""


def events_of(profiled: Iterable[Any], on_gpu: bool) -> list[Event]:
    """Converts the events of torch's profiler."""
    events = []
    for event in profiled:
        device = event.device_type == DeviceType.CUDA
        span = event.time_range.start, event.time_range.end
        spent = span[1] - span[0] if device else event.self_cpu_time_total
        bytes_ = event.self_device_memory_usage if on_gpu else event.self_cpu_memory_usage
        events.append(Event(event.name, *span, spent, max(0, bytes_), _kind(event, device, on_gpu)))
    return events


def _kind(event: Any, device: bool, on_gpu: bool) -> str:
    name = event.name.lower()
    if event.is_user_annotation and not event.is_async:  # what it spans is counted by itself
        return "range" if name.startswith(RANGE) and not device else "other"
    if name.startswith("gloo:") or (device and "nccl" in name):
        return "communication"
    return "computing" if device == on_gpu and not event.is_async and not name.startswith("c10d::") else "other"


def union(spans: Iterable[Span]) -> list[Span]:
    """Returns spans of the same time, without overlaps, in order."""
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
    """Returns how long both run at once; each comes without overlaps."""
    return length(some) + length(others) - length(union([*some, *others]))


def gaps(spans: Sequence[Span], start: float, end: float) -> list[Span]:
    """Returns the parts of a time that the spans leave."""
    edges = [start, *(edge for span in spans for edge in span), end]
    return [(left, right) for left, right in zip(edges[::2], edges[1::2], strict=True) if right > left]


def lines(events: Sequence[Event], steps: int, on_gpu: bool) -> list[str]:
    """Returns the table, for people. `steps`: how many were recorded."""
    ranges = [event for event in events if event.kind == "range"]
    if not ranges:
        return ["Nothing was recorded."]
    start, end = min(event.start for event in ranges), max(event.end for event in ranges)
    if on_gpu:  # it is behind the host
        end = max([end, *(event.end for event in events if event.kind in ("computing", "communication") and event.start < end)])
    whole = end - start
    device = "GPU" if on_gpu else "CPU"
    events = [event for event in events if event.end > start and event.start < end]
    spent: Counter[str] = Counter()
    for event in ranges:
        spent[event.name.removeprefix(RANGE)] += event.end - event.start  # type: ignore[assignment]
    if (between := whole - length(union((event.start, event.end) for event in ranges))) > 0:
        spent["between steps"] += between  # type: ignore[assignment]
    summary = [
        f"{_ms(whole / steps)} a step: "
        + ", ".join(f"{name} {time / whole:.0%}" for name, time in spent.most_common() if time / whole >= 0.005)
    ]

    def busy(kind: str) -> list[Span]:
        return union((max(event.start, start), min(event.end, end)) for event in events if event.kind == kind)

    computing, communicating = busy("computing"), busy("communication")
    idle = gaps(computing, start, end)
    longest = max(idle, key=lambda span: span[1] - span[0], default=(start, start))
    where = next((event.name for event in ranges if event.start <= longest[0] < event.end), "between steps").removeprefix(RANGE)
    summary.append(
        f"The {device} computes nothing for {length(idle) / whole:.0%} of the time; the longest gap is "
        f"{_ms(longest[1] - longest[0])}" + f", in {where}"
    )
    if communicating:
        took, beside = length(communicating), shared(communicating, computing)
        summary.append(
            f"Communication goes on for {_ms(took / steps)} a step, {beside / took:.0%} of it beside computing; for "
            f"{(took - beside) / whole:.0%} of the time nothing else goes on"
        )
    return [*summary, "", *_table(events, steps, whole, device), *_allocations(events, steps)]


def _table(events: Sequence[Event], steps: int, whole: float, device: str) -> list[str]:
    """Lists the operators that take most of the time by themselves."""
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        if event.kind in ("computing", "communication"):
            times[event.name] += event.self_time  # type: ignore[assignment]
            calls[event.name] += 1
    rows = [f"{f'Operators, by their own {device} time':<{_WIDTH}} {'calls a step':>12} {'time a step':>13} {'share':>8}"]
    for name, time in times.most_common(_SHOWN):
        rows.append(f"{_short(name)} {calls[name] / steps:>12.5g} {_ms(time / steps):>13} {time / whole:>8.1%}")
    return rows


def _allocations(events: Sequence[Event], steps: int) -> list[str]:
    """Lists the operators that ask for most memory, given back or not."""
    sizes: Counter[str] = Counter()
    for event in events:
        sizes[event.name] += event.allocated  # type: ignore[assignment]
    largest = [(name, size) for name, size in sizes.most_common(_SHOWN) if size / steps >= _SEEN]
    header = ["", f"{'Operators, by what they allocate':<{_WIDTH}} {'MB a step':>12}"] if largest else []
    return [*header, *(f"{_short(name)} {size / 1e6 / steps:>12,.3f}" for name, size in largest)]


def _short(name: str) -> str:
    return f"{name if len(name) <= _WIDTH else name[: _WIDTH - 3] + '...':<{_WIDTH}}"


def _ms(microseconds: float) -> str:
    milliseconds = microseconds / 1e3
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"
