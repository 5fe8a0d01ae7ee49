"""The time of a step, by its phases (waiting for data, forwards, backwards, waiting for peers' gradients, the optimiser,
and the rest), its speed, and its memory.

Lightning's ThroughputMonitor waits for the device at each log point and knows one rank. Here the ranks' times are collected
once in a window of steps, by one small all-gather that is read a step later; on a GPU they are read from events that have
long passed. TensorBoard gets them under speed/, ranks/ and run/; `Stragglers` compares them: the ranks that are slow again and
again, their hosts, and whether data or compute is the cause, as their peers wait for them.
"""

import logging
import math
import os
import time
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, median_low
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from project.cluster.group import Group
from project.cluster.place import MEMORY, host, short
from project.errors import UserError
from project.step.data_ranks import data_ranks
from project.step.ddp import all_gather_objects
from project.step.measurements import measurement_loggers
from project.step.optimizers import learning_rates
from project.step.state import ends_step, micro_batch
from project.typed import callbacks_of, typed
from project.watch.curves import LEARNING_RATE
from project.watch.flops import flops, network_of, peak
from project.watch.history import PHASES
from project.watch.life import Life

log = logging.getLogger(__name__)

_LATER = 2  # steps until a GPU has surely passed an event
_FIELDS = {"data_wait": "data", "gradient_sync": "sync"}  # of `Measured`; those of other phases have their names

Cause = Literal["data", "compute"]
_SLOW = 1.3  # times the median of the ranks' own work
_IN_A_ROW, _AT_LEAST = 3, 1.0  # windows, seconds: less is chance
_AGAIN = 100  # windows until a warning is repeated
_CURVES = 8  # ranks with curves of their own
_HINTS = {
    "data": "data.num_workers, and the disk or network that this host reads its data from.",
    "compute": "what else runs on this host; is it throttled (temperature, power, a limit on its cores)?",
}

Moment = Any  # seconds, or an event on the device
Marks = list[tuple[str, Moment]]
"""The phases of a step, each with the moment in which it began."""


@dataclass(frozen=True)
class Measured:
    """The measurements of a rank in a window, on the average of its steps; times in seconds."""

    data: float
    compute: float
    sync: float
    other: float = 0.0
    """Between two steps: logging, say."""
    forward: float = 0.0
    """A part of `compute`, as are the next two."""
    backward: float = 0.0
    optimizer: float = 0.0
    samples: float = 0.0
    host_memory: float = 0.0
    """Bytes of the process, now."""
    device_memory: float = 0.0
    """Bytes, at most since the start; 0 without a GPU."""
    cores: float = 0.0
    """The cores that the process kept busy."""
    gpu: float = math.nan
    """The share of time in which the GPU computed anything; NaN where nothing reports it."""

    @property
    def own(self) -> float:
        """Returns the time of its own work, in which it waits for no other rank: getting its data, and computing."""
        return self.data + self.compute

    @property
    def total(self) -> float:
        return self.own + self.sync + self.other

    @property
    def rest(self) -> float:
        return max(0.0, self.compute - self.forward - self.backward - self.optimizer) + self.other


def _kept_flops(module: LightningModule, shape: Sequence[int]) -> float:
    """Returns the operations for a sample: ranks that are started again need not count them again."""
    file = Path(os.environ[MEMORY], "flops") if MEMORY in os.environ else None
    if file and file.exists():
        return float(file.read_text())
    counted = flops(network_of(module), shape)
    if file:
        file.write_text(str(counted))
    return counted


class Throughput(Callback):
    """Measures the steps, and logs each window of them.

    Args:
        every_n_steps: optimiser steps in a window; None takes trainer.log_every_n_steps, but at least 10.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise UserError(f"every_n_steps is a number of steps, not {every_n_steps}.")
        self.every_n_steps = every_n_steps
        self.shares: dict[str, float] = {}  # of the time of all steps, for the summary
        self.phases: dict[str, float] = {}  # shares of a step in the last window
        self.speed: float | None = None
        """The run's speed, in samples a second of all ranks: the median of the windows since this start, as in the report."""
        self._group = Group()
        self._stragglers: Stragglers | None = None
        self._hooks: list[RemovableHandle] = []
        self._last_gradient: Tensor | None = None
        self._learning: Sequence[Tensor] = ()  # the parameters that require gradients, as they were last looked at
        self._flops: float | None = None  # for a sample
        self._peak: float | None = None
        self._forget()

    def _forget(self) -> None:
        self._marks: Marks = []  # of the step at hand
        self._samples = self._step_samples = 0  # of this window, and of the step at hand
        self._busy = time.process_time(), time.perf_counter()
        self._last_end: Moment = None
        self._window: list[Marks] = []
        self._closed: tuple[int, list[Marks], int] | None = None
        self._rows: list[Tensor] = []
        self._arriving: dist.Work | None = None
        self._warm = self._left_out = False
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._seconds = 0.0
        self._speeds: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        self.speed = None
        self._steps = self.every_n_steps or max(10, typed(trainer).log_every_n_steps)
        # To ask for the current stream takes longer than an event.
        self._stream = torch.cuda.current_stream() if pl_module.device.type == "cuda" else None
        if trainer.world_size > 1:
            if dist.get_backend() != "gloo":
                self._group.make()  # on the host, beside what the GPUs send each other
            self._stragglers = Stragglers(all_gather_objects(host(), trainer.world_size, self._group()), self._steps)
        self._learning = ()

    def _hook(self, *parameters: Tensor) -> None:
        """Hooks only these parameters, which then report when their gradient is computed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._gradient) for parameter in parameters]

    def _now(self) -> Moment:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _mark(self, phase: str) -> None:
        """Ends a phase of the step, and begins another."""
        if self._marks:
            self._marks.append((phase, self._now()))

    def on_fetch_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._marks and self._last_end is not None:
            self._marks = [("other", self._last_end)]
        self._marks.append(("data", self._now()))

    def on_fetch_ends(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark("forward")

    def _gradient(self, parameter: Tensor) -> None:
        self._last_gradient = parameter
        if self._marks and self._marks[-1][0] == "backward":  # from here on it is the others' turn
            self._mark("sync")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if not self._warm and self._flops is None and trainer.is_global_zero:
            if isinstance(batch, dict) and isinstance(images := batch.get("image"), Tensor):
                self._flops = _kept_flops(pl_module, images.shape[1:])
            self._peak = peak(trainer)
        is_first = batch_idx % trainer.accumulate_grad_batches == 0  # of its step, within which parts of a network are gathered
        if self._stragglers is not None and is_first and (self._last_end is None or not self._window):
            learning = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
            if [*map(id, learning)] != [*map(id, self._learning)]:
                # Which gradient comes last, this step shows: each says when it is there.
                self._learning, self._warm, self._last_gradient = learning, False, None
                self._hook(*learning)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._mark("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark("rest")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._mark("optimizer")

    def on_step_taken(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark("rest")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if not self._marks:
            return
        self._step_samples += micro_batch(trainer).size
        if not ends_step(trainer):
            return
        self._mark("end")
        marks, self._marks, samples, self._step_samples = self._marks, [], self._step_samples, 0
        self._last_end = marks[-1][1]
        if self._left_out:
            self._left_out, self._last_end = False, None
        elif self._warm:
            self._window.append(marks)
            self._samples += samples
        else:  # the first step has more to do than those that follow, and one with other gradients says so of each
            self._warm = True
            self._hook(*([] if self._last_gradient is None else [self._last_gradient]))
        self._advance(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_end = None

    on_train_epoch_start = on_validation_start

    def leave_out(self) -> None:
        """Leaves out the step at hand, or between two the next one, from the speed. All ranks leave out the same."""
        self._left_out = True

    def _advance(self, trainer: Trainer) -> None:
        """Takes the window that is over one step further: its times are known, are sent, have arrived."""
        step = trainer.global_step
        self._read(trainer)
        if step % self._steps == 0 and self._window:
            self._closed, self._window, self._samples = (step, self._window, self._samples), [], 0
        if self._closed and step >= self._closed[0] + (_LATER if self._stream else 0):
            row = torch.tensor(astuple(self._sum_up(*self._closed[1:])), dtype=torch.float64)
            self._rows = [row, *(torch.empty_like(row) for _ in range(1, trainer.world_size))]
            if trainer.world_size > 1:
                self._arriving = dist.all_gather(self._rows, row.clone(), group=self._group(), async_op=True)

    def _sum_up(self, window: Sequence[Marks], samples: int) -> Measured:
        """Returns the averages of a window, in seconds a step."""
        if self._stream:
            window[-1][-1][1].synchronize()  # of two steps ago: nothing to wait for
        spent: defaultdict[str, float] = defaultdict(float)
        for marks in window:
            whole = all(phase != "backward" for phase, _ in marks)  # a graph, in which nobody tells the passes apart
            for (phase, start), (_, end) in pairwise(marks):
                seconds = start.elapsed_time(end) / 1e3 if self._stream else end - start
                spent["rest" if whole and phase == "forward" else phase] += seconds / len(window)
        busy, self._busy = self._busy, (time.process_time(), time.perf_counter())
        return Measured(
            compute=sum(spent[phase] for phase in ("forward", "backward", "optimizer", "rest")),
            **{phase: spent[phase] for phase in ("data", "sync", "other", "forward", "backward", "optimizer")},
            samples=samples / len(window),
            host_memory=host_memory(),
            device_memory=float(torch.cuda.max_memory_allocated()) if self._stream else 0.0,
            cores=(self._busy[0] - busy[0]) / (self._busy[1] - busy[1] or 1.0),
            gpu=gpu_use() if self._stream else math.nan,
        )

    def _read(self, trainer: Trainer) -> None:
        """Reads what was sent at the last step, and has arrived by now: all ranks have met in that step's gradients since."""
        if not self._rows:
            return
        if self._arriving is not None:
            self._arriving.wait()
        assert self._closed is not None
        if trainer.is_global_zero:
            self._report(trainer, self._closed[0], [Measured(*row.tolist()) for row in self._rows])
        self._arriving, self._closed, self._rows = None, None, []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read(trainer)
        self._hook()
        self._learning, self._last_gradient = (), None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._rows = []

    def _report(self, trainer: Trainer, step: int, ranks: Sequence[Measured]) -> None:
        samples = sum(measured.samples for measured in ranks[:: data_ranks(trainer).shared_by])
        seconds = max(measured.total for measured in ranks)
        self.phases = {
            name: fmean(getattr(measured, _FIELDS.get(name, name)) / measured.total for measured in ranks)
            for name in PHASES
            if len(ranks) > 1 or name != "gradient_sync"
        }
        values = {f"speed/{name}": share for name, share in self.phases.items()}
        values["speed/samples_per_s"] = samples / seconds
        insort(self._speeds, samples / seconds)
        self.speed = median(self._speeds)
        if self._flops:
            achieved = self._flops * samples / seconds / len(ranks)
            values["speed/tflops"] = achieved / 1e12  # of one rank's device
            if self._peak:
                values["speed/mfu"] = achieved / self._peak
        if self._stragglers is not None:
            values["speed/worst_data"] = max(excess(ranks, "data"))
            values["speed/worst_compute"] = max(excess(ranks, "compute"))
            values |= self._stragglers.by_rank(ranks)
            for text in self._stragglers.compare(ranks):
                for life in callbacks_of(trainer, Life):
                    life.note(trainer, "straggler", text)
        values["run/memory_gb"] = max(measured.host_memory for measured in ranks) / 1e9
        values["run/cpu_cores"] = fmean(measured.cores for measured in ranks)
        if device := max(measured.device_memory for measured in ranks):
            values["run/gpu_memory_gb"] = device / 1e9
        if not math.isnan(use := fmean(measured.gpu for measured in ranks)):
            values["run/gpu_use"] = use
        for rate in learning_rates(trainer)[:1]:  # a module that logs no learning rate of its own has this one
            values[LEARNING_RATE] = float(rate)
        for logger in measurement_loggers(trainer):
            logger.log_metrics(values, step=step)
        self._seconds += seconds
        for name in {"data_wait", "gradient_sync"} & self.phases.keys():
            self._spent[name] += seconds * self.phases[name]
        self.shares = {name.replace("_", " "): self._spent[name] / self._seconds for name in sorted(self._spent)}


def host_memory() -> float:
    """Returns the bytes that this process has in the host's memory; its loader processes have their own."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):  # another system
        return 0.0


def gpu_use() -> float:
    """Returns the share of the last moments in which this rank's GPU computed; NaN without nvidia-ml-py (the extra gpu)."""
    try:
        return torch.cuda.utilization() / 100
    except Exception:
        return math.nan


# Slow ranks ----------------------------------------------------------------------------------------------------------


def excess(ranks: Sequence[Measured], cause: Cause) -> list[float]:
    """Returns each rank's own work, relative to the median rank's, if it differed in this alone: 1.0 is no slower."""
    reference, typical = _median_own(ranks), median_low(getattr(times, cause) for times in ranks)
    return [1 + (getattr(times, cause) - typical) / reference for times in ranks]


def _median_own(ranks: Sequence[Measured]) -> float:
    return median_low(times.own for times in ranks) or 1e-9


@dataclass
class Streak:
    """The windows in a row in which a rank was slow for one reason, or not slow."""

    cause: Cause | None = None
    windows: int = 0
    seconds: float = 0.0
    factors: deque[float] = field(default_factory=lambda: deque(maxlen=_IN_A_ROW))


class Stragglers:
    """Names a rank, with its host, when it has been slow for some windows of steps, and again when that has changed, or after
    a long time.
    """

    def __init__(self, hosts: Sequence[str], steps: int) -> None:
        self.hosts, self.steps = hosts, steps
        self._streaks = [Streak() for _ in hosts]
        self._named: dict[int, Cause] = {}

    def by_rank(self, ranks: Sequence[Measured]) -> dict[str, float]:
        """Returns curves of each rank's own work, with its host in their names; of many ranks those of the slowest now."""
        slowest = sorted(range(len(ranks)), key=lambda rank: -ranks[rank].own)[:_CURVES]
        named = {f"{rank}.{short(self.hosts[rank])}": ranks[rank] for rank in sorted(slowest)}
        data = {f"ranks/data_ms/{name}": 1e3 * times.data for name, times in named.items()}
        return data | {f"ranks/compute_ms/{name}": 1e3 * times.compute for name, times in named.items()}

    def compare(self, ranks: Sequence[Measured]) -> list[str]:
        """Compares the times of one window, by rank, and returns a text for each rank that is reported as slow."""
        named = []
        reference, by_data, by_compute = _median_own(ranks), excess(ranks, "data"), excess(ranks, "compute")
        for rank, times in enumerate(ranks):
            cause: Cause | None = "data" if by_data[rank] > by_compute[rank] else "compute"
            if times.own / reference < _SLOW:
                cause = None
            if self._streaks[rank].cause != cause:
                self._streaks[rank] = Streak(cause)
            streak = self._streaks[rank]
            streak.windows += 1
            streak.seconds += times.total * self.steps
            streak.factors.append(times.own / reference)
            if streak.windows >= _IN_A_ROW and streak.seconds >= _AT_LEAST:
                named += self._report(rank, streak, ranks)
        return named

    def _report(self, rank: int, streak: Streak, ranks: Sequence[Measured]) -> list[str]:
        cause = streak.cause
        if cause is None:
            if self._named.pop(rank, None):
                log.info("Rank %d, %s, keeps pace again.", rank, self.hosts[rank])
        elif cause != self._named.get(rank) or streak.windows % _AGAIN == 0:
            self._named[rank] = cause
            log.warning(
                "Rank %d, %s, is slow, and all wait for it: its own work is %.1f times the usual rank's, because of its %s "
                "(%.3g ms a step, usually %.3g), and was for %d steps. HINT: %s",
                *(rank, self.hosts[rank], median(streak.factors), cause, 1e3 * getattr(ranks[rank], cause)),
                *(1e3 * median_low(getattr(times, cause) for times in ranks), streak.windows * self.steps, _HINTS[cause]),
            )
            return [f"rank {rank}, {self.hosts[rank]}, is slow because of its {cause}, and all wait for it"]
        return []
