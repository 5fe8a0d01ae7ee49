"""The tables of a profile: where the steps' time went, the operators that took most of it, how long nothing was computed, and
how much of the communication ran beside the computing; and what a rank's memory holds.
"""

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import DeviceType

from project.step.allocator import save_recording
from project.untrusted import make_folder, replacing, write_text

Span = tuple[float, float]  # microseconds

RANGE = "step: "
"""The prefix of the names of our own ranges."""
_SHOWN, _KINDS = 12, 15  # operators, and kinds of tensors
_WIDTH = 60  # characters of an operator's name
_SEEN = 1000  # bytes a step: less is 0 in the table


def _kind(event: FunctionEvent, on_gpu: bool) -> str:
    """Returns 'range' (one of ours), 'computing' (on the device that computes), 'communication' or 'other'."""
    name, device = event.name.lower(), event.device_type == DeviceType.CUDA
    if event.is_user_annotation and not event.is_async:  # what it spans is counted by itself
        return "range" if name.startswith(RANGE) and not device else "other"
    if name.startswith("gloo:") or (device and "nccl" in name):
        return "communication"
    return "computing" if device == on_gpu and not event.is_async and not name.startswith("c10d::") else "other"


def _union(spans: Iterable[Span]) -> list[Span]:
    """Returns spans of the same time, without overlaps, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def lines(profiled: Iterable[FunctionEvent], steps: int, on_gpu: bool) -> list[str]:
    """Returns the table, for people. `profiled`: the events of torch's profiler; `steps`: how many were recorded."""
    by_kind: dict[str, list[FunctionEvent]] = {"range": [], "computing": [], "communication": [], "other": []}
    for event in profiled:
        by_kind[_kind(event, on_gpu)].append(event)
    ranges = [event.time_range for event in by_kind["range"]]
    if not ranges:
        return ["Nothing was recorded."]
    start, end = min(span.start for span in ranges), max(span.end for span in ranges)
    if on_gpu:  # it is behind the host
        busy = [event.time_range for event in by_kind["computing"] + by_kind["communication"]]
        end = max([end, *(span.end for span in busy if span.start < end)])
    whole, device = end - start, "GPU" if on_gpu else "CPU"
    for kind, some in by_kind.items():
        by_kind[kind] = [event for event in some if event.time_range.end > start and event.time_range.start < end]
    spent: Counter[str] = Counter()
    for event in by_kind["range"]:
        spent[event.name.removeprefix(RANGE)] += event.time_range.end - event.time_range.start
    spent["between steps"] += whole - _length(_union((span.start, span.end) for span in ranges))
    shares = ", ".join(f"{name} {time / whole:.0%}" for name, time in spent.most_common() if time / whole >= 0.005)
    computing, communicating = (
        _union((max(event.time_range.start, start), min(event.time_range.end, end)) for event in by_kind[kind])
        for kind in ("computing", "communication")
    )
    edges = [start, *(edge for span in computing for edge in span), end]
    idle = list(zip(edges[::2], edges[1::2], strict=True))
    longest = max(idle, key=lambda span: span[1] - span[0])
    within = (event.name for event in by_kind["range"] if event.time_range.start <= longest[0] < event.time_range.end)
    summary = [
        f"{_ms(whole / steps)} a step: {shares}",
        f"The {device} computes nothing for {_length(idle) / whole:.0%} of the time; the longest gap is "
        f"{_ms(longest[1] - longest[0])}, in {next(within, 'between steps').removeprefix(RANGE)}",
    ]
    if communicating:
        took, alone = _length(communicating), _length(_union([*communicating, *computing])) - _length(computing)
        summary.append(
            f"Communication goes on for {_ms(took / steps)} a step, {1 - alone / took:.0%} of it beside computing; for "
            f"{alone / whole:.0%} of the time nothing else goes on"
        )
    operators = by_kind["computing"] + by_kind["communication"]
    return [*summary, "", *_table(operators, steps, whole, device), *_allocations(chain(*by_kind.values()), steps, on_gpu)]


def _table(events: Sequence[FunctionEvent], steps: int, whole: float, device: str) -> list[str]:
    """Lists the operators that take most of the time by themselves."""
    times: Counter[str] = Counter()
    calls = Counter(event.name for event in events)
    for event in events:
        span = event.time_range.end - event.time_range.start
        times[event.name] += span if event.device_type == DeviceType.CUDA else event.self_cpu_time_total
    return [
        f"{f'Operators, by their own {device} time':<{_WIDTH}} {'calls a step':>12} {'time a step':>13} {'share':>8}",
        *(
            f"{_short(name)} {calls[name] / steps:>12.5g} {_ms(time / steps):>13} {time / whole:>8.1%}"
            for name, time in times.most_common(_SHOWN)
        ),
    ]


def _allocations(events: Iterable[FunctionEvent], steps: int, on_gpu: bool) -> list[str]:
    """Lists the operators that ask for most memory, given back or not."""
    sizes: Counter[str] = Counter()
    for event in events:
        sizes[event.name] += max(0, event.self_device_memory_usage if on_gpu else event.self_cpu_memory_usage)
    header = f"{'Operators, by what they allocate':<{_WIDTH}} {'MB a step':>12}"
    largest = [(name, size) for name, size in sizes.most_common(_SHOWN) if size / steps >= _SEEN]
    return ["", header, *(f"{_short(name)} {size / 1e6 / steps:>12,.3f}" for name, size in largest)] if largest else []


def _short(name: str) -> str:
    return f"{name if len(name) <= _WIDTH else name[: _WIDTH - 3] + '...':<{_WIDTH}}"


def _ms(microseconds: float) -> str:
    milliseconds = microseconds / 1e3
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def write_held(trainer: Trainer, module: LightningModule, stem: Path) -> Path:
    """Writes STEM.txt, and on a GPU STEM.pickle, for https://pytorch.org/memory_viz."""
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values() if isinstance(state, dict)]
    kinds: dict[str, Iterable[Tensor]] = {
        "parameters": module.parameters(),
        "gradients": [parameter.grad for parameter in module.parameters() if parameter.grad is not None],
        "buffers": module.buffers(),
        "states of the optimisers": [value for state in states for value in state.values() if isinstance(value, Tensor)],
    }
    known: set[int] = set()
    lines = [f"rank {trainer.global_rank}, step {trainer.global_step}, {trainer.strategy.root_device}"]
    lines += [f"{_mb(sum(_bytes(tensor, known) for tensor in tensors))}  {name}" for name, tensors in kinds.items()]
    # What autograd keeps for the backward pass is not among the tensors that Python knows.
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for tensor in gc.get_objects():
        if type(tensor) is Tensor and (size := _bytes(tensor, known)):
            kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
            sizes[kind] += size
            counts[kind] += 1
    lines.append(f"{_mb(sum(sizes.values()))}  other tensors that Python knows; the largest kinds:")
    lines += [f"{_mb(size)}    {counts[kind]} x {kind}" for kind, size in sizes.most_common(_KINDS)]
    on_gpu = trainer.strategy.root_device.type == "cuda"
    if on_gpu:
        lines += ["", torch.cuda.memory_summary(abbreviated=True)]
    make_folder(stem.parent)
    text = stem.with_name(f"{stem.name}.txt")
    write_text(text, "\n".join([*lines, ""]))
    if on_gpu:
        with replacing(stem.with_name(f"{stem.name}.pickle")) as file:
            save_recording(file)
    return text


def ran_out(error: BaseException) -> bool:
    """Returns whether an error means that memory ran out."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def _bytes(tensor: Tensor, known: set[int]) -> int:
    """Returns the bytes of a tensor's memory; 0 where it has none of its own, or its address is known already."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or on no device
        return 0
    if not address or address in known:
        return 0
    known.add(address)
    return tensor.untyped_storage().nbytes()


def _mb(bytes_: float) -> str:
    return f"{bytes_ / 1e6:12,.2f} MB"
