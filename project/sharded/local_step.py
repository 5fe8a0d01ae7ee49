"""Lets optimisers step on plain tensors: of each sharded parameter, this rank's shard.

An operator on DTensors takes tens of microseconds more than one on tensors, and milliseconds the first time: it computes where
its result is to lie. An optimiser that computes each element by itself gives the same bits on shards.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from project.sharded.shards import local, placed_like, total_norm
from project.step.gradients import with_gradients

_BY_ELEMENTS = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
}
"""Optimisers that compute each element by itself; a subclass may do anything."""


@contextmanager
def on_shards(optimizer: Optimizer) -> Iterator[None]:
    """Puts this rank's shards into an optimiser, in the places of sharded parameters, for one step."""
    if type(optimizer) not in _BY_ELEMENTS:
        yield
        return
    groups = [group["params"] for group in optimizer.param_groups]
    state = optimizer.state
    kept: dict[Tensor, dict[str, object]] = {}
    with _gradients_on_shards(parameter for parameters in groups for parameter in parameters) as shards:
        for parameter, shard in shards.items():
            if parameter in state:
                kept[parameter] = state.pop(parameter)
                with torch.no_grad():
                    state[shard] = {name: local(cast(Tensor, value)) for name, value in kept[parameter].items()}
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [shards.get(cast(DTensor, parameter), parameter) for parameter in parameters]
        try:
            yield
        finally:
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
            for parameter, shard in shards.items():
                if shard in state:
                    before = kept.get(parameter, {})
                    with torch.no_grad():
                        state[parameter] = {
                            name: _sharded(value, before.get(name), parameter) for name, value in state.pop(shard).items()
                        }


def _sharded(value: object, before: object, parameter: DTensor) -> object:
    """Returns a value of an optimiser's state as the state of a sharded parameter has it. `before`: the step's first one."""
    if isinstance(before, DTensor) and value is local(before):
        return before
    if isinstance(value, Tensor) and value.ndim and value.shape == local(parameter).shape:
        if value.device.type == parameter.device_mesh.device_type:
            return placed_like(value, parameter)
        placed = torch.empty_like(parameter.detach(), dtype=value.dtype)  # `placed_like` would move what lies on the host
        local(placed).copy_(value)
        return placed
    return value


@contextmanager
def _gradients_on_shards(parameters: Iterable[Tensor]) -> Iterator[dict[DTensor, Tensor]]:
    """Yields this rank's shard of each sharded parameter that has a gradient. Within the context each has its own."""
    with torch.no_grad():  # where a shard is always the same tensor
        shards = {each: local(each) for each in parameters if isinstance(each, DTensor) and each.grad is not None}
        for parameter, shard in shards.items():
            shard.grad = local(cast(Tensor, parameter.grad))
    try:
        yield shards
    finally:
        for shard in shards.values():
            shard.grad = None


def clip(parameters: Iterable[Tensor], most: float, norm: Tensor) -> Tensor:
    """Clips gradients whose norm over all ranks is known, and returns it."""
    parameters = [*parameters]
    with _gradients_on_shards(parameters) as shards:
        clip_grads_with_norm_([shards.get(cast(DTensor, parameter), parameter) for parameter in parameters], most, norm)
    return norm


def clip_by_norm(optimizer: Optimizer, most: float) -> None:
    """Takes the place of Lightning's `clip_grad_by_norm` where parameters are placed in several ways."""
    parameters = with_gradients(optimizer)
    clip(parameters, most, total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))
