"""Gradients that are the same to the last bit on any number of ranks: each micro-batch's is a term of an exact sum.

DistributedDataParallel adds up in the order of a ring, and a rank's own micro-batches in their order; on another number of
ranks these are other orders. Here each micro-batch's gradient is rounded to a grid, by itself, and the rest is exact
(train/exact.py). The grid of a parameter follows the largest value that its gradients had in the step before, over all
micro-batches; so it is a function of the run, too, and a checkpoint takes it along.

The sums travel to the other ranks while the backward pass of the step's last micro-batch goes on, a bucket at a time.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from project.errors import UserError
from project.train.exact import ExactSum, largest_of

_AT_FIRST = 2.0**-10  # before a step has shown how large a parameter's gradients are; larger ones take a second sum
_MARGIN = 4.0  # so much larger than in the step before is no surprise
_BUCKET = 4_000_000  # numbers that are sent together
_FEW = 2**14  # numbers: parameters with fewer are dealt with together


class _Unit:
    """A parameter with many numbers, or neighbours with few. Its sums and its gradient are parts of its bucket's."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], sums: Tensor, mean: Tensor, terms: int) -> None:
        self.names, self.parameters = zip(*named, strict=True)
        self.sums, self.mean, self.alone = sums, mean, len(named) == 1
        self.largest = [_AT_FIRST] * len(named)
        """By parameter, powers of two: what the grid of this step was made for."""
        self.seen = [-1.0] * len(named)
        """By parameter, the largest value of this step's gradients on this rank; none so far."""
        sizes = [one.numel() for one in self.parameters]
        parts = torch.split(mean, sizes)
        # `empty_like` lies side by side where a parameter does not.
        self.gradients = [
            part.as_strided(one.shape, torch.empty_like(one).stride()) for part, one in zip(parts, self.parameters, strict=True)
        ]
        self.waits_for = 0  # gradients of the last backward pass
        self._taken: list[Tensor | None] = [None] * len(named)
        if not self.alone:
            self._room = torch.zeros_like(mean)
            self._rooms = [
                part.as_strided(one.shape, one.stride())
                for part, one in zip(torch.split(self._room, sizes), self.gradients, strict=True)
            ]
            self._owners = torch.arange(len(named), device=mean.device).repeat_interleave(
                torch.tensor(sizes, device=mean.device)
            )
        self._made_for: list[float] = []
        self.sum = ExactSum(sums.shape, _AT_FIRST, terms, out=sums)
        self.restart()

    def restart(self) -> None:
        """Another step."""
        same = self._made_for == self.largest
        self._made_for = list(self.largest)
        if same:
            self.sum.restart()
        elif self.alone:
            self.sum.restart(self.largest[0])
        else:
            self.sum.restart(torch.tensor(self.largest, dtype=torch.float64, device=self.mean.device)[self._owners])
        self.seen = [-1.0] * len(self.seen)

    def begin(self) -> None:
        self.waits_for = len(self.parameters)
        self._taken = [None] * len(self.parameters)
        for one in self.parameters:
            one.grad = None

    def take(self, index: int) -> None:
        """A gradient has come."""
        parameter = self.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self.waits_for == 0 or self._taken[index] is not None:
            raise UserError(
                f"The gradient of {self.names[index]} came twice in one backward pass, as reentrant checkpointing makes it, "
                "and trainer.exact can't tell when it is whole. HINT: torch.utils.checkpoint(..., use_reentrant=False)."
            )
        self._taken[index] = gradient
        self.waits_for -= 1
        if self.waits_for == 0:
            self.add()

    def add(self) -> None:
        """Those that have come; called once in a backward pass."""
        if self.alone:
            self._add_one()
        elif any(one is not None for one in self._taken):
            self._add_few()
        self._taken = [None] * len(self._taken)

    def _add_one(self) -> None:
        (gradient,) = self._taken
        if gradient is None:
            return
        like = self.gradients[0]
        if gradient.stride() != like.stride():
            gradient = torch.empty_like(like).copy_(gradient)
        numbers = gradient.as_strided((gradient.numel(),), (1,))
        largest = largest_of(numbers)
        if math.isfinite(largest):
            self.seen[0] = max(largest, self.seen[0])
            self.sum.add(numbers, largest)
        else:
            self.seen[0] = math.inf

    def _add_few(self) -> None:
        for room, gradient in zip(self._rooms, self._taken, strict=True):
            if gradient is None:
                room.zero_()
            else:
                room.copy_(gradient)
        sizes = torch.zeros(len(self.names), device=self.mean.device, dtype=self._room.dtype)
        found = sizes.scatter_reduce(0, self._owners, self._room.abs(), "amax").tolist()
        for index, (largest, gradient) in enumerate(zip(found, self._taken, strict=True)):
            if gradient is None:
                continue
            self.seen[index] = max(self.seen[index], largest) if math.isfinite(largest) else math.inf
            if not math.isfinite(largest):
                self._rooms[index].zero_()
        self.sum.add(self._room)

    def leave(self) -> None:
        """The gradients, where their owners look for them; and the grids of the next step."""
        for index, (parameter, gradient, seen) in enumerate(zip(self.parameters, self.gradients, self.seen, strict=True)):
            if seen < 0:
                continue  # no micro-batch of any rank has come to it
            if not math.isfinite(seen):
                gradient.fill_(math.inf)
            elif seen and not seen * 2 <= self.largest[index] <= seen * _MARGIN**3:  # it changes seldom: a new grid takes time
                self.largest[index] = math.ldexp(1.0, math.frexp(seen * _MARGIN)[1])
            parameter.grad = gradient
        self.restart()


class _Bucket:
    """Units whose sums lie side by side and are sent together."""

    def __init__(self, units: list[list[tuple[str, nn.Parameter]]], terms: int) -> None:
        sizes = [sum(one.numel() for _, one in unit) for unit in units]
        _, first = units[0][0]
        self.sums = torch.empty(sum(sizes), dtype=torch.float64, device=first.device)
        self.means = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        parts = zip(torch.split(self.sums, sizes), torch.split(self.means, sizes), strict=True)
        self.units = [_Unit(unit, sums, mean, terms) for unit, (sums, mean) in zip(units, parts, strict=True)]
        self.work: Any = None


class ExactGradients:
    """Of the parameters that learn. `begin` before each backward pass, `end` after it; after the last one of a step, all ranks
    call `finish`.

    `micro_batches`: of a step, over all ranks; the gradient is the mean over them.
    """

    def __init__(self, module: nn.Module, micro_batches: int, world_size: int) -> None:
        self._terms, self._world_size = micro_batches, world_size
        named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        # In the reversed order, which is about the one in which gradients come; what is small comes last.
        many = [[one] for one in named[::-1] if one[1].numel() > _FEW]
        few = [one for one in named[::-1] if one[1].numel() <= _FEW]
        self._buckets = [_Bucket(units, micro_batches) for units in (*_parted(many), *([unit] for unit in _of_one_kind(few)))]
        self._units = [unit for bucket in self._buckets for unit in bucket.units]
        self._last, self._sent = False, 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, unit=unit, index=index: self._take(unit, index))
            for unit in self._units
            for index, parameter in enumerate(unit.parameters)
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, float]:
        return {name: largest for unit in self._units for name, largest in zip(unit.names, unit.largest, strict=True)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        for unit in self._units:
            unit.largest = [state.get(name, now) for name, now in zip(unit.names, unit.largest, strict=True)]
            unit.restart()

    def begin(self, last: bool) -> None:
        """A backward pass; `last`: of this rank in this step."""
        self._last, self._sent = last, 0
        for unit in self._units:
            unit.begin()

    def _take(self, unit: _Unit, index: int) -> None:
        unit.take(index)
        if self._last and unit.waits_for == 0:
            # In the same order on all ranks, whatever the order in which their gradients come.
            while self._sent < len(self._buckets) and all(one.waits_for == 0 for one in self._buckets[self._sent].units):
                self._send(self._buckets[self._sent])

    def end(self) -> None:
        """Of a backward pass: what has not come will not."""
        for unit in self._units:
            if unit.waits_for:
                unit.add()

    def _send(self, bucket: _Bucket) -> None:
        if self._world_size > 1:
            for unit in bucket.units:
                unit.sum.settle()
            bucket.work = dist.all_reduce(bucket.sums, async_op=True)
        self._sent += 1

    def finish(self) -> None:
        """Leaves the mean over all micro-batches of all ranks as the gradient of each parameter."""
        for bucket in self._buckets[self._sent :]:
            self._send(bucket)
        seen = [value for unit in self._units for value in unit.seen]
        both = torch.tensor([*seen, *(unit.sum.count for unit in self._units)], dtype=torch.float64)
        if self._world_size > 1:
            dist.all_reduce(both, dist.ReduceOp.MAX)
        of_all = iter(both.tolist())
        for unit in self._units:
            unit.seen = [next(of_all) for _ in unit.seen]
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        for unit, count in zip(self._units, of_all, strict=True):
            unit.sum.settle()
            if count > 1:  # some term was too large for the finest grid
                self._add_coarser(unit, int(count))
        for bucket in self._buckets:
            bucket.means.copy_(bucket.sums.mul_(1 / self._terms))
        for unit in self._units:
            unit.leave()

    def _add_coarser(self, unit: _Unit, count: int) -> None:
        folds = unit.sum.coarser(count)
        for fold in folds:
            if self._world_size > 1:
                dist.all_reduce(fold)
        total = folds[-1]
        for fold in folds[-2::-1]:
            total += fold
        unit.sums.add_(total)


def _parted(units: list[list[tuple[str, nn.Parameter]]]) -> Iterator[list[list[tuple[str, nn.Parameter]]]]:
    """Neighbours of one kind, up to the size of a bucket."""
    part: list[list[tuple[str, nn.Parameter]]] = []
    size = 0
    for unit in units:
        ((_, parameter),) = unit
        if part and (size + parameter.numel() > _BUCKET or _kind(part[0][0][1]) != _kind(parameter)):
            yield part
            part, size = [], 0
        part.append(unit)
        size += parameter.numel()
    if part:
        yield part


def _of_one_kind(named: list[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    kinds: dict[Any, list[tuple[str, nn.Parameter]]] = {}
    for one in named:
        kinds.setdefault(_kind(one[1]), []).append(one)
    return list(kinds.values())


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
