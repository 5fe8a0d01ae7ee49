"""What the tests of sharded runs plug in, and modules that can't be sharded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from project.sharded import order
from project.step.state import micro_batch
from tests.own import Regression


def whole(tensor: Tensor) -> Tensor:
    gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered.detach().cpu().clone()


class Gather(Callback):
    """Leaves the weights, the optimiser and the average, whole: start.pt and, at the end, gathered.pt."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.leave(trainer, "start.pt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.leave(trainer, "gathered.pt")

    def leave(self, trainer: Trainer, file: str) -> None:
        averages = [
            value for callback in trainer.callbacks for value in vars(callback).values() if isinstance(value, AveragedModel)
        ]
        parameters = trainer.lightning_module.parameters()
        state = {
            "module": dict(trainer.lightning_module.state_dict()),
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "average": [dict(average.state_dict()) for average in averages],
            "spread": any(
                isinstance(parameter, DTensor) and parameter.to_local().numel() < parameter.numel() for parameter in parameters
            ),
        }
        gathered = apply_to_collection(state, Tensor, whole)
        if trainer.is_global_zero:
            torch.save(gathered, file)


class CountCollectives(Callback):
    """Counts this rank's calls of torch's reduce_scatter and all_gather in the training steps: collectives.json."""

    NAMES: ClassVar = {  # until torch 2.14, and since
        "reductions": ("reduce_scatter_tensor", "reduce_scatter_single"),
        "gathers": ("all_gather_into_tensor", "all_gather_single"),
    }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.calls, self.within = dict.fromkeys(self.NAMES, 0), False
        self.functions = {}
        for kind, names in self.NAMES.items():
            for name in names:
                if function := getattr(torch.distributed, name, None):
                    self.functions[name] = function
                    setattr(torch.distributed, name, self.counted(kind, function, trainer))

    def counted(self, kind: str, function: Callable[..., Any], trainer: Trainer) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            self.calls[kind] += trainer.training and not self.within  # one may call the other
            self.within = True
            try:
                return function(*args, **kwargs)
            finally:
                self.within = False

        return count

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, function in self.functions.items():
            setattr(torch.distributed, name, function)
        if trainer.is_global_zero:
            Path("collectives.json").write_text(json.dumps({"steps": trainer.global_step, **self.calls}))


def poisoned(trainer: Trainer) -> bool:
    """One micro-batch of the second step, whichever rank has it."""
    return bool(trainer.global_step == 1 and micro_batch(trainer).key[2] == 5)


class Poison(Callback):
    """Its gradient is not finite."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if poisoned(trainer):
            loss.register_hook(lambda gradient: gradient * torch.inf)


class Poisoned(Regression):
    """Its loss is not finite."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if poisoned(self.trainer) else loss


class Averaged(Regression):
    """Keeps averages of its loss in buffers of two types, by which each rank's own loss is divided."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.register_buffer("average", torch.ones(1, 3).double().T)
        self.register_buffer("coarse", torch.tensor(1.0))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.average.mul_(0.9).add_(0.1 * loss.detach())
        self.coarse.mul_(0.9).add_(0.1 * loss.detach())
        return loss / (self.average.mean() + self.coarse)


class Layer(nn.Module):
    """Computes with an attribute of its weight, as muP does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.recurrent = nn.Linear(6, 6), nn.LSTM(6, 6)
        self.inner.weight.scale = 0.5  # type: ignore[assignment]

    def forward(self, points: Tensor) -> Tensor:
        return points + self.recurrent(self.inner(points))[0] * self.inner.weight.scale


class Grouped(Regression):
    """Chooses groups by the types of layers, and by attributes of parameters."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.network = nn.Sequential(nn.ModuleList(Layer() for _ in range(2)), nn.Linear(6, 1)).double()
        for parameter in self.parameters():
            parameter.decays = parameter.ndim > 1  # type: ignore[attr-defined]

    def loss(self, batch: dict[str, Any]) -> Tensor:
        points = batch["point"]
        for layer in self.network[0]:
            points = layer(points)
        return nn.functional.mse_loss(self.network[1](points), batch["sum"])

    def count(self, batch: dict[str, Any]) -> None:
        self.sums.update(batch["sum"])
        self.largest.update(batch["sum"])

    def configure_optimizers(self) -> Any:
        layers = [parameter for part in self.modules() if type(part) is Layer for parameter in part.parameters()]
        decaying = [parameter for parameter in layers if parameter.decays]
        others = [parameter for parameter in self.parameters() if all(parameter is not each for each in decaying)]
        return torch.optim.AdamW(
            [{"params": decaying, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}], lr=self.lr
        )


class Stale(Regression):
    """Chooses its groups too early."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.groups = [{"params": list(self.network.parameters())}]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.groups, lr=self.lr)


class LateHook(Regression):
    def on_train_start(self) -> None:
        self.network[0].weight.register_hook(lambda gradient: gradient * 0)


class Normed(Regression):
    """Logs a norm of its gradient."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([parameter.grad.norm() for parameter in self.parameters() if parameter.grad is not None]).norm()
        self.log("norm", norm)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, points: Tensor) -> Tensor:
        return points + self.layer(points).tanh()


class Calling(Regression):
    """Calls equal blocks before its network: all of them, or others by the step, on all ranks alike."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def called(self) -> list[int]:
        """Returns the blocks to call, in their order."""
        return [block for block in range(3) if block != self.trainer.global_step % 4]

    def loss(self, batch: dict[str, Any]) -> Tensor:
        points = batch["point"]
        for block in self.called() if self.trainer.training else range(3):
            points = self.blocks[block](points)
        return super().loss({**batch, "point": points})


class Saving(Calling):
    """Reads all weights within its step, which frees what is gathered."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.state_dict()
        return loss


class OtherOrder(Calling):
    """Calls them in an order of each rank."""

    def called(self) -> list[int]:
        return [0, 1, 2] if self.trainer.global_rank == 0 else [0, 2, 1]


class Stray(Calling):
    """One rank calls fewer, at last."""

    def called(self) -> list[int]:
        order._PATIENCE = 1.0
        return [0, 1] if self.trainer.is_global_zero and self.trainer.global_step == 3 else [0, 1, 2]


class Heads(Calling):
    """Equal heads, of which each micro-batch takes one; they are in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(3))

    def called(self) -> list[int]:
        return [self.trainer.global_rank]


class Unit(Calling):
    """Normalises a weight as its step begins."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.network[0].weight.copy_(nn.functional.normalize(self.network[0].weight))
        return super().training_step(batch, batch_idx)
