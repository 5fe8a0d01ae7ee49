"""What ends a run in the same way however often it is started."""

import os
import signal
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from project.errors import UserError
from tests.own import Regression


class Broken(Regression):
    """Fails in its third step."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == 2:
            raise RuntimeError("a bug of the user's")
        return super().training_step(batch, batch_idx)


class Refused(Regression):
    """Refuses its setting on rank 1 alone."""

    def setup(self, stage: str) -> None:
        if self.trainer.global_rank == 1:
            raise UserError("That can't work. HINT: another value.")


class Unprepared(Regression):
    """Fails before anything is trained."""

    def setup(self, stage: str) -> None:
        raise RuntimeError("a bug of the user's")


class AlwaysKilled(Callback):
    """Kills rank 1 in its fourth step, whenever the run is started."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
