"""Batch norm's running statistics, moved once a step by the mean over all its micro-batches, on whatever ranks they were.

PyTorch moves them at every forward pass, each rank by its own micro-batches, and DDP keeps rank 0's: they would depend on
the number of ranks and on accumulation. Here the last micro-batch of a step leaves the mean over this rank's, one small
all-reduce makes it the mean over all, and the usual momentum is applied to that.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


class StepStatistics(Callback):
    """Keeps the running statistics a function of the step's micro-batches."""

    def __init__(self) -> None:
        self._norms: list[tuple[_BatchNorm, float]] = []
        self._running: list[Tensor] = []
        self._before: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._norms = [
            (module, 0.1 if module.momentum is None else module.momentum)
            for module in pl_module.modules()
            if isinstance(module, _BatchNorm) and module.track_running_stats and module.running_mean is not None
        ]
        pairs = ((norm.running_mean, norm.running_var) for norm, _ in self._norms)
        self._running = [buffer for pair in pairs for buffer in pair if buffer is not None]
        self._before = [buffer.clone() for buffer in self._running]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._norms:
            return
        number = batch_idx % trainer.accumulate_grad_batches
        if number == 0:
            torch._foreach_copy_(self._before, self._running)
        for norm, _ in self._norms:
            norm.momentum = 1 / (number + 1)  # a cumulative mean over this step's micro-batches

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._norms or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if trainer.world_size > 1:
            flat = torch.cat([buffer.flatten() for buffer in self._running])
            dist.all_reduce(flat)
            flat /= trainer.world_size
            shares = torch.split(flat, [buffer.numel() for buffer in self._running])
            torch._foreach_copy_(self._running, [s.view_as(b) for s, b in zip(shares, self._running, strict=True)])
        momenta = [momentum for _, momentum in self._norms for _ in range(2)]
        # before + momentum * (mean - before)
        torch._foreach_sub_(self._running, self._before)
        torch._foreach_mul_(self._running, momenta)
        torch._foreach_add_(self._running, self._before)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for norm, momentum in self._norms:
            norm.momentum = momentum
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.fill_(trainer.global_step)
