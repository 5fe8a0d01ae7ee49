"""The time of a step, by its phases (waiting for data, forwards, backwards, waiting for peers' gradients, the optimiser,
and the rest), its speed, and its memory.

Lightning's ThroughputMonitor waits for the device at each log point and knows one rank. Here the ranks' times are collected
once in a window of steps, by one small all-gather that is read a step later; on a GPU they are read from events that have
long passed. TensorBoard gets them under speed/, ranks/ and run/; `Stragglers` compares them.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from project.cluster.group import Group
from project.cluster.place import host
from project.errors import UserError
from project.train.data_ranks import data_ranks
from project.train.logged import measurement_loggers
from project.train.loop import fetching
from project.train.micro_batch import micro_batch
from project.watch.flops import flops, peak
from project.watch.history import PHASES
from project.watch.measured import Mark, Measured, StepTimes, gpu_use, host_memory
from project.watch.stragglers import Stragglers, Times, excess

log = logging.getLogger(__name__)

_LATER = 2  # steps until a GPU has surely passed an event


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
        self._steps = 0
        self._group = Group()
        self._stragglers: Stragglers | None = None
        self._hooks: list[Any] = []
        self._last_gradient: Tensor | None = None
        self._flops: float | None = None  # for a sample
        self._peak: float | None = None
        self._on_gpu = False
        self._now: Callable[[], Mark] = time.perf_counter
        self._forget()

    def _forget(self) -> None:
        self._step: StepTimes | None = None
        self._fetching: Mark = None
        self._begun: Mark = None  # what goes on now: a forward or a backward pass
        self._busy = time.process_time(), time.perf_counter()
        self._last_end: Mark = None
        self._window: list[StepTimes] = []
        self._closed: tuple[int, list[StepTimes]] | None = None
        self._rows: list[Tensor] = []
        self._arriving: Any = None
        self._warm = self._left_out = False
        self._spent: dict[str, float] = {}
        self._seconds = 0.0

    # Set up ----------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        self._steps = self.every_n_steps or max(10, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        self._on_gpu = pl_module.device.type == "cuda"
        self._now = self._event if self._on_gpu else time.perf_counter
        self._stream = torch.cuda.current_stream() if self._on_gpu else None  # which takes longer to ask for than an event
        if trainer.world_size > 1:
            if dist.get_backend() != "gloo":
                self._group.make()  # on the host, beside what the GPUs send each other
            hosts: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(hosts, host(), group=self._group())
            self._stragglers = Stragglers(hosts, self._steps)
            # Which gradient comes last, the first step shows: each says when it is there.
            self._hook(trainer, *(parameter for parameter in pl_module.parameters() if parameter.requires_grad))
        fetching(trainer, self._fetch, self._fetched)

    def _hook(self, trainer: Trainer, *parameters: Tensor) -> None:
        """Hooks these parameters alone, which then report when their gradient is there."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._gradient, trainer)) for parameter in parameters
        ]

    # Moments ---------------------------------------------------------------------------------------------------------

    def _event(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _seconds_between(self, start: Mark, end: Mark) -> float:
        return start.elapsed_time(end) / 1e3 if self._on_gpu else end - start  # type: ignore[no-any-return]

    def _fetch(self) -> None:
        self._step = self._step or StepTimes(self._last_end)
        self._fetching = self._now()

    def _fetched(self) -> None:
        assert self._step is not None
        self._begun = self._now()
        self._step.fetches.append((self._fetching, self._begun))

    def _gradient(self, trainer: Trainer, parameter: Tensor) -> None:
        self._last_gradient = parameter
        if self._step is not None and len(self._step.forwards) > len(self._step.backwards):  # this pass is being timed
            self._step.own_work = self._now()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._warm and self._flops is None and trainer.is_global_zero:
            self._count_flops(trainer, pl_module, batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._step is not None:
            now = self._now()
            self._step.forwards.append((self._begun, now))
            self._begun = now

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._step is not None:
            now = self._now()
            self._step.backwards.append((self._begun, now))
            self._begun = now

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._step is not None:
            self._step.optimizer = self._now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._step is None:
            return
        self._step.samples += micro_batch(trainer).size
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._step.end = self._last_end = self._now()
        if self._left_out:
            self._left_out, self._last_end = False, None
        elif self._warm:
            self._window.append(self._step)
        else:  # the first step has more to do than those that follow
            self._warm = True
            self._hook(trainer, *([] if self._last_gradient is None else [self._last_gradient]))
        self._step = None
        self._advance(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_end = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_end = None

    def leave_out(self) -> None:
        """Leaves out the step at hand, or between two the next one, from the speed. All ranks leave out the same."""
        self._left_out = True

    # Windows ---------------------------------------------------------------------------------------------------------

    def _advance(self, trainer: Trainer) -> None:
        """Takes the window that is over one step further: its times are known, are sent, have arrived."""
        step = trainer.global_step
        self._read(trainer)
        if step % self._steps == 0 and self._window:
            self._closed, self._window = (step, self._window), []
        if self._closed and step >= self._closed[0] + (_LATER if self._on_gpu else 0):
            self._send(trainer)

    def _send(self, trainer: Trainer) -> None:
        assert self._closed is not None
        row = self._sum_up(self._closed[1]).row()
        self._rows = [torch.empty_like(row) for _ in range(trainer.world_size)]
        if trainer.world_size > 1:
            self._arriving = dist.all_gather(self._rows, row, group=self._group(), async_op=True)
        else:
            self._rows = [row]

    def _sum_up(self, window: list[StepTimes]) -> Measured:
        """Returns the averages of a window, in seconds a step."""
        if self._on_gpu:
            window[-1].end.synchronize()  # of two steps ago: nothing to wait for
        data = forward = backward = sync = optimizer = work = between = 0.0
        for step in window:
            data += sum(self._seconds_between(*span) for span in step.fetches)
            forward += sum(self._seconds_between(*span) for span in step.forwards)
            backward += sum(self._seconds_between(*span) for span in step.backwards)
            work += self._seconds_between(step.fetches[0][0], step.end)
            if step.before is not None:
                between += self._seconds_between(step.before, step.fetches[0][0])
            if step.own_work is not None and step.backwards:
                sync += self._seconds_between(step.own_work, step.backwards[-1][1])
            if step.optimizer is not None:
                optimizer += self._seconds_between(step.optimizer, step.end)
        phases = (data, work - data - sync, sync, between, forward, backward - sync, optimizer)
        samples = sum(step.samples for step in window)
        busy, self._busy = self._busy, (time.process_time(), time.perf_counter())
        return Measured(
            Times(*(seconds / len(window) for seconds in phases)),
            samples / len(window),
            host_memory(),
            float(torch.cuda.max_memory_allocated()) if self._on_gpu else 0.0,
            (self._busy[0] - busy[0]) / (self._busy[1] - busy[1] or 1.0),
            gpu_use() if self._on_gpu else math.nan,
        )

    def _read(self, trainer: Trainer) -> None:
        """Reads what was sent at the last step, and has arrived by now: all ranks have met in that step's gradients since."""
        if not self._rows:
            return
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        assert self._closed is not None
        step = self._closed[0]
        measurements = [Measured.of(row) for row in self._rows]
        self._closed, self._rows = None, []
        if trainer.is_global_zero:
            self._report(trainer, step, measurements)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read(trainer)
        self._hook(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._rows = []

    # What is said ----------------------------------------------------------------------------------------------------

    def _report(self, trainer: Trainer, step: int, measurements: Sequence[Measured]) -> None:
        ranks = [measured.times for measured in measurements]
        samples = sum(measured.samples for measured in measurements[:: data_ranks(trainer).shared_by])
        seconds = max(times.total for times in ranks)
        self.phases = {name: sum(getattr(times, name) / times.total for times in ranks) / len(ranks) for name in PHASES}
        if len(ranks) == 1:
            del self.phases["gradient_sync"]
        values = {f"speed/{name}": share for name, share in self.phases.items()}
        values["speed/samples_per_s"] = samples / seconds
        if self._flops:
            achieved = self._flops * samples / seconds / len(ranks)
            values["speed/tflops"] = achieved / 1e12  # of one rank's device
            if self._peak:
                values["speed/mfu"] = achieved / self._peak
        if self._stragglers is not None:
            values["speed/worst_data"] = max(excess(ranks, "data"))
            values["speed/worst_compute"] = max(excess(ranks, "compute"))
            values |= self._stragglers.by_rank(ranks)
            self._stragglers.compare(ranks)
        values["run/memory_gb"] = max(measured.host_memory for measured in measurements) / 1e9
        values["run/cpu_cores"] = sum(measured.cores for measured in measurements) / len(measurements)
        if device := max(measured.device_memory for measured in measurements):
            values["run/gpu_memory_gb"] = device / 1e9
        if not math.isnan(use := sum(measured.gpu for measured in measurements) / len(measurements)):
            values["run/gpu_use"] = use
        for logger in measurement_loggers(trainer):
            logger.log_metrics(values, step=step)
        self._keep(seconds)

    def _keep(self, seconds: float) -> None:
        self._seconds += seconds
        for name in ("data_wait", "gradient_sync"):
            if name in self.phases:
                self._spent[name] = self._spent.get(name, 0.0) + seconds * self.phases[name]
        self.shares = {name.replace("_", " "): spent / self._seconds for name, spent in self._spent.items()}

    def _count_flops(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        if isinstance(batch, dict) and isinstance(images := batch.get("image"), Tensor):
            self._flops = flops(getattr(module, "network", None), images.shape[1:])
        self._peak = peak(trainer)
