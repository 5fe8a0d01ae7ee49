"""What can't be spread over the ranks, and is refused by name; and the copies of a network that are spread with it."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from project.errors import UserError


def averages(trainer: pl.Trainer) -> list[AveragedModel]:
    """The averages of the weights that callbacks keep: copies of a network that is not spread yet."""
    found = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            raise UserError(
                "StochasticWeightAveraging keeps a whole network on each rank, and strategy=sharded has none. HINT: "
                "lightning.pytorch.callbacks.WeightAveraging or EMAWeightAveraging."
            )
        found += [one for one in vars(callback).values() if isinstance(one, AveragedModel)]
    return found


def refuse_no_values(model: nn.Module) -> None:
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        if one.is_meta:
            raise UserError(
                f"strategy=sharded: {name} has no values. HINT: if it was not made on the meta device on purpose, set the "
                "strategy's deferred: false, which builds the network whole on each rank."
            )


def refuse_own_steps(module: pl.LightningModule) -> None:
    """Their backward passes lie within a step, and torch finds none that goes through no block: its gradients stayed unseen."""
    if not module.automatic_optimization:
        raise UserError(
            f"strategy=sharded: {type(module).__name__} steps its optimisers by itself (automatic_optimization is False), and "
            "gradients can be added up only when its training_step is over. HINT: strategy: ddp."
        )


def refuse_what_cant_be(name: str, block: nn.Module) -> None:
    own = {at: one for at, one in block.named_parameters(prefix=name) if one.requires_grad and not isinstance(one, DTensor)}
    if scalars := [at for at, one in own.items() if one.ndim == 0]:
        raise UserError(
            f"strategy=sharded: {scalars[0]} is one number without a dimension, and can't be spread. HINT: "
            "nn.Parameter(torch.tensor([...])), of one dimension."
        )
    if len(kinds := sorted({str(one.dtype) for one in own.values()})) > 1:
        raise UserError(
            f"strategy=sharded: the parameters of {name or 'what is in no block'} are {' and '.join(kinds)}, and what is "
            "gathered at once has one type. HINT: name smaller blocks, or give the module one type."
        )
