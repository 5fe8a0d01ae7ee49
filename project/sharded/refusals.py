"""Refuses by name what can't be spread over the ranks; and finds the copies of a network that are spread with it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adagrad, Optimizer, Rprop
from torch.optim.swa_utils import AveragedModel

from project.errors import UserError
from project.typed import callbacks_of


def weight_averages(trainer: pl.Trainer) -> list[AveragedModel]:
    """Returns the averages of the weights that callbacks keep: copies of a network that is not spread yet."""
    if callbacks_of(trainer, StochasticWeightAveraging):
        raise UserError(
            "StochasticWeightAveraging keeps a whole network on each rank, and strategy=sharded has none. HINT: "
            "lightning.pytorch.callbacks.WeightAveraging or EMAWeightAveraging."
        )
    kept = (value for callback in callbacks_of(trainer, pl.Callback) for value in vars(callback).values())
    return [value for value in kept if isinstance(value, AveragedModel)]


@contextmanager
def averages_on_host(trainer: pl.Trainer) -> Iterator[None]:
    """Has copies of a network that is not sharded yet made in the host's memory: a device may be too small for one."""
    unplaced = [callback for callback in callbacks_of(trainer, WeightAveraging) if callback._device is None]
    for callback in unplaced:
        callback._device = torch.device("cpu")
    try:
        yield
    finally:
        for callback in unplaced:
            callback._device = None


def refuse_copies(trainer: pl.Trainer) -> None:
    """Refuses averages of a network that another fit of this process has spread: torch copies none that is."""
    averaging = callbacks_of(trainer, WeightAveraging)
    if averaging and isinstance(trainer.lightning_module, FSDPModule):
        raise UserError(
            f"strategy=sharded: {type(averaging[0]).__name__} copies the network, which an earlier fit of this process has "
            "spread over the ranks. HINT: fit a new module, from that fit's checkpoint (ckpt_path)."
        )


_WHOLE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
"""Optimisers of torch that compute with whole tensors."""


def prepare_optimizers(optimizers: Iterable[Optimizer], exact: bool) -> None:
    """Refuses optimisers that can't compute with shards, and chooses the implementations that can. `exact`: refuses also those
    with which a CPU rounds the last values of a shard otherwise than those before.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if type(optimizer).__module__.startswith("torch.optim") and name in _WHOLE:
            raise UserError(
                f"strategy=sharded: {name} computes with whole tensors, and each rank has a shard of them. HINT: AdamW, or "
                "strategy: ddp."
            )
        if "state" not in optimizer.state_dict():
            raise UserError(
                f"strategy=sharded: {name} saves its state in a layout of its own, of which a resumed run could not tell what "
                "is to be sharded. HINT: the optimiser within it, or strategy: ddp."
            )
        for group in optimizer.param_groups:
            if group.get("fused") and isinstance(optimizer, (SGD, Adagrad)):
                raise UserError(f"strategy=sharded: torch has no fused {name} for shards. HINT: leave out fused=true.")
            on_cpu = [parameter for parameter in group["params"] if parameter.device.type == "cpu"]
            if group.get("capturable") and on_cpu:
                raise UserError(
                    f"strategy=sharded: {name} with capturable=true steps on a GPU, and parameters lie on the host "
                    "(cpu_offload). HINT: leave out capturable=true."
                )
            if exact and on_cpu and (group.get("fused") or any(parameter.dtype.itemsize == 2 for parameter in on_cpu)):
                how = "fused=true" if group.get("fused") else "weights of 16 bits"
                raise UserError(
                    f"trainer.exact can't be kept: on a CPU, {name} with {how} rounds the last values of a tensor otherwise "
                    "than those before, and on other ranks shards end elsewhere. HINT: leave that out, or strategy: ddp."
                )
            if isinstance(optimizer, Rprop) and group.get("foreach") is None:
                group["foreach"] = False  # as torch chooses on a CPU: its other way has no copy for shards


def refuse_no_values(model: nn.Module) -> None:
    """Refuses a tensor that has no values, and a parameter that lies in the memory of another tensor, which it would leave."""
    places: dict[int, list[tuple[int, int, str, bool]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UserError(
                f"strategy=sharded: {name} lies on the meta device, without values. HINT: give it some before the fit begins."
            )
        if tensor.layout is not torch.strided or isinstance(tensor, DTensor) or is_lazy(tensor):
            continue
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start, learns = tensor.data_ptr(), isinstance(tensor, nn.Parameter)
        end = start + extent * tensor.element_size()
        others = places.setdefault(tensor.untyped_storage().data_ptr(), [])
        for first, last, other, other_learns in others if tensor.numel() else ():
            if first < end and start < last and (learns or other_learns):
                raise UserError(
                    f"strategy=sharded: {name} and {other} share memory, and are not the same parameter: sharded, they would "
                    "go on apart. HINT: let both modules hold the same parameter (a.weight = b.weight)."
                )
        others.append((start, end, name, learns))


def refuse_pruning(trainer: pl.Trainer) -> None:
    """Refuses ModelPruning, which needs whole tensors."""
    if callbacks_of(trainer, ModelPruning):
        raise UserError(
            "strategy=sharded: ModelPruning looks for the smallest weights of whole tensors, and each rank has a shard of "
            "them. HINT: strategy: ddp."
        )


def refuse_own_steps(module: pl.LightningModule) -> None:
    """Refuses a module that steps by itself: torch finds no backward pass within a step that goes through no block."""
    if not module.automatic_optimization:
        raise UserError(
            f"strategy=sharded: {type(module).__name__} steps its optimisers by itself (automatic_optimization is False), and "
            "gradients can be added up only when its training_step is over. HINT: strategy: ddp."
        )


def refuse_unshardable(name: str, block: nn.Module) -> None:
    """Raises a UserError for a parameter that `fully_shard` can't shard, or for a block of several dtypes."""
    own = {at: parameter for at, parameter in block.named_parameters(prefix=name) if not isinstance(parameter, DTensor)}
    if scalars := [at for at, parameter in own.items() if parameter.ndim == 0]:
        raise UserError(
            f"strategy=sharded: {scalars[0]} is one number without a dimension, and can't be spread. HINT: "
            "nn.Parameter(torch.tensor([...])), of one dimension."
        )
    if len(kinds := sorted({str(parameter.dtype) for parameter in own.values() if parameter.requires_grad})) > 1:
        raise UserError(
            f"strategy=sharded: the parameters of {name or 'what is in no block'} are {' and '.join(kinds)}, and what is "
            "gathered at once has one type. HINT: name smaller blocks, or give the module one type."
        )
