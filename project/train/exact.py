"""Sums that do not depend on the order in which their terms come: numbers on a common grid are added without rounding.

A sum of floats is rounded after each addition, and so another order gives other last bits. Here each term is rounded once, by
itself, to a multiple of a power of two, the grid; multiples of a grid add up exactly in float64 as long as their sum stays
below 2^53 of it. Exact additions can be done in any order, by any number of processes, with the same bits at the end.

A term that is too large for the grid is not cut: what lies above goes to a second sum, on a coarser grid, and what lies above
that to a third. Where a term is split depends on the term alone, so this changes nothing in the result.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_AT_ONCE = 64  # numbers that are fetched from a device together
_BITS = 52  # of a float64's sum: one less than it has, for its sign


def bits_for(terms: int) -> int:
    """Bits that a sum of so many terms may need more than a term."""
    return max(1, math.ceil(math.log2(max(1, terms))) + 1)


class ExactSum:
    """The sum of tensors of one shape.

    `largest`: a power of two that a term hardly ever exceeds; where one does, the sum is right nevertheless. `terms`: how many
    there are at most, over all ranks.
    """

    def __init__(self, shape: Sequence[int], largest: float, terms: int, device: torch.device | str = "cpu") -> None:
        self._width = _BITS - bits_for(terms)
        _, exponent = math.frexp(largest)
        self._lowest = exponent - self._width  # the exponent of the finest grid
        self._shape, self._device = tuple(shape), device
        self._folds: list[Tensor] = []
        self._fold(0)

    def _fold(self, level: int) -> Tensor:
        while len(self._folds) <= level:
            self._folds.append(torch.zeros(self._shape, dtype=torch.float64, device=self._device))
        return self._folds[level]

    def _reach(self, level: int) -> float:
        """The largest term that the folds up to this one hold."""
        return math.ldexp(1.0, self._lowest + (level + 1) * self._width)

    def add(self, term: Tensor, largest: float | None = None) -> None:
        """`largest`: of the term's values, where it is known; it must be finite."""
        largest = float(term.abs().max()) if largest is None and term.numel() else (largest or 0.0)
        level = 0
        while largest > self._reach(level):
            level += 1
        rest = term.double()
        for at in range(level, -1, -1):
            # So large a number has no digits below the grid: what is added to it is rounded to that.
            shift = math.ldexp(1.5, _BITS + self._lowest + at * self._width)
            part = (rest + shift).sub_(shift)
            self._fold(at).add_(part)
            if at:
                rest = rest - part

    def up_to(self, count: int) -> list[Tensor]:
        """So many sums, from the finest grid on; those that nothing was added to are zero."""
        self._fold(max(0, count - 1))
        return self._folds

    @property
    def folds(self) -> list[Tensor]:
        """Sums of several ranks are added fold by fold, in any order; who has fewer folds has zeros there."""
        return self._folds

    def total(self) -> Tensor:
        """In float64, rounded once: from the coarsest grid to the finest."""
        total = self._folds[-1].clone()
        for fold in self._folds[-2::-1]:
            total += fold
        return total


def meet(total: ExactSum, world_size: int) -> Tensor:
    """The sum over all ranks, which call this together."""
    if world_size > 1:
        count = torch.tensor(len(total.folds))
        dist.all_reduce(count, dist.ReduceOp.MAX)
        for fold in total.up_to(int(count)):
            dist.all_reduce(fold)
    return total.total()


class ExactScalar:
    """The sum of numbers, rounded once: of what has been added, the parts that one float64 can't hold are kept beside it.

    Numbers may lie on a device: they are fetched many at a time.
    """

    def __init__(self, parts: Sequence[float] = ()) -> None:
        self._pending: list[Tensor] = []
        self._parts = list(parts)

    def add(self, term: Tensor) -> None:
        self._pending.append(term.detach().double().reshape(()))
        if len(self._pending) >= _AT_ONCE:
            self.parts()

    def parts(self) -> list[float]:
        """Floats that do not overlap; their sum, exactly, is that of all terms."""
        if self._pending:
            for term in torch.stack(self._pending).tolist():
                _grow(self._parts, term)
            self._pending.clear()
        return self._parts

    def total(self, world_size: int) -> float:
        """Over all ranks, which call this together."""
        everybodys = [self.parts()]
        if world_size > 1:
            everybodys = [[] for _ in range(world_size)]
            dist.all_gather_object(everybodys, self.parts())
        return exact_total([part for parts in everybodys for part in parts])


def _grow(parts: list[float], term: float) -> None:
    """Shewchuk's: each addition leaves its rounding error as a part of its own."""
    kept = 0
    for part in parts:
        large, small = (term, part) if abs(term) >= abs(part) else (part, term)
        term = large + small
        if error := small - (term - large):
            parts[kept] = error
            kept += 1
    parts[kept:] = [term]


def exact_total(terms: Sequence[float]) -> float:
    """As `math.fsum`, which refuses to add an infinity to its opposite: that is no number."""
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        return sum(terms)
