"""What makes a run not finite, for test_nonfinite.py to plug in by class_path."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import Dataset

from project.survive.nonfinite import NonFinite
from tests.probes import Dropped


class Poisoned(Dataset[Any]):
    """Images of noise; that of sample `at` is NaN."""

    def __init__(self, size: int = 250, at: int = -1) -> None:
        self.size, self.at = size, at

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.at:
            Path("struck").touch()
        image = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return image * torch.nan if index == self.at else image, index % 10


class _Backward(torch.autograd.Function):
    """Does nothing, but for an infinite gradient at its tenth call. A file counts them: a class would be named for that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        with Path("calls").open("a") as calls:
            number = calls.write(".") and calls.tell()
        if number == 10:
            Path("struck").touch()
            return gradients[0] * torch.inf
        return gradients[0]


class BadBackward(Dropped):
    """Losses are finite; the gradient of what comes before the last layer once is not."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        *layers, last = self.layers
        features = torch.nn.Sequential(*layers)(images)
        return last(_Backward.apply(features))


class Linear(torch.nn.Sequential):
    """Half precision on a CPU has few layers."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 10))


class Digest(Callback):
    """Writes what each rank ends up with to digest-RANK."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in pl_module.parameters()))
        Path(f"digest-{trainer.global_rank}").write_text(digest.hexdigest())


class AsOnGpu(Callback):
    """Lets a CPU be treated like a GPU: flags are read two steps later."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (callback,) = (callback for callback in trainer.callbacks if isinstance(callback, NonFinite))
        callback._late = True
