"""What an optimiser keeps for parameters of given shapes, whatever optimiser it is: it takes one step on paper."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from project.train.held import Shape
from project.train.on_paper import like, paper


class OptimizerState:
    """Of the optimisers that a module on paper configures.

    Of parameters alike, in one group, one is enough: its state is what any of them has.
    """

    def __init__(self, module: LightningModule) -> None:
        with paper():
            self._optimizers = [*optimizers(module.configure_optimizers())]
        self._given = [[[*group["params"]] for group in one.param_groups] for one in self._optimizers]

    def bytes(self, parts: int) -> int:
        """Of the first of so many ranks."""
        return sum(_state(one, given, parts) for one, given in zip(self._optimizers, self._given, strict=True))


def optimizers(configured: Any) -> Iterator[Optimizer]:
    """What `configure_optimizers` may return, without the schedules."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, Mapping):
        yield from optimizers(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        pair = len(configured) == 2 and all(isinstance(one, (list, tuple)) for one in configured)
        for one in configured[0] if pair else configured:
            yield from optimizers(one)


def _state(optimizer: Optimizer, given: list[list[Tensor]], parts: int) -> int:
    counts: Counter[int] = Counter()  # by the number of one that stands for others
    chosen: list[nn.Parameter] = []
    places: dict[Any, int] = {}
    for number, (group, parameters) in enumerate(zip(optimizer.param_groups, given, strict=True)):
        group["params"] = mine = []
        for one in parameters:
            if not one.requires_grad:
                continue
            kind = number, one.shape, one.dtype
            if kind not in places:
                places[kind] = len(chosen)
                chosen.append(_part(one, parts))
                mine.append(chosen[-1])
            counts[places[kind]] += 1
    optimizer.state.clear()
    optimizer.step()
    return sum(_bytes(optimizer.state.get(one)) * counts[at] for at, one in enumerate(chosen))


def _part(parameter: Tensor, parts: int) -> nn.Parameter:
    size = Shape(tuple(parameter.shape), parameter.dtype).part(parts)
    one = nn.Parameter(like(torch.empty(size, dtype=parameter.dtype, device="meta"), parameter.device))
    one.grad = like(one, parameter.device)
    return one


def _bytes(state: Any) -> int:
    found: dict[int, Any] = {}

    def note(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            found[id(storage)] = storage
        elif isinstance(value, Mapping):
            for one in value.values():
                note(one)
        elif isinstance(value, (list, tuple)):
            for one in value:
                note(one)

    note(state)
    return sum(one.nbytes() for one in found.values())
