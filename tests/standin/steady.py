"""Callbacks that look at steps in which nothing changes: does the host wait for its GPU, and what would a bar show?"""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.standin.probes import steps_whole


class NoWaits(Callback):
    """Makes whatever lets the host wait for its GPU an error, from one step to another."""

    def __init__(self, first: int = 12, last: int = 18) -> None:
        self.first, self.last = first, last

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if steps_whole(trainer, batch_idx) and trainer.global_step in (self.first, self.last):
            torch.cuda.set_sync_debug_mode("error" if trainer.global_step == self.first else "default")
            Path(f"waited-{trainer.global_rank}").touch()


class Shown(Callback):
    """Writes what a bar would show of the loss at the end of each step: shown.json."""

    def __init__(self) -> None:
        self.shown = dict[int, Any]()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if steps_whole(trainer, batch_idx):
            self.shown[trainer.global_step] = trainer.progress_bar_metrics.get("train/loss")

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero:
            Path("shown.json").write_text(json.dumps(self.shown))
