"""Where the time of a step goes: waiting for data, computing, waiting for the other ranks' gradients; and how fast that is.

Lightning's ThroughputMonitor waits for the device at each log point and knows one rank. Here the ranks' times are collected
once in a window of steps, by one small all-gather that is read a step later; on a GPU they are read from events that have
long passed. TensorBoard gets them under speed/; `Stragglers` compares them.
"""

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from project.cluster.group import Group
from project.cluster.launcher import host
from project.errors import UserError
from project.train.loop import fetching
from project.train.micro_batch import micro_batch
from project.watch.stragglers import Stragglers, Times, excess

log = logging.getLogger(__name__)

_LATER = 2  # steps until a GPU has surely passed an event
_COMPUTES_IN = {
    "16": torch.float16,
    "bf16": torch.bfloat16,
    "32": torch.float32,
    "64": torch.float64,
    "transformer": torch.int8,
}
"""By what `trainer.precision` begins with."""
Mark = Any  # a moment: seconds, or an event on the device


@dataclass
class StepTimes:
    """The moments of one step."""

    before: Mark = None  # the end of the last step, unless there was a validation in between
    fetches: list[tuple[Mark, Mark]] = field(default_factory=list)  # of each micro-batch
    own_work: Mark = None  # the last gradient is there; from here on it is the others' turn
    backward: Mark = None
    end: Mark = None
    samples: int = 0


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
        self._steps = 0
        self._group = Group()
        self._stragglers: Stragglers | None = None
        self._hooks: list[Any] = []
        self._last_gradient: Tensor | None = None
        self._flops: float | None = None  # for a sample
        self._peak: int | None = None
        self._on_gpu = False
        self._forget()

    def _forget(self) -> None:
        self._step: StepTimes | None = None
        self._fetching: Mark = None
        self._last_end: Mark = None
        self._window: list[StepTimes] = []
        self._closed: tuple[int, list[StepTimes]] | None = None
        self._rows: list[Tensor] = []
        self._arriving: Any = None
        self._warm = False
        self._spent, self._seconds = [0.0, 0.0], 0.0

    # Set up ----------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        self._steps = self.every_n_steps or max(10, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        self._on_gpu = pl_module.device.type == "cuda"
        if trainer.world_size > 1:
            if dist.get_backend() != "gloo":
                self._group.make()  # on the host, beside what the GPUs send each other
            hosts: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(hosts, host(), group=self._group())
            self._stragglers = Stragglers(hosts, self._steps)
            # Which gradient comes last, the first step shows: each says when it is there.
            self._hook(*(parameter for parameter in pl_module.parameters() if parameter.requires_grad))
        fetching(trainer, self._fetch, self._fetched)

    def _hook(self, *parameters: Tensor) -> None:
        """Only these say when their gradient is there."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]

    # Moments ---------------------------------------------------------------------------------------------------------

    def _now(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds_between(self, start: Mark, end: Mark) -> float:
        return start.elapsed_time(end) / 1e3 if self._on_gpu else end - start  # type: ignore[no-any-return]

    def _fetch(self) -> None:
        self._step = self._step or StepTimes(self._last_end)
        self._fetching = self._now()

    def _fetched(self) -> None:
        assert self._step is not None
        self._step.fetches.append((self._fetching, self._now()))

    def _gradient(self, parameter: Tensor) -> None:
        self._last_gradient = parameter
        if self._step is not None:
            self._step.own_work = self._now()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._warm and self._flops is None and trainer.is_global_zero:
            self._count_flops(trainer, pl_module, batch)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._step is not None:
            self._step.backward = self._now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._step is None:
            return
        self._step.samples += micro_batch(trainer).size
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._step.end = self._last_end = self._now()
        if self._warm:
            self._window.append(self._step)
        else:  # the first step has more to do than those that follow
            self._warm = True
            self._hook(*([] if self._last_gradient is None else [self._last_gradient]))
        self._step = None
        self._advance(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_end = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_end = None

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
        row = self._sum_up(self._closed[1])
        self._rows = [torch.empty_like(row) for _ in range(trainer.world_size)]
        if trainer.world_size > 1:
            self._arriving = dist.all_gather(self._rows, row, group=self._group(), async_op=True)
        else:
            self._rows = [row]

    def _sum_up(self, window: list[StepTimes]) -> Tensor:
        """Seconds a step in data, compute, gradient sync and between steps; samples a step."""
        if self._on_gpu:
            window[-1].end.synchronize()  # of two steps ago: nothing to wait for
        data = sync = work = between = 0.0
        for step in window:
            data += sum(self._seconds_between(*fetch) for fetch in step.fetches)
            work += self._seconds_between(step.fetches[0][0], step.end)
            if step.before is not None:
                between += self._seconds_between(step.before, step.fetches[0][0])
            if step.own_work is not None:
                sync += self._seconds_between(step.own_work, step.backward)
        samples = sum(step.samples for step in window)
        return torch.tensor([data, work - data - sync, sync, between, samples], dtype=torch.float64) / len(window)

    def _read(self, trainer: Trainer) -> None:
        """What was sent at the last step has arrived by now: all ranks have met in that step's gradients since."""
        if not self._rows:
            return
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        assert self._closed is not None
        step = self._closed[0]
        rows = [row.tolist() for row in self._rows]
        self._closed, self._rows = None, []
        self._report(trainer, step, [Times(*row[:4]) for row in rows], sum(row[4] for row in rows))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read(trainer)
        self._hook()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._rows = []

    # What is said ----------------------------------------------------------------------------------------------------

    def _report(self, trainer: Trainer, step: int, ranks: list[Times], samples: float) -> None:
        if not trainer.is_global_zero:
            return
        seconds = max(times.total for times in ranks)
        spent = {name: sum(getattr(times, name) / times.total for times in ranks) / len(ranks) for name in ("data", "sync")}
        values = {"speed/samples_per_s": samples / seconds, "speed/data_wait": spent["data"]}
        if self._flops:
            achieved = self._flops * samples / seconds / len(ranks)
            values["speed/tflops"] = achieved / 1e12  # of one rank's device
            if self._peak:
                values["speed/mfu"] = achieved / self._peak
        if self._stragglers is not None:
            values["speed/gradient_sync"] = spent["sync"]
            values["speed/worst_data"] = max(excess(ranks, "data"))
            values["speed/worst_compute"] = max(excess(ranks, "compute"))
            self._stragglers.compare(ranks)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
        self._keep(seconds, spent)

    def _keep(self, seconds: float, spent: dict[str, float]) -> None:
        self._seconds += seconds
        self._spent = [total + seconds * spent[name] for total, name in zip(self._spent, ("data", "sync"), strict=True)]
        self.shares = {"data wait": self._spent[0] / self._seconds}
        if self._stragglers is not None:
            self.shares["gradient sync"] = self._spent[1] / self._seconds

    def _count_flops(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        if isinstance(batch, dict) and isinstance(images := batch.get("image"), Tensor):
            self._flops = flops(getattr(module, "network", None), images.shape[1:])
        self._peak = peak(trainer)


def peak(trainer: Trainer) -> int | None:
    """Floating-point operations a second that a rank's device can do in this precision, where Lightning knows it."""
    try:
        computes, _, _ = str(trainer.precision).partition("-")
        return get_available_flops(trainer.strategy.root_device, _COMPUTES_IN[computes])
    except Exception as error:  # a precision, or a device, of one's own
        log.debug("The peak of this device can't be told: %s", error)
        return None


def flops(network: Any, shape: Sequence[int]) -> float:
    """Floating-point operations for one image of this shape, forwards and backwards; 0 where they can't be counted.

    Counted on a twin that has shapes and no values.
    """
    if not isinstance(network, nn.Module):
        return 0.0
    try:
        shapes: dict[int, Any] = {}
        for tensor in chain(network.parameters(), network.buffers()):
            like = torch.empty_like(tensor, device="meta")
            shapes[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
        images = torch.empty(2, *shape, device="meta", dtype=next(network.parameters()).dtype)
        twin = copy.deepcopy(network, shapes)
        # What has no values has no anomalies either.
        unwatched = torch.autograd.set_detect_anomaly(False)
        with unwatched, torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
            twin(images).sum().backward()
    except Exception as error:  # a network may do what can't be done without values
        log.debug("The operations of this network can't be counted: %s", error)
        return 0.0
    return float(counter.get_total_flops() / len(images))
