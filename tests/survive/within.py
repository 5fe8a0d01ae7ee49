"""A network with all that a step's micro-batches change, and a callback that dumps a checkpoint in each hook of a step."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, MetricCollection

from project.typed import typed

_HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
_OF_NOW = ("loops", "callback_metrics", "logged_names", "changed_values")
"""Parts of a checkpoint that need not be the same: counters are written anew where a run resumes."""


class Counting(LightningModule):
    """Logs in several ways, counts in metrics, and moves buffers in each micro-batch (`moves`)."""

    def __init__(self, moves: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.mean, self.elements, self.moves = MeanMetric(), CatMetric(), moves
        self.collection = MetricCollection({"mse": MeanSquaredError(), "root": MeanSquaredError(squared=False)})
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(6), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        points, sums = batch["point"].float(), batch["sum"].float()
        if self.moves:
            self.count += len(points)
            self.total = self.total + points.sum(0)
        guesses = self.network(points)
        loss = (guesses - sums).square().mean()
        self.mean(loss.detach())
        self.elements.update(loss.detach())
        self.collection.update(guesses.detach(), sums)
        self.log("metric", self.mean, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("samples", float(len(points)), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", points.max(), reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        if self.global_step >= 2:
            self.log("late", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def plain(value: Any) -> Any:
    """Returns a copy that is compared by `==`, with tensors as their numbers."""
    if isinstance(value, Tensor):
        return str(value.dtype), repr(value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else repr(value)


class Dumps(Callback):
    """Compares a checkpoint of each hook within a step with that of the step's beginning. `steps`: in which it does so."""

    def __init__(self, steps: int = 99) -> None:
        self.steps, self.compared = steps, 0
        self.differing: list[str] = []
        for hook in _HOOKS:
            setattr(self, hook, self._compare)

    def _dump(self, trainer: Any) -> Any:
        checkpoint = typed(trainer).resuming.dump_checkpoint(weights_only=False)
        return {name: plain(part) for name, part in checkpoint.items() if name not in _OF_NOW}

    def on_step_begins(self, trainer: Any, pl_module: Any) -> None:
        self._before = self._dump(trainer) if trainer.global_step < self.steps else {}

    def _compare(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._before:
            self.compared += 1
            now = self._dump(trainer)
            names = {*now, *self._before}
            where = f"micro-batch {trainer.fit_loop.epoch_loop.batch_progress.current.ready}"
            self.differing += [f"{name} in {where}" for name in names if now.get(name) != self._before.get(name)]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.epoch_loop.accumulates():
            self._compare(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self.compared
        assert not self.differing
