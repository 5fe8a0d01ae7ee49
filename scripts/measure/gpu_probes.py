"""Callbacks that `gpu_checks.py` puts into runs: one looks whether the host waits for a GPU, the other breaks something."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer


class NoWaits(Callback):
    """From one step to another, whatever makes the host wait for a GPU is an error, unless waits are allowed.

    Writes how many steps it has looked at.
    """

    def __init__(self, first: int = 20, last: int = 50, allowed: bool = False) -> None:
        self.first, self.last, self.allowed, self.seen = first, last, allowed, 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        on_gpu = pl_module.device.type == "cuda" and not self.allowed
        if trainer.global_step == self.first and on_gpu:
            torch.cuda.set_sync_debug_mode("error")
        if self.first < trainer.global_step <= self.last:
            self.seen += 1
        if trainer.global_step == self.last:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
            if trainer.global_rank == 0:
                Path("looked.json").write_text(json.dumps({"steps": self.seen, "device": str(pl_module.device)}))


class Fault(Callback):
    """Breaks something on a rank, once in a folder, before so many steps are done.

    `how`: 'kill' is SIGKILL; 'hang' a kernel that spins for hours (without a GPU, a host that sleeps); 'abort' gives up NCCL's
    connections, as a failing network does.
    """

    def __init__(self, rank: int = 0, step: int = 20, how: str = "kill") -> None:
        self.rank, self.step, self.how = rank, step, how

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        struck = Path("struck")
        if (trainer.global_rank, trainer.global_step) != (self.rank, self.step) or struck.exists():
            return
        struck.write_text(str(time.time()))
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "abort":
            assert dist.group.WORLD is not None
            dist.group.WORLD.abort()
        elif pl_module.device.type == "cuda":
            torch.cuda._sleep(1 << 50)
        else:
            time.sleep(1e6)
