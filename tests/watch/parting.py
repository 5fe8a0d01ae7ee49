"""What makes a run another one than it should be, for test_fingerprints.py to plug in by class_path."""

import os
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Noise(nn.Module):
    """Adds another noise in each program, in the first forward pass of a training."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            return images
        self.passes += 1
        generator = torch.Generator().manual_seed(time.time_ns())
        return images + (0.1 * torch.randn(images.shape, generator=generator) if self.passes == 1 else 0.0)


class Noisy(nn.Module):
    """A network with it in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.noise = nn.Conv2d(3, 4, 3), Noise()
        self.after = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.after(self.noise(self.before(images)))


class Spoil(Callback):
    """One bit of the weights of a rank is another after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            with torch.no_grad():
                next(pl_module.parameters()).view(torch.int32)[0, 0, 0, 0] ^= 1
            self.step = 0


class Labelled(LightningDataModule):
    """Images with labels, as pairs."""

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(24, 3, 4, 4), torch.randint(2, (24,))), 2)

    val_dataloader = train_dataloader


class RankClasses(LightningModule):
    """Has as many classes as its rank says."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(48, 6))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self.network(batch[0])[:, : 2 + int(os.environ.get("LOCAL_RANK", 0))]}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)
