"""The doctor's checks of training on each rank: data, speed of the model and of the loader, memory."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from project.cluster import environment, gpu
from project.cluster.cgroups import field
from project.doctor import network
from project.doctor.findings import Examination, Finding, Trouble
from project.step.micro_batch import count_samples

_SECONDS = 2.0  # for each of the timings that take as long as one lets them
_USABLE = 0.95  # of the free memory of a device
_SLOW = 1.5  # times the usual: a rank that computes so slowly is named


def data(this: Examination) -> None:
    fix = "The data must be there on every host: data.source."
    first = this.run.local_rank == 0
    if this.measure("data", this.run.data.prepare_data if first else lambda: None, fix) is None:
        return
    prints = this.measure("data", this.run.fingerprint, fix)
    sizes = None if prints is None else this.measure("data", this.run.sizes, fix)
    if prints is None or sizes is None or this.measure("batches", this.run.deal) is None:
        return
    this.run.micro_batch, this.run.workers = sizes[this.run.rank]
    this.has_data = True
    if not prints[0]:
        this.findings.append(Finding("data", "skipped", "the data says nothing of itself (no fingerprint)"))
        return
    this.sample_bytes = int(prints[0]["train"]["bytes"])
    seen = [
        {"data": ", ".join(f"{facts['samples']:,} {split} ({facts['hash']})" for split, facts in each.items())}
        for each in prints
    ]
    troubles = [Trouble(text, ranks) for text, ranks in environment.different(seen, this.hosts, ["data"]).items()]
    this.add("data", troubles, f"the same everywhere: {seen[0]['data']}", "Copy or mount the same data on every host.")


def compute(this: Examination) -> float | None:
    """Returns the seconds that the slowest rank takes for a micro-batch."""
    fix = "See the error. A step is tried outside of a fit here; a smaller data.batch_size needs less memory."
    taken = this.measure("compute", partial(_time_compute, this), fix, bad=False)
    if taken is None:
        return None
    typical = statistics.median_low(taken)
    speed = f"{this.run.micro_batch / typical:,.0f}"
    troubles = [
        this.trouble(
            [rank],
            f"{seconds / typical:.1f} times slower than the others "
            f"({this.run.micro_batch / seconds:,.0f} samples/s, elsewhere {speed})",
            bad=False,
        )
        for rank, seconds in enumerate(taken)
        if seconds > _SLOW * typical
    ]
    spread = f"; the ranks differ by {max(taken) / min(taken) - 1:.0%}" if len(taken) > 1 else ""
    good = f"{speed} samples/s on each rank{spread}"
    fix = "Is something else running there? Is it throttled (temperature, power, a cgroup's CPU limit)?"
    this.add("compute", troubles, good, fix, seconds=taken)
    return float(max(taken))


def _time_compute(this: Examination) -> float:
    this.run.compute(this.run.micro_batch)  # the first one is slower
    if this.control is not None:
        dist.barrier(group=this.control)  # all at once, as in training
    times, start = 0, network.now(this.run.device)
    while times < 3 or (network.now(this.run.device) - start < _SECONDS and times < 1000):
        this.run.compute(this.run.micro_batch)
        times += 1
    # The mean and not the median: a rank that is throttled runs at full speed in between.
    return (network.now(this.run.device) - start) / times


def memory(this: Examination) -> None:
    peaks = this.measure("memory", partial(_peaks, this), "Set data.batch_size lower.")
    if peaks is None:
        return
    largest = [int((free - fixed) / each) if each > 0 else 0 for fixed, each, free in peaks]
    fits = min(largest)
    tight = [rank for rank, most in enumerate(largest) if 0 < most < this.run.micro_batch]
    text = f"a micro-batch of {this.run.micro_batch} does not fit, {fits} would"
    troubles = [this.trouble(tight, text)] if tight else []
    shown = f"a micro-batch of {this.run.micro_batch} fits"
    if fits > 0:
        shown += f"; the largest that does: about {_round_down(fits):,}"
    this.add("memory", troubles, shown, f"Set data.batch_size={_round_down(max(1, fits))}.", largest=largest)


def _peaks(this: Examination) -> tuple[float, float, float]:
    """Returns the bytes needed whatever the micro-batch, the bytes for each sample, and the bytes available."""
    many, few = this.run.micro_batch, max(1, this.run.micro_batch // 2)
    device = this.run.device
    high, low = _peak(lambda: this.run.compute(many), device), _peak(lambda: this.run.compute(few), device)
    each = max(0.0, (high - low) / (many - few)) if many > few else 0.0
    if device.type == "cuda":
        return max(0.0, high - each * many), each, gpu.memory(device).left * _USABLE
    left = environment.limits(this.run.folder)["memory"] or 0
    return 0.0, each, left / this.run.processes + each * many


def loader(this: Examination, step: float | None) -> None:
    fix = "The loader must run on every host: data.source, data.num_workers."
    speeds = this.measure("loader", partial(_time_loader, this), fix)
    if speeds is None:
        return
    good = f"{min(speeds):,.0f} samples/s on the slowest rank"
    if step is None:
        this.add("loader", [], good, speeds=speeds)
        return
    needed = this.run.micro_batch / step
    troubles = [
        this.trouble([rank], f"{speed:,.0f} samples/s, and the device takes {needed:,.0f}", bad=False)
        for rank, speed in enumerate(speeds)
        if speed < needed
    ]
    good += f", {min(speeds) / needed:,.1f} times what the device takes"
    this.add("loader", troubles, good, "More data.num_workers (and cores), or data on a faster disk.", speeds=speeds)


def _time_loader(this: Examination) -> float:
    batches = this.run.batches()
    next(batches)  # workers start
    samples, start = 0, time.perf_counter()
    for batch in batches:
        samples += count_samples(batch)
        if time.perf_counter() - start > _SECONDS:
            break
    return samples / (time.perf_counter() - start) if samples else float("inf")


def _peak(run: Callable[[], None], device: torch.device) -> float:
    """Returns the most memory that a call takes at once."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return float(torch.cuda.max_memory_allocated(device))
    try:
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        run()
        return _resident("VmHWM") - before
    except (OSError, IndexError):
        return 0.0


def _resident(name: str) -> float:
    return float(field(Path("/proc/self/status"), name).split()[0]) * 1024  # "123 kB"


def _round_down(number: int) -> int:
    """Rounds down to a power of two or one and a half of one: a number that a user would set."""
    power = 1 << (number.bit_length() - 1)
    return power + power // 2 if number >= power + power // 2 and power > 1 else power
