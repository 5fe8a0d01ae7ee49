"""Modules and data of somebody who knows nothing of this project, and what they saw."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanAbsoluteError,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    MinMetric,
    R2Score,
    SpearmanCorrCoef,
    SumMetric,
)


class Points(Dataset[dict[str, Any]]):
    """Items that are no images, with noise that is drawn anew each time."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        point = torch.randn(6, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"name": f"point {index}", "point": point + 0.1 * torch.randn(6), "sum": point.sum(0, keepdim=True)}


def write_texts(folder: Path, files: int = 64) -> Path:
    """Small texts for a language model, the same every time."""
    folder.mkdir()
    for number in range(files):
        (folder / f"{number}.txt").write_text(f"File {number} says {number * number}, and {number % 7} times so.\n" * 2)
    return folder


class PointsData(LightningDataModule):
    def __init__(self, size: int = 50, batch_size: int = 2, num_workers: int = 0) -> None:
        super().__init__()
        self.size, self.settings = size, {"batch_size": batch_size, "num_workers": num_workers}

    def train_dataloader(self) -> Any:
        return DataLoader(Points(self.size), shuffle=True, **self.settings)

    def val_dataloader(self) -> Any:
        return [DataLoader(Points(7), **self.settings), DataLoader(Points(11), **self.settings)]


class Regression(LightningModule):
    """Dropout, a schedule by epoch, and means over an epoch."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1)).double()
        self.error, self.largest = MeanSquaredError().double(), MaxMetric().double()
        self.sums = MetricCollection([CatMetric(), SumMetric()]).double()

    def loss(self, batch: dict[str, Any]) -> Tensor:
        return nn.functional.mse_loss(self.network(batch["point"]), batch["sum"])

    def count(self, batch: dict[str, Any]) -> None:
        """Logged as an object; counted by itself, with the epoch's result read in a hook."""
        self.error(self.network(batch["point"]).detach(), batch["sum"])
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.largest.update(batch["sum"])
        self.sums.update(batch["sum"])

    def on_train_epoch_end(self) -> None:
        values = self.sums.compute()
        self.log("samples", float(len(values["CatMetric"])))
        self.log("sum", values["SumMetric"])
        self.log("largest", self.largest.compute())
        self.sums.reset()
        self.largest.reset()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.count(batch)
        with Path(f"seen-{self.trainer.global_rank}.txt").open("a") as file:
            file.write(f"{self.trainer.global_step} {' '.join(name.split()[1] for name in batch['name'])}\n")
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)}


class Shaken(Regression):
    """Draws at the start of an epoch what its steps are scaled by."""

    scale = 1.0

    def on_train_epoch_start(self) -> None:
        self.scale = 1 + 0.1 * float(torch.rand(()))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale


class Logs(Regression):
    """Logs sums and extremes of its steps, and what it knows once a step."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        for name in ("sum", "max", "min"):
            self.log(f"step_{name}", batch["sum"].sum(), on_step=True, on_epoch=False, reduce_fx=name, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("step_end", batch["sum"].mean(), on_step=True, sync_dist=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("number", float(self.global_step), on_step=False, on_epoch=True, sync_dist=True)


class Contrasts(Regression):
    """Compares its samples with those of the other ranks, as SimCLR does."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        outputs = self.network(batch["point"])
        gathered = self.all_gather(outputs, sync_grads=True)
        return super().training_step(batch, batch_idx) + 0 * gathered.sum()


class Stepwise(Regression):
    """Logs a torchmetrics object for each step, too, and a loss of its rank alone."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.error(self.network(batch["point"]).detach(), batch["sum"])
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        pass


class Choosy(Regression):
    """Leaves out what it does not like: on rank 1, a micro-batch after some steps."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if self.trainer.global_rank == 1 and self.trainer.global_step == 2 else loss


class Duel(Regression):
    """Two networks with an optimiser each, which the module steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(6, 1).double()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc]
        for optimizer, loss in ((first, self.loss(batch)), (second, self.critic(batch["point"]).square().mean())):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()  # type: ignore[union-attr]
        self.log("loss", loss, on_epoch=True)
        self.count(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=self.lr)
        critic_optimizer = torch.optim.SGD(self.critic.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer, critic_optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Sparse(Regression):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 2, sparse=True).double()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        vectors = self.words((batch["point"][:, 0].abs() * 3).long().clamp(max=9))
        return self.loss(batch) + vectors.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Uneven(IterableDataset[dict[str, Any]]):
    """Rank 0 has 3 points, and each other rank 5 more than the one before it."""

    def __init__(self) -> None:
        self._numbers = range(3 + 5 * (dist.get_rank() if dist.is_initialized() else 0))

    def __iter__(self) -> Any:
        points = Points(100)
        return (points[number] for number in self._numbers)


class Sized(Uneven):
    """It says how many."""

    def __len__(self) -> int:
        return len(self._numbers)


class UnevenData(PointsData):
    """The ranks' evaluations are not of the same length."""

    def __init__(self, sized: bool) -> None:
        super().__init__()
        self.sized = sized

    def val_dataloader(self) -> Any:
        return DataLoader(Sized() if self.sized else Uneven(), batch_size=1)


class PairedData(PointsData):
    """A validation reads two loaders at the same time, in each epoch in another mode."""

    def val_dataloader(self) -> Any:
        modes: Any = ("max_size_cycle", "min_size", "max_size")
        loaders = {name: DataLoader(Points(size), batch_size=4) for name, size in (("long", 27), ("short", 9))}
        return CombinedLoader(loaders, modes[self.trainer.current_epoch])  # type: ignore[union-attr]


class Paired(Regression):
    """Its loss depends on which micro-batches meet."""

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        losses = [part["sum"].square().mean() for part in batch.values() if part is not None]
        self.log("val_loss", torch.stack(losses).prod(), sync_dist=True)


class Talkative(LightningModule):
    """Logs wherever it can, in each way; counts with metrics of each kind; draws numbers in its validation."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.recurrent = nn.Linear(6, 24), nn.LSTM(1, 12, batch_first=True)
        self.after = nn.Sequential(nn.LayerNorm(36), nn.GELU(), nn.Dropout(0.1), nn.Linear(36, 1))
        self.error, self.listed = MeanSquaredError(), SpearmanCorrCoef()
        self.collection = MetricCollection(
            {"mse": MeanSquaredError(), "r2": R2Score(), "mae": MeanAbsoluteError()}, prefix="many/"
        )
        self.weighted, self.own_count, self.seen = MeanMetric(), MeanMetric(), CatMetric()
        self.best, self.scale, self.rare = MinMetric(), 1.0, MeanSquaredError()

    def on_train_epoch_start(self) -> None:
        self.scale = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())

    def forward(self, point: Tensor) -> Tensor:
        _, (hidden, _) = self.recurrent(point.unsqueeze(-1))
        prediction: Tensor = self.after(torch.cat([self.before(point), hidden[0]], 1))
        return prediction

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        point, target = batch["point"].float(), batch["sum"].float()
        share = float(np.random.beta(0.4, 0.4)) * random.random()
        prediction = self(share * point + (1 - share) * point.roll(1, 0))
        loss = nn.functional.smooth_l1_loss(prediction, target)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"most": prediction.max(), "fewest": prediction.min()}, on_step=True, on_epoch=True, reduce_fx="max")
        self.log("least", prediction.min(), reduce_fx="min", on_epoch=True)
        self.log("samples", float(len(point)), reduce_fx="sum", on_step=True, on_epoch=True, sync_dist=True)
        self.error(prediction, target)
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.own_count.update(loss.detach())
        for kind in (target * 2).long().unique().tolist():  # which micro-batch has which, chance says
            self.log(f"kind_{kind}", loss, on_step=True, on_epoch=True)
        if "point 7" in batch["name"]:  # on one rank, once in an epoch
            self.rare(prediction, target)
            self.log_dict({"rare_error": self.rare, "rare": loss}, on_step=False, on_epoch=True)
        if self.trainer.global_step % 2 == 0:
            self.log("sometimes", loss * 3, on_step=False, on_epoch=True)
        return loss * self.scale

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([parameter.grad.norm() for parameter in self.parameters() if parameter.grad is not None]).norm()
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(0.001 * torch.randn_like(parameter.grad))
        self.log("norm", norm, on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("again", outputs["loss"], on_step=True, on_epoch=True)
        if outputs["loss"] > 0.2:
            self.log("hard", outputs["loss"], on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("counted", self.own_count.compute())
        self.own_count.reset()

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        point, target = batch["point"].float(), batch["sum"].float()
        prediction = self(point + 0.01 * torch.randn_like(point))
        self.log("val_loss", nn.functional.mse_loss(prediction, target))
        self.log("val_most", prediction.max(), reduce_fx=max)
        self.collection.update(prediction, target)
        self.listed.update(prediction.flatten(), target.flatten())
        self.weighted.update(prediction.flatten(), target.flatten().abs())
        self.seen.update(prediction.flatten())

    def on_validation_epoch_end(self) -> None:
        metrics = self.collection.compute()
        self.log_dict(metrics)
        self.best.update(metrics["many/mse"])
        self.log("best", self.best.compute())
        self.log("drawn", torch.rand(()))
        self.log("rank_correlation", self.listed.compute())
        self.log("weighted", self.weighted.compute())
        seen = self.seen.compute()
        self.log("in_order", (seen * torch.arange(len(seen))).sum())
        for metric in (self.collection, self.listed, self.weighted, self.seen):
            metric.reset()

    def configure_optimizers(self) -> Any:
        decayed = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        groups = [
            {"params": decayed},
            {"params": [parameter for parameter in self.parameters() if parameter.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "rank_correlation"}}


class LosesDatabase(Callback):
    """Raises, on the last rank, an error whose words are those of a connection between ranks."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == trainer.world_size - 1 and trainer.global_step == 2:
            raise RuntimeError("the database connection was closed")
