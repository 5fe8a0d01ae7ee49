"""The order of the samples: which sample, in which micro-batch, on which rank; a pure function of (seed, epoch, position).

An epoch is a row of *positions* 0 .. size-1; a keyed permutation maps each to a sample. A step takes the next global batch of
positions, cut into a fixed number of micro-batches; a rank takes whole micro-batches. So the same samples meet in the same
micro-batches on any number of ranks, and any position can be reached at once.
"""

from collections.abc import Iterator, Sized
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, isqrt
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler

from project.errors import UserError

Key = tuple[int, int, int]
"""What names a micro-batch: (epoch, step within the epoch, number within the step)."""

Limit = int | float | None

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1
_WINDOW = 8192  # positions permuted at a time, at most: numpy's cost per call disappears, and 64 KiB is kept


def size_of(dataset: object) -> int:
    """Returns the number of a dataset's samples: torch's Dataset declares no length."""
    return len(cast(Sized, dataset))


def limited(count: int, limit: Limit, key: str, what: str) -> int:
    """Returns how many of `count` a limit leaves: an int is a number, a float a share, as in Lightning. Refuses a share of less
    than one, with which nothing would happen; `key` and `what` name it."""
    if limit is None:
        return count
    if isinstance(limit, int):
        return min(count, limit)
    if 0 < count * limit < 1:
        raise UserError(
            f"trainer.{key}={limit} of {count} {what} is less than one, and nothing would be done. HINT: {key}=1 takes one of "
            f"them; the least share is {ceil(1e4 / count) / 1e4}."
        )
    return int(count * limit)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatters 64-bit integers (the finaliser of splitmix64): the same bits on every platform."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def chance(seed: int, key: Key) -> int:
    """Returns the seed of all that is drawn at random for a micro-batch."""
    state = 0
    for number in (seed, *key):  # as `mix`, in whole numbers: once a micro-batch, an array costs more than it saves
        state = ((state ^ number) + 0x9E3779B97F4A7C15) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state >> 1


def permute(positions: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the samples at these positions: a keyed permutation of range(size), computed on demand.

    A Feistel network over pairs (left, right) of numbers below ceil(sqrt(size)); what falls outside the range walks on
    through the network until it is inside, which keeps it a permutation (cycle walking).
    """
    side = np.uint64(isqrt(size - 1) + 1)
    words = np.array([seed, epoch], dtype=np.int64).astype(np.uint64)
    key_of_epoch = mix(mix(words[:1] + _GOLDEN) ^ words[1:])
    keys = mix(key_of_epoch + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN)

    def network(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x // side, x % side
        for key in keys:
            left, right = right, (left + mix(right ^ key) % side) % side
        return left * side + right

    x = network(positions.astype(np.uint64))
    while (outside := x >= size).any():
        x[outside] = network(x[outside])
    return x.astype(np.int64)


@lru_cache(maxsize=2)
def _window(start: int, stride: int, length: int, rows: int, size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the samples at `rows` runs of neighbouring positions, `stride` apart; those past the end are not used."""
    positions = start + np.arange(rows)[:, None] * stride + np.arange(length)
    return permute(np.minimum(positions, size - 1).ravel(), size, seed, epoch).reshape(rows, length)


@dataclass(frozen=True)
class Order:
    """The way in which `size` samples fall into steps of so many micro-batches, over all ranks.

    Args:
        size: samples in the dataset.
        micro_batch: samples in a micro-batch.
        micro_batches: micro-batches in a step, over all ranks.
        seed: the key of the permutation; None leaves the samples in their own order.
        tail: 'keep' spreads what is left for the last step evenly over its micro-batches, 'drop' leaves it out of this epoch.
        limit: steps of an epoch that are taken, if fewer than there are.
        share: neighbouring micro-batches of a step that one rank reads; by default all.
        least: fewer samples for each micro-batch of the last step join the step before: a batch norm can't work with one.
        cut: the last step is cut into micro-batches of full size and a smaller one, and the others are empty, on any number
            of ranks.
        taken: of an order that is cut, so many micro-batches are taken; where it has fewer, it begins again.
    """

    size: int
    micro_batch: int
    micro_batches: int
    seed: int | None = None
    tail: Literal["keep", "drop"] = "keep"
    limit: int | None = None
    share: int | None = None
    least: int = 2
    cut: bool = False
    taken: int | None = None

    @cached_property
    def global_batch(self) -> int:
        return self.micro_batch * self.micro_batches

    @cached_property
    def steps(self) -> int:
        """Returns the optimiser steps in an epoch."""
        return self._steps if self.limit is None else min(self._steps, self.limit)

    @cached_property
    def batches(self) -> int:
        """Returns how many micro-batches the samples make, where the order is cut."""
        return -(-self.size // self.micro_batch)

    @cached_property
    def _steps(self) -> int:
        if self.taken is not None:
            return -(-self.taken // self.micro_batches)
        full, left = divmod(self.size, self.global_batch)
        alone = self.tail == "keep" and left >= (1 if self.cut else self.least * self.micro_batches)
        return full + alone if full else int(self.tail == "keep" and left > 0)

    def limited(self, limit: int | float | None) -> "Order":
        """Returns the same order with fewer steps: a number of them (an int), or a share of them (a float)."""
        if limit is None:
            return self
        return replace(self, limit=limited(self._steps, limit, "limit_train_batches", "steps of an epoch"))

    def span(self, step: int) -> tuple[int, int]:
        """Returns the positions of a step: start, stop."""
        start = step * self.global_batch
        last = step == self._steps - 1 and self.tail == "keep"
        return start, self.size if last else start + self.global_batch

    def micro_span(self, step: int, number: int) -> tuple[int, int]:
        """Returns the positions of one of a step's micro-batches: start, stop."""
        if self.cut:
            low = self.place(step, number)
            low = min(low if self.taken is None else low % (self.batches * self.micro_batch), self.size)
            return low, min(low + self.micro_batch, self.size)
        start, stop = self.span(step)
        length = stop - start
        return start + number * length // self.micro_batches, start + (number + 1) * length // self.micro_batches

    def place(self, step: int, number: int) -> int:
        """Returns the position of a micro-batch's first sample, counting on where an order begins again."""
        return step * self.global_batch + number * self.micro_batch if self.cut else self.micro_span(step, number)[0]

    def is_empty(self, step: int, number: int) -> bool:
        """Returns whether there is no such micro-batch: a last step that is cut may have fewer."""
        whole = self.batches if self.taken is None else self.taken
        return self.cut and step * self.micro_batches + number >= whole

    def weight(self, step: int, number: int) -> float:
        """Returns the weight of a micro-batch's mean loss that makes the step's gradient the mean over its samples: 1.0
        everywhere but in the tail."""
        start, stop = self.span(step)
        low, high = self.micro_span(step, number)
        return (high - low) * self.micro_batches / (stop - start)

    def indices(self, key: Key) -> NDArray[np.int64]:
        """Returns the samples of a micro-batch."""
        epoch, step, number = key
        low, high = self.micro_span(step, number)
        if self.seed is None:
            return np.arange(low, high)
        start, stop = self.span(step)
        if self.taken is not None or stop - start != self.global_batch:  # the last step
            return permute(np.arange(low, high), self.size, self.seed, epoch)
        # Of this step and of those that follow, and only what is read here: other ranks have other micro-batches.
        run = min(self.share or self.micro_batches, max(1, _WINDOW // self.micro_batch))
        first, place = number - number % run, number % run * self.micro_batch
        rows = max(1, min(self.steps, _WINDOW // (run * self.micro_batch)))
        window = _window(
            (step - step % rows) * self.global_batch + first * self.micro_batch,
            *(self.global_batch, run * self.micro_batch, rows, self.size, self.seed, epoch),
        )
        return window[step % rows, place : place + self.micro_batch]


ENOUGH = 64


def cut_for_all(samples: int, micro_batch: int, ranks: int) -> int:
    """Returns the micro-batch size of an evaluation, so that each of up to 64 ranks has one at least."""
    size = min(micro_batch, max(1, samples // ENOUGH))
    if (count := -(-samples // size)) < ranks:
        raise UserError(
            f"trainer.exact cuts an evaluation of {samples} samples into {count} micro-batches, on any number of ranks, and "
            f"{ranks} ranks are too many for them. HINT: evaluate on more samples, or on at most {count} ranks."
        )
    return size


class MicroBatchSampler(DistributedSampler[Key]):
    """The keys of one rank's micro-batches: of each step a run of neighbours. It is a DistributedSampler, so that Lightning
    leaves it in place and calls `set_epoch`; that one's arithmetic is not used, as it pads with duplicates."""

    def __init__(self, order: Order, rank: int, world_size: int) -> None:
        assert order.micro_batches % world_size == 0
        super().__init__(range(order.size), num_replicas=world_size, rank=rank, shuffle=False)  # type: ignore[arg-type]
        share = order.micro_batches // world_size
        self.order = replace(order, share=share)
        self._own_numbers = range(rank * share, (rank + 1) * share)
        self._start: tuple[int, int] | None = None

    def start_at(self, epoch: int, step: int) -> None:
        """Starts that epoch at `step`, which is beyond its steps where another loader has more of them. Lightning makes its
        first iterator before it sets the epoch.
        """
        self.set_epoch(epoch)
        self._start = epoch, step

    def start_over(self) -> None:
        """Makes the next pass begin at its beginning, also within the same epoch; after an epoch that had ended before its
        start, at what that pass has left: Lightning begins a shorter loader again in `max_size_cycle`, and not in `max_size`.
        """
        (epoch, step), steps = self._start or (self.epoch, 0), self.order.steps
        self._start = (epoch, step % steps) if 0 < steps <= step else None

    def set_epoch(self, epoch: int) -> None:
        if self._start and self._start[0] != epoch:
            self._start = None
        super().set_epoch(epoch)

    def __len__(self) -> int:
        steps = self.order.steps
        return steps * len(self._own_numbers) - sum(
            self.order.is_empty(steps - 1, number) for number in self._own_numbers if steps
        )

    def __iter__(self) -> Iterator[Key]:
        # Asked more than once for one epoch: a loader with processes of its own throws its first iterator away.
        epoch, first = self._start or (self.epoch, 0)
        for step in range(first, self.order.steps):
            for number in self._own_numbers:
                if not self.order.is_empty(step, number):
                    yield epoch, step, number
