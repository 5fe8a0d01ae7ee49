"""What makes a rank slow, a run differ from another, or a step fail, for the tests of this folder to plug in by class_path."""

import json
import os
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from project.data import Synthetic
from tests.survive.poison import Poisoned

MICRO_BATCHES = 2  # of a rank in a step
PAUSE = 0.02


def rank() -> int:
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


class SlowData(Dataset[Any]):
    """On rank 1, reading takes long from step `start` on until step `stop`."""

    def __init__(self, start: int, stop: int) -> None:
        self.images = Synthetic(image_size=8, train_size=4096).dataset("train")
        self.start, self.stop, self.read = start, stop, 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: Any) -> Any:
        step, self.read = self.read // MICRO_BATCHES, self.read + 1
        if rank() == 1 and self.start <= step < self.stop:
            time.sleep(PAUSE)
        return self.images.__getitems__(indices)


class Troubled(Poisoned):
    """Rank 1 takes long to read, and sample `at` is NaN."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if rank() == 1:
            time.sleep(PAUSE / 4)
        return super().__getitem__(index)


class SlowNetwork(nn.Sequential):
    """On rank 0, the forward pass takes long from step `start` on until step `stop`."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
        self.start, self.stop, self.passes = start, stop, 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training and images.device.type != "meta":
            step, self.passes = self.passes // MICRO_BATCHES, self.passes + 1
            if rank() == 0 and self.start <= step < self.stop:
                time.sleep(PAUSE)
        return super().forward(images)


class Collectives(Callback):
    """Counts what each step starts, and writes it to collectives-RANK.json."""

    def __init__(self) -> None:
        self.counts: dict[int, Counter[str]] = {}
        self.started: Counter[str] = Counter()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name in dist.__all__ if hasattr(dist, "__all__") else dir(dist):
            if name.startswith(
                ("all_", "broadcast", "gather", "reduce", "barrier", "scatter", "send", "recv", "isend", "irecv")
            ):
                self._watch(name)

    def _watch(self, name: str) -> None:
        call = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.started[name] += 1
            return call(*args, **kwargs)

        setattr(dist, name, counted)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.counts[trainer.global_step] = self.started = Counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Path(f"collectives-{trainer.global_rank}.json").write_text(json.dumps(self.counts))


class TooLarge(Callback):
    """On rank 1, step 3 wants more memory than there is."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            kept = [torch.ones(123, 457, dtype=torch.float64) for _ in range(2)]
            torch.empty(len(kept) << 50)


class NoProfiler(Callback):
    """torch's profiler can't begin."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        def start(self: Any) -> None:
            raise RuntimeError("not for you")

        torch.profiler.profile.start = start  # type: ignore[method-assign]


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


class Scrape(Callback):
    """Reads the run's metrics after a step, as a monitoring system would, and keeps the answer in a file."""

    def __init__(self, port: int, step: int) -> None:
        self.port, self.step = port, step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == self.step:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
                text = f"{answer.headers['Content-Type']}\n{answer.read().decode()}"
            Path("scraped").write_text(text)
