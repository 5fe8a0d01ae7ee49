"""Sums that do not depend on the order in which their terms come: numbers on a common grid are added without rounding.

Each term is rounded once, by itself, to a multiple of a power of two, the grid; multiples of a grid add up exactly in float64,
in any order and by any number of processes, as long as their sum stays below 2^53 of it. A term that is too large for the grid
is not cut: what lies above goes to a second sum, on a coarser grid, and what lies above that to a third.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

_AT_ONCE = 64  # numbers that are fetched from a device together
_BITS = 52  # of a float64's sum: one less than it has, for its sign
_PIECE, _PIECE_ON_DEVICE = 2**16, 2**22  # numbers that are added up at once
_ROOMS: dict[torch.device, Tensor] = {}  # to work in; they stay in a processor's cache
_NO_TIES = math.nextafter(1.0, 2.0)


def _width(terms: int) -> int:
    """Returns the bits of a term between two grids: a sum of so many terms needs the others."""
    return _BITS - max(2, math.ceil(math.log2(max(1, terms))) + 1)


class ExactSum:
    """The sum of vectors that have parts of these sizes, side by side.

    `largest`: of each part, a power of two that its numbers hardly ever exceed; where one does, the sum is right nevertheless.
    `terms`: how many there are at most, over all ranks.

    Terms are kept as they come, two at a time, and added up together (`fold`) a piece at a time, on a pedestal of 1.5 * 2^52
    grids: so large a float64 has no digits below the grid, and an addition to it rounds the term. A term exactly between two
    multiples of the grid would be rounded to the even sum, and so by what was added before it: it is made a little larger, by
    one part in 2^52, and then never lies there. Float64 terms have no room for that, and are rounded by themselves.
    """

    def __init__(self, sizes: Sequence[int], largest: Sequence[float], terms: int, device: torch.device | str = "cpu") -> None:
        self._width = _width(terms)
        self._length, self._device = sum(sizes), torch.device(device)
        self._owners = None
        if len(sizes) > 1:
            self._owners = torch.repeat_interleave(torch.tensor(sizes)).to(device)
        self._finest: Tensor | None = None
        self._largest: Sequence[float] = ()
        self.restart(largest)

    def restart(self, largest: Sequence[float]) -> None:
        """Begins another sum."""
        self._coarser: list[Tensor] = []
        self.terms: list[Tensor] = []  # for `fold` to add up: terms as they came, and sums of some
        if self._largest == largest:  # a new grid takes time
            return
        self._largest = [*largest]
        exponents = torch.frexp(torch.tensor(largest, dtype=torch.float64)).exponent
        ones = torch.ones(len(exponents), dtype=torch.float64)
        self._reach: list[float] = torch.ldexp(ones, exponents).tolist()  # the largest numbers that the finest sum holds
        shift = torch.ldexp(1.5 * ones, _BITS + exponents - self._width).to(self._device)
        self._shift = shift if self._owners is None else shift[self._owners]

    def largest_of(self, term: Tensor) -> list[float]:
        """Returns by part the largest absolute value, or what is not finite. The host waits for the device here."""
        if self._owners is None:
            least, most = term.aminmax() if len(term) else (0.0, 0.0)
            return [max(-float(least), float(most))]  # a NaN comes out as it is: both are
        return term.new_zeros(len(self._reach)).scatter_reduce(0, self._owners, term.abs(), "amax").tolist()

    def add(self, term: Tensor, largest: Sequence[float] | None = None) -> None:
        """Adds a term. `largest`: `largest_of(term)`; all must be finite. The term is kept: callers must not change it."""
        largest = self.largest_of(term) if largest is None else largest
        level = 0
        while any(most > math.ldexp(reach, level * self._width) for most, reach in zip(largest, self._reach, strict=True)):
            level += 1
        rest = term
        for at in range(level, 0, -1):
            # What is left over has digits of the term alone, and so fits into its type.
            shift = self._shift * math.ldexp(1.0, at * self._width)
            part = (rest.double() + shift).sub_(shift)
            self.coarser(at + 1)[at - 1].add_(part)
            rest = (rest.double() - part).to(term.dtype)
        if rest.dtype == torch.float64:
            rest = (rest + self._shift).sub_(self._shift)
        self.terms.append(rest)
        if len(self.terms) > 2:
            if self._finest is None:
                self._finest = torch.empty(self._length, dtype=torch.float64, device=self._device)
            *added, rest = self.terms
            self.fold(added, self._finest)
            self.terms = [self._finest, rest]

    @property
    def count(self) -> int:
        """Returns the number of sums that something was added to: one, if none needed a coarser grid."""
        return len(self._coarser) + 1

    def coarser(self, count: int) -> list[Tensor]:
        """Returns the sums above the finest grid, of so many with it; those that nothing was added to are zero."""
        while len(self._coarser) < count - 1:
            self._coarser.append(torch.zeros(self._length, dtype=torch.float64, device=self._device))
        return self._coarser

    def fold(
        self, terms: Sequence[Tensor], out: Tensor, start: int = 0, scale: float = 1.0, coarser: Tensor | None = None
    ) -> None:
        """Writes the sum of terms, of several ranks' perhaps, times `scale`: the part from `start` on that is as long as `out`.

        What is in float64 lies on the grid; the rest is rounded to it. `coarser`: the sum that stands above it.
        """
        pieces, shifts = _PIECE if out.device.type == "cpu" else _PIECE_ON_DEVICE, self._shift
        if out.device not in _ROOMS:
            _ROOMS[out.device] = torch.empty(2, pieces, dtype=torch.float64, device=out.device)
        for at in range(0, len(out), pieces):
            into = out[at : at + pieces]
            here = slice(start + at, start + at + len(into))
            sums, room = _ROOMS[out.device][:, : len(into)]
            shift = shifts[here] if len(shifts) > 1 else shifts
            if not terms:
                sums.copy_(shift.expand(len(into)))
            for number, term in enumerate(terms):
                numbers, on_grid = term[at : at + pieces], term.dtype == torch.float64
                numbers = numbers if on_grid else room.copy_(numbers)
                torch.add(sums if number else shift, numbers, alpha=1.0 if on_grid else _NO_TIES, out=sums)
            sums.sub_(shift)
            if coarser is not None:
                sums.add_(coarser[at : at + pieces])
            if scale != 1:
                sums.mul_(scale)
            into.copy_(sums)


class WideSum:
    """The sum of vectors whose numbers may be of any size from 2^-90 to 2^40; of a larger one it is no number.

    Always on `levels` grids, from 2^`top` down: nobody looks at the terms, which a device may still compute. For few numbers.
    """

    def __init__(self, length: int, terms: int, device: torch.device | str = "cpu", levels: int = 3, top: int = 40) -> None:
        self._top = top
        self._shifts = [math.ldexp(1.5, _BITS + top - (1 + level) * _width(terms)) for level in range(levels)]
        self.folds = torch.zeros(levels, length, dtype=torch.float64, device=device)
        """The sums from the coarsest grid to the finest; those of several ranks are added, in any order."""

    def add(self, term: Tensor) -> None:
        rest = term.double()
        rest = rest.where(rest.abs() <= math.ldexp(1.0, self._top), math.nan)
        for fold, shift in zip(self.folds, self._shifts, strict=True):
            part = (rest + shift) - shift
            fold.add_(part)
            rest = rest - part


def sum_from_coarsest(folds: Iterable[Tensor]) -> Tensor:
    """Returns the sum in float64 of sums on several grids, which come from the coarsest grid to the finest."""
    coarsest, *finer = folds
    total = coarsest.clone()
    for fold in finer:
        total += fold
    return total


def to_host(numbers: Sequence[Tensor]) -> list[float]:
    """Returns the values of numbers that lie on a device, on the host, or some here and some there. The host waits once."""
    device = next((number.device for number in numbers if number.is_cuda), torch.device("cpu"))
    values: list[float] = torch.stack([number.to(device) for number in numbers]).tolist()
    return values


class ExactScalar:
    """The sum of numbers, exactly. They may lie on a device: they are fetched many at a time."""

    def __init__(self, parts: Sequence[float] = (), pending: Sequence[Tensor] = ()) -> None:
        self._parts, self._pending = [*parts], [*pending]

    def add(self, term: Tensor) -> None:
        self._pending.append(term.detach().double().reshape(()))
        if len(self._pending) >= _AT_ONCE:
            self.parts()

    def copy(self) -> "ExactScalar":
        """Returns the sum of now: what is added to this one is not in it."""
        return ExactScalar(self._parts, self._pending)

    def parts(self) -> list[float]:
        """Returns floats whose sum, exactly, is that of all terms."""
        if self._pending:
            self._parts = canonical_parts([*self._parts, *to_host(self._pending)])
            self._pending.clear()
        return self._parts


def exact_total(terms: Sequence[float]) -> float:
    """Returns the sum like `math.fsum`, which refuses to add an infinity to its opposite: here the sum is no number then."""
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        return sum(terms)


def canonical_parts(terms: Sequence[float]) -> list[float]:
    """Returns as few floats as have the same sum, exactly; equal sums give the same floats. What is not finite is one."""
    parts: list[float] = []
    while part := exact_total([*terms, *(-known for known in parts)]):
        if not math.isfinite(part):
            return [part]
        parts.append(part)
    return parts


def exact_mean(terms: Sequence[float], count: float) -> float:
    """Returns the mean, rounded once: a mean of equal numbers is this number. The mean of nothing is no number."""
    if not count or not all(map(math.isfinite, terms)):
        return exact_total(terms) / count if count else math.nan
    return float(sum(map(Fraction, terms), Fraction()) / Fraction(count))
