"""Random numbers in the network (dropout, mixup): a function of the micro-batch, not of the rank or of what was before."""

import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from project.data.dealing import seed_generators
from project.data.order import chance
from project.train.micro_batch import evaluated, micro_batch

_BETWEEN = 1 << 40  # no micro-batch has this number
_EVALUATED, _STEP = 1 << 41, 1 << 42  # nor these


def seed_for_all(epoch: int) -> None:
    """The same on all ranks, and in a run that goes on: samplers of one's own draw an epoch's order when it begins."""
    _seed_all(chance(run_seed(), (epoch, 0, _BETWEEN)))


def run_seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def _seed_all(seed: int) -> None:
    """Torch's generators, Python's, and NumPy's, which mixup, for one, draws from."""
    seed_generators(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # by whoever trains on it
        torch.cuda.manual_seed(seed)


class ChanceByMicroBatch(Callback):
    """Seeds the generators before each micro-batch; in an evaluation always in the same way."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        _seed_all(micro_batch(trainer).seed)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # What is drawn between two steps (by a validation's sampler, say) is the same on all ranks.
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._between(trainer, _BETWEEN)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # And so is what is added to the gradients, or drawn by the optimiser: all ranks take the same step. A module that steps
        # by itself may do so in the middle of what the ranks draw each for its own samples.
        if pl_module.automatic_optimization:
            self._between(trainer, _STEP)

    def _between(self, trainer: Trainer, what: int) -> None:
        epoch, step, _ = micro_batch(trainer).key
        _seed_all(chance(run_seed(), (epoch, step, what)))

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if (found := evaluated(trainer)) is not None:
            loader, position = found
            _seed_all(chance(run_seed(), (loader, position, _EVALUATED)))

    on_test_batch_start = on_validation_batch_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._between(trainer, _BETWEEN)

    on_validation_epoch_end = on_validation_end
