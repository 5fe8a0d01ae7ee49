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


class _Slot:
    """A parameter's."""

    def __init__(self, name: str, parameter: nn.Parameter, sums: Tensor, mean: Tensor) -> None:
        self.name, self.parameter, self.sums = name, parameter, sums
        dense = torch.empty_like(parameter)  # where a parameter's numbers do not lie side by side
        self.gradient = mean.as_strided(parameter.shape, dense.stride())
        self.largest = _AT_FIRST
        """A power of two: what the grid of this step was made for."""
        self.sum: ExactSum | None = None
        self.seen = -1.0  # the largest value of this step's gradients on this rank; none so far
        self.taken = False  # in the last backward pass of this step

    def numbers(self, gradient: Tensor) -> Tensor:
        """A gradient's, in the order in which this parameter's lie in the memory."""
        if gradient.stride() != self.gradient.stride():
            gradient = torch.empty_like(self.gradient).copy_(gradient)
        return gradient.as_strided((gradient.numel(),), (1,))


class _Bucket:
    """Parameters whose sums lie side by side and are sent together."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        sizes = [parameter.numel() for _, parameter in named]
        first = named[0][1]
        self.sums = torch.empty(sum(sizes), dtype=torch.float64, device=first.device)
        self.gradients = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        parts = zip(torch.split(self.sums, sizes), torch.split(self.gradients, sizes), strict=True)
        self.slots = [_Slot(name, one, sums, mean) for (name, one), (sums, mean) in zip(named, parts, strict=True)]
        self.left = 0  # slots that have not been taken in the last backward pass
        self.work: Any = None


class ExactGradients:
    """Of the parameters that learn. `begin` before each backward pass; `finish` after the last one of a step, by all ranks.

    `micro_batches`: of a step, over all ranks; the gradient is the mean over them.
    """

    def __init__(self, module: nn.Module, micro_batches: int, world_size: int) -> None:
        self._terms, self._world_size = micro_batches, world_size
        named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        self._buckets = [_Bucket(some) for some in _parted(named[::-1])]  # about the order in which gradients come
        self._slots = [slot for bucket in self._buckets for slot in bucket.slots]
        self._last, self._sent = False, 0
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, bucket=bucket, slot=slot: self._take(bucket, slot)
            )
            for bucket in self._buckets
            for slot in bucket.slots
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, float]:
        return {slot.name: slot.largest for slot in self._slots}

    def load_state_dict(self, state: dict[str, float]) -> None:
        for slot in self._slots:
            slot.largest = state.get(slot.name, slot.largest)

    def begin(self, last: bool) -> None:
        """A backward pass; `last`: of this rank in this step."""
        self._last, self._sent = last, 0
        for bucket in self._buckets:
            bucket.left = len(bucket.slots)
            for slot in bucket.slots:
                slot.parameter.grad, slot.taken = None, False

    def _take(self, bucket: _Bucket, slot: _Slot) -> None:
        """A gradient has come."""
        gradient, slot.parameter.grad = slot.parameter.grad, None
        assert gradient is not None
        if slot.taken:
            raise UserError(
                f"The gradient of {slot.name} came twice in one backward pass, as reentrant checkpointing makes it, and "
                "trainer.exact can't tell when it is whole. HINT: torch.utils.checkpoint(..., use_reentrant=False)."
            )
        slot.taken = True
        numbers = slot.numbers(gradient)
        largest = largest_of(numbers)
        if math.isfinite(largest):
            slot.seen = max(largest, slot.seen)
            if slot.sum is None:
                slot.sum = ExactSum(slot.sums.shape, slot.largest, self._terms, out=slot.sums)
            slot.sum.add(numbers, largest)
        else:
            slot.seen = math.inf
        bucket.left -= 1
        if self._last:
            self._send_what_is_whole()

    def _send_what_is_whole(self) -> None:
        """In the same order on all ranks, whatever the order in which their gradients come."""
        while self._sent < len(self._buckets) and self._buckets[self._sent].left == 0:
            self._send(self._buckets[self._sent])

    def _send(self, bucket: _Bucket) -> None:
        for slot in bucket.slots:
            if slot.sum is None:
                slot.sums.zero_()  # no micro-batch of this rank has come to it
            else:
                slot.sum.settle()
        if self._world_size > 1:
            bucket.work = dist.all_reduce(bucket.sums, async_op=True)
        self._sent += 1

    def finish(self) -> None:
        """Leaves the mean over all micro-batches of all ranks as the gradient of each parameter."""
        for bucket in self._buckets[self._sent :]:
            self._send(bucket)
        seen = [slot.seen for slot in self._slots]
        counts = [0 if slot.sum is None else len(slot.sum.folds) for slot in self._slots]
        both = torch.tensor([*seen, *counts], dtype=torch.float64)
        if self._world_size > 1:
            dist.all_reduce(both, dist.ReduceOp.MAX)
        of_all = both.view(2, -1).tolist()
        for slot, largest, count in zip(self._slots, *of_all, strict=True):
            slot.seen = largest
            if count > 1:  # some term was too large for the finest grid
                slot.sum = slot.sum or ExactSum(slot.sums.shape, slot.largest, self._terms, out=slot.sums)
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        for slot, count in zip(self._slots, of_all[1], strict=True):
            if count > 1:
                self._add_coarser(slot, int(count))
        for bucket in self._buckets:
            bucket.gradients.copy_(bucket.sums.mul_(1 / self._terms))
            for slot in bucket.slots:
                self._leave(slot)

    def _add_coarser(self, slot: _Slot, count: int) -> None:
        assert slot.sum is not None
        folds = slot.sum.coarser(count)
        for fold in folds:
            if self._world_size > 1:
                dist.all_reduce(fold)
        total = folds[-1]
        for fold in folds[-2::-1]:
            total += fold
        slot.sums.add_(total)

    def _leave(self, slot: _Slot) -> None:
        """The gradient, where its owner looks for it; and the grid of the next step."""
        if slot.seen >= 0:
            if math.isfinite(slot.seen):
                if slot.seen:
                    slot.largest = math.ldexp(1.0, math.frexp(slot.seen * _MARGIN)[1])
            else:
                slot.gradient.fill_(math.inf)
            slot.parameter.grad = slot.gradient
        slot.sum, slot.seen = None, -1.0


def _parted(named: list[tuple[str, nn.Parameter]]) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Neighbours of one kind, up to the size of a bucket."""
    part: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in named:
        if part and (size + parameter.numel() > _BUCKET or _kind(part[0][1]) != _kind(parameter)):
            yield part
            part, size = [], 0
        part.append((name, parameter))
        size += parameter.numel()
    if part:
        yield part


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
