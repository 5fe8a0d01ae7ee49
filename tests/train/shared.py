"""Modules with a plan of their own for tensor parallelism, and what the tests of it plug in."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils.data import DataLoader

from project.watch.progress import Progress
from tests.own import Points, PointsData, Regression, Sized
from tests.train.gather import Poisoned


class Planned(Regression):
    """In float64 by itself. A layer that is cut, with dropout after it; logs a sum, and predicts."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        layers = (nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 7), nn.Dropout(0.2), nn.LayerNorm(7), nn.Linear(7, 1))
        self.network = nn.Sequential(*layers).double()

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        return {"network.0": ColwiseParallel(), "network.2": RowwiseParallel()}

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("count", float(len(batch["name"])), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return loss

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        numbers = torch.tensor([int(name.split()[1]) for name in batch["name"]])
        return {"sample": numbers, "label": numbers, "confidence": self.network(batch["point"])[:, 0]}


class PlannedAndPoisoned(Poisoned, Planned):
    """Its loss is not finite, once."""


class ByLightning(Planned):
    """Its steps are taken by Lightning's own loop."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


class Pixels(nn.Sequential):
    """Classifies images of 8 x 8, with a plan."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__(nn.Flatten(), nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, num_classes))

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        return {"1": ColwiseParallel(), "3": RowwiseParallel()}


class Tied(Planned):
    """A layer that the plan cuts has another one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 12).double()
        self.other.weight = self.network[0].weight


class Predicted(PointsData):
    def predict_dataloader(self) -> Any:
        return DataLoader(Points(11), batch_size=2)


class Streamed(PointsData):
    def train_dataloader(self) -> Any:
        return DataLoader(Sized(), batch_size=2)


class Agree(Callback):
    """Leaves whether what is not cut has the same bits on all ranks that share layers, and the samples that were counted:
    agree.json."""

    def __init__(self, shared_by: int) -> None:
        self.shared_by = shared_by

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parts = {name: parameter for name, parameter in pl_module.named_parameters() if isinstance(parameter, DTensor)}
        cut = [name for name, parameter in parts.items() if "tensor" in (parameter.device_mesh.mesh_dim_names or ())]
        alike = {name: parameter.to_local().tolist() for name, parameter in parts.items() if name not in cut}
        gathered: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(gathered, alike)
        groups = [gathered[at : at + self.shared_by] for at in range(0, len(gathered), self.shared_by)]
        if trainer.is_global_zero:
            (progress,) = (callback for callback in trainer.callbacks if isinstance(callback, Progress))
            progress._pause()
            report = {
                "whole": sorted(alike),
                "cut": sorted(cut),
                "agree": all(state == group[0] for group in groups for state in group),
                "samples": progress._trained,
            }
            Path("agree.json").write_text(json.dumps(report))
