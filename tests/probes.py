"""Callbacks and datasets that tests plug in by class_path, to look inside a run that goes on in other processes."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import Dataset


class Record(Callback):
    """Writes what a rank saw to record-RANK.json in the working directory."""

    def __init__(self) -> None:
        self.steps: dict[int, list[int]] = {}
        self.weights: list[float] = []
        self.evaluated: Counter[int] = Counter()
        self.reductions: list[int] = []
        self._reduced = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wrapped = trainer.strategy.model
        if hasattr(wrapped, "register_comm_hook"):
            wrapped.register_comm_hook(None, self._reduce)

    def _reduce(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._reduced += 1
        return allreduce_hook(None, bucket)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.steps.setdefault(trainer.global_step, []).extend(batch["sample"].tolist())
        self.weights.append(batch["weight"])

    def on_train_batch_end(self, *args: Any) -> None:
        self.reductions.append(self._reduced)
        self._reduced = 0

    def on_validation_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.evaluated.update(batch["sample"].tolist())

    def on_test_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        self.evaluated.update(batch["sample"].tolist())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        seen = {
            "steps": self.steps,
            "weights": self.weights,
            "evaluated": self.evaluated,
            "reductions": self.reductions,
        }
        Path(f"record-{trainer.global_rank}.json").write_text(json.dumps(seen))


class Faulty(Dataset[Any]):
    """Random images; on the rank `on`, reading sample `at` raises an error or kills the process."""

    def __init__(self, size: int = 256, on: int = -1, at: int = 100, how: str = "raise") -> None:
        self.size, self.on, self.at, self.how = size, on, at, how

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        rank = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)
        if self.on in (rank, 99) and index >= self.at:
            if self.how == "kill":
                os.kill(os.getpid(), 9)
            raise KeyError("this dataset is broken")
        return torch.full((3, 8, 8), index % 256, dtype=torch.uint8), index % 10
