"""Small modules and data for test_prove.py: one that keeps the promise, and some that break it."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate


class Kept(LightningModule):
    """Dropout, a schedule by epoch, and values logged in a step and over an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))

    def scale(self) -> float:
        return 1.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.network(batch[0]), batch[1]) * self.scale()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.network(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


class Counts(Kept):
    """Its loss depends on a number that is in no state."""

    counter = 0

    def scale(self) -> float:
        self.counter += 1
        return 1 + 0.01 * self.counter


class Draws(Kept):
    """Its loss depends on a generator whose state nobody saves."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(3)

    def scale(self) -> float:
        return 1 + 0.1 * float(torch.rand((), generator=self.noise))


class Moves(Kept):
    """Each rank moves a buffer by its own micro-batches. No loss goes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.mean = self.mean * 0.9 + batch[0].mean(0)
        return super().training_step(batch, batch_idx)


def by_hash(items: list[Any]) -> list[Tensor]:
    """Goes by the order of a set of strings, which is another one in each Python."""
    points, sums = default_collate(items)
    first = next(iter({f"{number}" for number in range(1000)}))
    return [points + int(first) / 1000, sums]


class Noise:
    """Puts a batch together with noise of a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, items: list[Any]) -> list[Tensor]:
        points, sums = default_collate(items)
        return [points + float(self.generator.random()), sums]


class Points(LightningDataModule):
    def __init__(self, batch_size: int = 4, num_workers: int = 0, hashes: bool = False, draws: bool = False) -> None:
        super().__init__()
        collate = by_hash if hashes else Noise() if draws else None
        self.settings = {"batch_size": batch_size, "num_workers": num_workers, "collate_fn": collate}

    def _loader(self, size: int, shuffle: bool) -> Any:
        points = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))
        return DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), shuffle=shuffle, **self.settings)  # type: ignore[arg-type]

    def train_dataloader(self) -> Any:
        return self._loader(200, True)

    def val_dataloader(self) -> Any:
        return self._loader(30, False)


class Fails(Kept):
    """Has an error of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            raise KeyError("labels")
        return super().training_step(batch, batch_idx)
