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
    """Keeps the running statistics a function of the step's micro-batches.

    While a step is under way the layers' own buffers gather its mean; the running statistics are kept here, and put into the
    layers when something is about to read them. The sum over the ranks has a whole step to arrive: nobody waits for it.
    """

    def __init__(self) -> None:
        self._norms: list[tuple[_BatchNorm, float]] = []
        self._buffers: list[Tensor] = []
        self._running: list[Tensor] = []
        self._mean = torch.empty(0)
        self._sum: Any = None
        self._due = False
        self._skipped: bool | Tensor = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._norms = [
            (module, 0.1 if module.momentum is None else module.momentum)
            for module in pl_module.modules()
            if isinstance(module, _BatchNorm) and module.track_running_stats and module.running_mean is not None
        ]
        pairs = ((norm.running_mean, norm.running_var) for norm, _ in self._norms)
        self._buffers = [buffer for pair in pairs for buffer in pair if buffer is not None]
        self._running = [buffer.clone() for buffer in self._buffers]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        number = batch_idx % trainer.accumulate_grad_batches
        for norm, _ in self._norms:
            norm.momentum = 1 / (number + 1)  # a cumulative mean over this step's micro-batches

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._norms or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._absorb()
        # A step that was left out leaves no trace: neither here nor, as NaN, in the buffers of the next.
        self._skipped = getattr(trainer, "skipped", False)
        if self._skipped is True:
            torch._foreach_zero_(self._buffers)
            return
        self._mean = torch.cat([buffer.flatten() for buffer in self._buffers])
        if self._skipped is not False:
            torch._foreach_zero_(self._buffers)
        if trainer.world_size > 1:
            self._mean /= trainer.world_size
            self._sum = dist.all_reduce(self._mean, async_op=True)
        self._due = True

    def _absorb(self) -> None:
        """Moves the running statistics by the mean of the last step."""
        if not self._due:
            return
        self._due = False
        if self._sum is not None:
            self._sum.wait()
            self._sum = None
        if isinstance(self._skipped, Tensor):  # only the device knows
            self._mean = torch.where(self._skipped, torch.cat([buffer.flatten() for buffer in self._running]), self._mean)
        parts = torch.split(self._mean, [buffer.numel() for buffer in self._buffers])
        momenta = [momentum for _, momentum in self._norms for _ in range(2)]
        moves = torch._foreach_sub([part.view_as(b) for part, b in zip(parts, self._buffers, strict=True)], self._running)
        torch._foreach_mul_(moves, momenta)
        torch._foreach_add_(self._running, moves)

    def _publish(self) -> None:
        if self._norms:
            self._absorb()
            torch._foreach_copy_(self._buffers, self._running)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._publish()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._publish()  # in place: what the checkpoint holds are these very tensors

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._publish()
        for norm, momentum in self._norms:
            norm.momentum = momentum
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.fill_(trainer.global_step)
