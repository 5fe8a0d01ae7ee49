"""Callbacks for runs on the stand-in for a GPU: what a step costs the host, and what can go wrong on a device."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor

from project.sharded.shards import local

try:
    from tests.standin.emulate import DRIVER
except AttributeError:  # on a real GPU
    DRIVER = None


def write(trainer: Trainer, name: str, content: Any) -> None:
    Path(f"{name}-{trainer.global_rank}.json").write_text(json.dumps(content))


def steps_whole(trainer: Trainer, batch_idx: int) -> bool:
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


class Cost(Callback):
    """Writes what a step costs to cost-RANK.json: launches, those of graphs, and the host's milliseconds.

    It is the mean from one step to another. The milliseconds include the CPU's work for the device, unless STANDIN_EMULATE=0.
    """

    def __init__(self, first: int = 20, last: int = 40) -> None:
        self.first, self.last = first, last

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not steps_whole(trainer, batch_idx) or trainer.global_step not in (self.first, self.last):
            return
        launches = (DRIVER.standin_launches(), DRIVER.standin_graph_launches()) if DRIVER else (0, 0)
        now = (*launches, time.thread_time() * 1000)
        if trainer.global_step == self.first:
            self.start = now
            return
        spent = [(after - before) / (self.last - self.first) for before, after in zip(self.start, now, strict=True)]
        write(trainer, "cost", dict(zip(("launches", "graphs", "milliseconds"), spent, strict=True)))


class Contexts(Callback):
    """Writes the devices on which a rank has a context, and its own, to contexts-RANK.json after each epoch."""

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        every = range(torch.cuda.device_count())
        if DRIVER:
            bits = DRIVER.standin_contexts()
            devices = [device for device in every if bits >> device & 1]
        else:
            devices = [device for device in every if torch.cuda.memory_reserved(device)]
        write(trainer, "contexts", {"devices": devices, "own": trainer.strategy.root_device.index})


class Places(Callback):
    """Writes on which kinds of device the parameters lie at the end to places-RANK.json."""

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        write(trainer, "places", sorted({parameter.device.type for parameter in module.parameters()}))


class Waits(Callback):
    """Writes how often the host waits for a stream in an evaluation to waits-RANK.json."""

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.waits, self.synchronize = 0, torch.cuda.Stream.synchronize

        def synchronize(stream: torch.cuda.Stream) -> None:
            self.waits += 1
            self.synchronize(stream)

        torch.cuda.Stream.synchronize = synchronize  # type: ignore[method-assign]

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        torch.cuda.Stream.synchronize = self.synchronize  # type: ignore[method-assign]
        write(trainer, "waits", self.waits)


class Scale(Callback):
    """Begins with a loss scale, and writes the scale after each step to scale-RANK.json."""

    def __init__(self, initial: float) -> None:
        self.initial, self.scales = initial, dict[int, float]()

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.scaler: Any = getattr(trainer.precision_plugin, "scaler")  # noqa: B009 - the plugin of fp16 alone
        self.scaler._init_scale = self.initial

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if steps_whole(trainer, batch_idx):
            self.scales[trainer.global_step] = self.scaler.get_scale()
            write(trainer, "scale", self.scales)


class GpuFault(Callback):
    """Breaks something on a rank, once in a folder, before a step is taken.

    `how`: 'nan' poisons the batch; 'hang' is a kernel that spins for ever, 'assert' one that fails, 'allocate' an allocation
    that no GPU has memory for, 'abort' ends NCCL's connections, as a failing network does, 'kill' is SIGKILL. 'overflow' is an
    infinity in the gradient of a layer that ranks share, in each run.
    """

    def __init__(self, rank: int, step: int, how: str) -> None:
        self.rank, self.step, self.how = rank, step, how

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        if self.how == "overflow" and (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            parts = [
                parameter.grad
                for parameter in module.parameters()
                if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1
            ]
            for gradient in parts[:1]:
                if gradient is not None:  # of a step's last micro-batch
                    local(gradient)[0].fill_(torch.inf)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        struck = Path("struck")
        if self.how == "overflow" or (trainer.global_rank, trainer.global_step) != (self.rank, self.step) or struck.exists():
            return
        struck.touch()
        if self.how == "nan":
            batch["image"].fill_(torch.nan)
        elif self.how == "hang":
            torch.cuda._sleep(1 << 50)  # type: ignore[no-untyped-call]
        elif self.how == "allocate":
            torch.empty(1 << 50, dtype=torch.uint8, device=module.device)
        elif self.how == "assert":
            if DRIVER:
                DRIVER.standin_fail()
            else:
                torch.zeros(1, device=module.device)[torch.tensor([5], device=module.device)]
            torch.cuda.synchronize()
        elif self.how == "abort":
            dist.group.WORLD.abort()  # type: ignore[union-attr]
        else:
            os.kill(os.getpid(), signal.SIGKILL)
