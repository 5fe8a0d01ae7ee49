"""Sums that do not depend on the order in which their terms come: numbers on a common grid are added without rounding.

A sum of floats is rounded after each addition, and so another order gives other last bits. Here each term is rounded once, by
itself, to a multiple of a power of two, the grid; multiples of a grid add up exactly in float64 as long as their sum stays
below 2^53 of it. Exact additions can be done in any order, by any number of processes, with the same bits at the end.

A term that is too large for the grid is not cut: what lies above goes to a second sum, on a coarser grid, and what lies above
that to a third. Where a term is split depends on the term alone, so this changes nothing in the result.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

_AT_ONCE = 64  # numbers that are fetched from a device together
_BITS = 52  # of a float64's sum: one less than it has, for its sign
_PIECE = 2**17  # numbers
_ROOMS: dict[torch.device, Tensor] = {}
_NO_TIES = math.nextafter(1.0, 2.0)


def bits_for(terms: int) -> int:
    """Bits that a sum of so many terms may need more than a term."""
    return max(2, math.ceil(math.log2(max(1, terms))) + 1)


def largest_of(numbers: Tensor) -> float:
    """The largest absolute value, or what is not finite. The host waits for the device here."""
    if not numbers.numel():
        return 0.0
    least, most = numbers.aminmax()
    return max(-float(least), float(most))  # a NaN comes out as it is: both are


class ExactSum:
    """The sum of tensors of one shape.

    `largest`: a power of two that a term hardly ever exceeds, of all its numbers or of each; where one does, the sum is right
    nevertheless. `terms`: how many there are at most, over all ranks. `out`: where the sum on the finest grid lies; in a new
    tensor, if none is given.

    The finest sum stands on a pedestal of 1.5 * 2^52 grids while terms come: so large a float64 has no digits below the grid,
    and an addition to it rounds the term, in one pass over the memory. A term exactly between two multiples of the grid would
    be rounded to the even sum, and so by what was added before it: it is made a little larger, by one part in 2^52, and then
    never lies there. (Float64 terms have no room for that, and are rounded by themselves.)
    """

    def __init__(
        self,
        shape: Sequence[int],
        largest: float | Tensor,
        terms: int,
        device: torch.device | str = "cpu",
        out: Tensor | None = None,
    ) -> None:
        self._width = _BITS - bits_for(terms)
        self._folds = [torch.empty(tuple(shape), dtype=torch.float64, device=device) if out is None else out]
        self.restart(largest)

    def restart(self, largest: float | Tensor | None = None) -> None:
        """Another sum begins; on the same grid, where nothing else is said."""
        self._begun = self._stands = False
        del self._folds[1:]
        if largest is None:
            return
        given = largest if isinstance(largest, Tensor) else torch.tensor([largest])
        sizes = given.to(self._folds[0].device, torch.float64)
        exponents = torch.frexp(sizes).exponent
        one = torch.ones_like(sizes)
        self._reach = torch.ldexp(one, exponents)  # the largest term that the finest sum holds
        self._shift = torch.ldexp(1.5 * one, _BITS + exponents - self._width)
        self._alike = None if isinstance(largest, Tensor) else float(self._reach)

    def _fold(self, level: int) -> Tensor:
        while len(self._folds) <= level:
            self._folds.append(torch.zeros_like(self._folds[0]))
        return self._folds[level]

    def _holds(self, term: Tensor, largest: float | None, level: int) -> bool:
        """Whether the folds up to this one do."""
        coarser = math.ldexp(1.0, level * self._width)
        if self._alike is None:
            return bool((term.abs() <= self._reach * coarser).all())
        return (largest_of(term) if largest is None else largest) <= self._alike * coarser

    def add(self, term: Tensor, largest: float | None = None) -> None:
        """`largest`: of the term's numbers, where it is known; all must be finite."""
        if self._holds(term, largest, 0) and term.dtype != torch.float64:
            self._round_to_finest(term, _NO_TIES)
            return
        level = 0
        while not self._holds(term, largest, level):
            level += 1
        rest = term.double()
        for at in range(level, -1, -1):
            shift = self._shift * math.ldexp(1.0, at * self._width)
            part = (rest + shift).sub_(shift)
            if at == 0:
                self._round_to_finest(part, 1.0)
                return
            self._fold(at).add_(part)
            rest = rest - part

    def _round_to_finest(self, term: Tensor, alpha: float) -> None:
        finest, shift, first = self._folds[0], self._shift, not self._begun
        self._begun = True
        if not first and not self._stands:
            finest.add_(shift)
        self._stands = True
        if finest.ndim != 1:
            finest, term = finest.view(-1), term.reshape(-1)
        # A piece at a time, which stays in a processor's cache: to convert all of it at once takes as long again.
        for at in range(0, len(finest), _PIECE):
            part, numbers = (one[at : at + _PIECE] if len(one) > _PIECE else one for one in (finest, term))
            pedestal = shift[at : at + _PIECE] if len(shift) > _PIECE else shift
            room = self._room(part)
            room.copy_(numbers)
            if first:
                torch.add(pedestal, room, alpha=alpha, out=part)
            else:
                part.add_(room, alpha=alpha)

    def _room(self, part: Tensor) -> Tensor:
        """To convert the numbers of a part in."""
        if part.device not in _ROOMS:
            _ROOMS[part.device] = torch.empty(_PIECE, dtype=torch.float64, device=part.device)
        return _ROOMS[part.device][: len(part)]

    def settle(self) -> None:
        """The finest sum is the sum alone, until another term comes."""
        if not self._begun:
            self._begun = True
            self._folds[0].zero_()
        if self._stands:
            self._stands = False
            self._folds[0].sub_(self._shift)

    @property
    def count(self) -> int:
        """Of folds that something was added to, or 0."""
        return len(self._folds) if self._begun else 0

    @property
    def folds(self) -> list[Tensor]:
        """Sums of several ranks are added fold by fold, in any order; who has fewer folds has zeros there."""
        self.settle()
        return self._folds

    def coarser(self, count: int) -> list[Tensor]:
        """The sums above the finest grid, of so many with it; those that nothing was added to are zero."""
        self._fold(max(0, count - 1))
        return self._folds[1:count]

    def total(self) -> Tensor:
        """In float64, rounded once: from the coarsest grid to the finest."""
        folds = self.folds
        total = folds[-1].clone() if len(folds) > 1 else folds[0]
        for fold in folds[-2::-1]:
            total += fold
        return total


class WideSum:
    """The sum of vectors whose numbers may be of any size from 2^-90 to 2^40; of a larger one it is no number.

    Always on three grids (`levels`, from 2^`top` down): nobody looks at the terms, which a device may still compute. For few
    numbers.
    """

    def __init__(self, length: int, terms: int, device: torch.device | str = "cpu", levels: int = 3, top: int = 40) -> None:
        width = _BITS - bits_for(terms)
        self._top = top
        self._shifts = [math.ldexp(1.5, _BITS + top - (1 + level) * width) for level in range(levels)]
        self.folds = torch.zeros(levels, length, dtype=torch.float64, device=device)
        """From the coarsest grid to the finest; those of several ranks are added, in any order."""

    def add(self, term: Tensor) -> None:
        rest = term.double()
        rest = rest.where(rest.abs() <= math.ldexp(1.0, self._top), math.nan)
        for fold, shift in zip(self.folds, self._shifts, strict=True):
            part = (rest + shift) - shift
            fold.add_(part)
            rest = rest - part

    @staticmethod
    def total(folds: Tensor) -> Tensor:
        """Of one or several ranks' folds, in float64."""
        total = folds[0].clone()
        for fold in folds[1:]:
            total += fold
        return total


class ExactScalar:
    """The sum of numbers, rounded once: of what has been added, the parts that one float64 can't hold are kept beside it.

    Numbers may lie on a device: they are fetched many at a time.
    """

    def __init__(self, parts: Sequence[float] = ()) -> None:
        self._pending: list[Tensor] = []
        self._parts = [part for part in parts if math.isfinite(part)]
        self._not_finite = [part for part in parts if not math.isfinite(part)]

    def add(self, term: Tensor) -> None:
        self._pending.append(term.detach().double().reshape(()))
        if len(self._pending) >= _AT_ONCE:
            self.parts()

    def parts(self) -> list[float]:
        """Floats that do not overlap; their sum, exactly, is that of all terms."""
        if self._pending:
            for term in torch.stack(self._pending).tolist():
                if math.isfinite(term):
                    _grow(self._parts, term)
                else:
                    self._not_finite = [sum(self._not_finite) + term]
            self._pending.clear()
        return self._parts + self._not_finite


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


def apart(terms: Sequence[float]) -> list[float]:
    """As few floats as have the same sum, exactly; the same ones for the same sum."""
    found: list[float] = []
    while terms and all(map(math.isfinite, terms)) and (part := exact_total([*terms, *(-one for one in found)])):
        found.append(part)
    return found if all(map(math.isfinite, terms)) else [sum(terms)]


def exact_mean(terms: Sequence[float], count: float) -> float:
    """Rounded once: a mean of equal numbers is this number. Of nothing it is no number."""
    if not count or not all(map(math.isfinite, terms)):
        return exact_total(terms) / count if count else math.nan
    return float(sum(map(Fraction, terms), Fraction()) / Fraction(count))
