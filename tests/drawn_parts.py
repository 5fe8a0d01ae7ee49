"""A module, data and callbacks with many switches, of which tests/train/test_drawn.py draws configurations."""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError

Batch = dict[str, Tensor]


class Points(Dataset[Batch]):
    """Points with noise, which comes from one of the generators."""

    def __init__(self, size: int, noise: str = "none") -> None:
        self.size, self.noise = size, noise

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        point = torch.randn(6, generator=torch.Generator().manual_seed(index))
        drawn = {
            "none": lambda: torch.zeros(6),
            "torch": lambda: torch.randn(6),
            "numpy": lambda: torch.from_numpy(np.random.randn(6)).float(),
            "python": lambda: torch.tensor([random.random() for _ in range(6)]),
        }[self.noise]()
        return {"point": point + 0.1 * drawn, "sum": point.sum(0, keepdim=True)}


def stack(items: list[Batch]) -> Batch:
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def mix(items: list[Batch]) -> Batch:
    batch, share = stack(items), float(np.random.beta(0.4, 0.4))
    return batch | {"point": share * batch["point"] + (1 - share) * batch["point"][torch.randperm(len(items))]}


class Data(LightningDataModule):
    def __init__(
        self,
        size: int = 50,
        workers: int = 0,
        noise: str = "none",
        mixes: bool = False,
        loaders: str = "one",
        tail: bool = True,
    ) -> None:
        super().__init__()
        self.size, self.noise, self.loaders = size, noise, loaders
        self.settings: Any = {
            "batch_size": 2,
            "num_workers": workers,
            "collate_fn": mix if mixes else stack,
            "drop_last": not tail,
        }

    def _loader(self, size: int) -> DataLoader[Batch]:
        return DataLoader(Points(size, self.noise), shuffle=True, **self.settings)

    def train_dataloader(self) -> Any:
        if self.loaders == "one":
            return self._loader(self.size)
        both = {"long": self._loader(self.size), "short": self._loader(self.size // 2)}
        return both if self.loaders == "dict" else CombinedLoader(both, self.loaders)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader(Points(11), batch_size=2, collate_fn=stack)


class Net(LightningModule):
    """Draws, counts and logs in many places."""

    def __init__(
        self,
        optimizer: str = "SGD",
        schedule: str = "none",
        interval: str = "epoch",
        frequency: int = 1,
        norm: str = "none",
        dropout: float = 0.0,
        log_by: str = "both",
        sync: bool = False,
        metric: str = "object",
        draws: bool = False,
        teacher: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Linear(6, 16)
        self.norm = {"none": nn.Identity, "layer": lambda: nn.LayerNorm(16), "group": lambda: nn.GroupNorm(4, 16)}[norm]()
        self.rest = nn.Sequential(nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, 1))
        self.error, self.mean, self.val_error, self.worst = MeanSquaredError(), MeanMetric(), MeanSquaredError(), MaxMetric()
        if teacher:
            self.teacher = nn.Linear(6, 16).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.scale = 1.0

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        point = batch["point"].to(self.rest[2].weight.dtype)
        outputs = self.rest(self.norm(self.first(point)))
        target = batch["sum"].to(outputs.dtype)
        loss = nn.functional.mse_loss(outputs, target)
        if self.training and self.hparams["teacher"]:
            loss = loss + 0.1 * nn.functional.mse_loss(self.first(point), self.teacher(point).detach())
        return loss, outputs.detach(), target

    def on_train_epoch_start(self) -> None:
        if self.hparams["draws"]:
            self.scale = 1 + 0.1 * (random.random() + float(np.random.rand()) + float(torch.rand(())))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [batch] if "point" in batch else [part for part in batch.values() if part is not None]
        computed = [self.loss(part) for part in parts]
        loss = torch.stack([loss for loss, *_ in computed]).sum()
        if self.hparams["draws"]:
            loss = loss + 0.01 * float(torch.rand(())) * loss.detach()
        of, sync = self.hparams["log_by"], self.hparams["sync"]
        if of != "none":
            self.log("loss", loss, on_step=of != "epoch", on_epoch=of != "step", sync_dist=sync)
            self.log("most", loss.detach(), on_step=True, on_epoch=True, reduce_fx="max", sync_dist=sync)
        if self.hparams["metric"] == "object":
            self.error(*computed[0][1:])
            self.log("error", self.error, on_step=False, on_epoch=True)
        else:
            self.mean.update(loss.detach())
        return loss * self.scale

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.steps += 1
            if self.hparams["teacher"]:
                for slow, fast in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                    slow.mul_(0.9).add_(0.1 * fast)

    def on_train_epoch_end(self) -> None:
        if self.hparams["metric"] == "computed":
            self.log("mean", self.mean.compute())
            self.mean.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss, outputs, target = self.loss(batch)
        self.val_error(outputs, target)
        self.log_dict({"val_loss": loss, "val_error": self.val_error}, batch_size=len(target))

    def on_validation_epoch_end(self) -> None:
        self.worst.update(self.val_error.compute())
        self.log("worst", self.worst.compute())

    def configure_optimizers(self) -> Any:
        learning = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [{"params": learning[:1]}, {"params": learning[1:], "weight_decay": 0.0}]
        optimizer = getattr(torch.optim, self.hparams["optimizer"])(groups, lr=0.02)
        made = {
            "none": lambda: None,
            "exponential": lambda: lr_scheduler.ExponentialLR(optimizer, 0.9),
            "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
            "warm restarts": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
            "sequence": lambda: lr_scheduler.SequentialLR(
                optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(optimizer, 10)], [3]
            ),
        }[self.hparams["schedule"]]()
        how = {"scheduler": made, "interval": self.hparams["interval"], "frequency": self.hparams["frequency"]}
        if self.hparams["schedule"] == "plateau":
            how |= {"interval": "epoch", "monitor": "val_loss", "strict": False}
        return optimizer if made is None else {"optimizer": optimizer, "lr_scheduler": how}


class Kicks(Callback):
    """Moves a weight after each step, by a state that it saves."""

    def __init__(self) -> None:
        self.kick = 0.0

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.kick = 0.5 * self.kick + 1e-5
            with torch.no_grad():
                module.first.bias += self.kick

    def state_dict(self) -> dict[str, Any]:
        return {"kick": self.kick}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kick = state["kick"]


class Meters(Callback):
    """Counts steps, and logs at the ends of epochs."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen += batch_idx % trainer.accumulate_grad_batches == 0

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self.log("seen", float(self.seen))

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.log("drawn", float(self.seen) + float(torch.rand(())))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Unfreezes(Callback):
    """The first layer learns from the second epoch on."""

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        for parameter in module.first.parameters():
            parameter.requires_grad_(trainer.current_epoch > 0)
