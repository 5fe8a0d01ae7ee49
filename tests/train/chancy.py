"""A module and its data that draw random numbers wherever Lightning lets them."""

import os
import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, default_collate, random_split

from tests.own import Points, Regression


class DrawnData(LightningDataModule):
    """Draws its split, and mixes samples where it brings them together.

    `sampler`: 'usual', 'weighted', or 'ranks', which shuffles with another seed on each rank.
    """

    def __init__(self, num_workers: int = 0, sampler: str = "usual") -> None:
        super().__init__()
        self.num_workers, self.sampler = num_workers, sampler
        self.splits: list[Dataset[Any]] = []

    def setup(self, stage: str) -> None:
        self.splits = list(random_split(Points(60), [47, 13]))

    def mixed(self, items: list[Any]) -> Any:
        share = float(np.random.beta(0.4, 0.4)) * random.random() * float(torch.rand(()))
        batch = default_collate(items)
        return {**batch, "point": batch["point"] * (1 - share) + batch["point"].roll(1, 0) * share}

    def train_dataloader(self) -> Any:
        how: dict[str, Any] = {"shuffle": True}
        if self.sampler == "weighted":
            how = {"sampler": WeightedRandomSampler([1.0 + index % 5 for index in range(47)], 47)}
        elif self.sampler == "ranks":
            how["generator"] = torch.Generator().manual_seed(int(os.environ.get("LOCAL_RANK", 0)))
        return DataLoader(self.splits[0], batch_size=2, num_workers=self.num_workers, collate_fn=self.mixed, **how)

    def val_dataloader(self) -> Any:
        return DataLoader(self.splits[1], batch_size=2, num_workers=self.num_workers)


class Drawing(Regression):
    """Draws in each hook before, between and in its steps, and keeps what it has drawn."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.drawn: dict[str, float] = {}

    def draw(self, hook: str) -> float:
        self.drawn[hook] = float(torch.rand(())) + random.random() + float(np.random.rand())
        return self.drawn[hook]

    def setup(self, stage: str) -> None:
        self.draw("setup")

    def configure_optimizers(self) -> Any:
        self.lr *= 1 + 0.1 * self.draw("optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.draw("fit")

    def on_train_start(self) -> None:
        self.draw("train")

    def on_train_epoch_start(self) -> None:
        self.draw("epoch")

    def on_validation_epoch_end(self) -> None:
        self.draw("validation")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        torch.rand(3)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "point": batch["point"] + 0.1 * torch.randn_like(batch["point"])}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        kept = sum(self.drawn[hook] for hook in ("setup", "fit", "train", "epoch"))
        return super().training_step(batch, batch_idx) * (1 + 0.1 * kept)


class Moody(CSVLogger):
    """Draws when it is given the values of an epoch, which no hook knows of."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:  # type: ignore[override]
        random.random()
