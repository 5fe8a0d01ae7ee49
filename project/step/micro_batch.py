"""The Trainer's knowledge of the micro-batch at hand. The module sees the batch that its `collate_fn` made, and no more."""

from dataclasses import dataclass
from functools import cached_property

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from project.data.order import Key, Order, chance


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch's name, and what follows from it."""

    key: Key = (0, 0, 0)
    """(epoch, step within the epoch, number within the step)."""
    run_seed: int = 0
    order: Order | None = None
    """The order that it was dealt out in; None where a loader has one of its own."""
    counted: int = 0
    """Its samples, as far as they can be counted, where there is no order."""

    @property
    def seed(self) -> int:
        """Returns the seed of all that is drawn at random for it."""
        return chance(self.run_seed, self.key)

    @cached_property
    def weight(self) -> float:
        """Returns the weight of its mean loss in its step: 1.0 except in a shorter last step."""
        return 1.0 if self.order is None else self.order.weight(*self.key[1:])

    @property
    def samples(self) -> list[int] | None:
        """Returns the numbers of its samples in the dataset, where they are known."""
        return None if self.order is None else self.order.indices(self.key).tolist()

    @cached_property
    def size(self) -> int:
        """Returns the number of its samples."""
        if self.order is None:
            return self.counted
        low, high = self.order.micro_span(*self.key[1:])
        return high - low

    @property
    def step_size(self) -> int | None:
        """Returns the number of samples of its step, over all ranks, where they are known."""
        if self.order is None:
            return None
        low, high = self.order.span(self.key[1])
        return high - low


def count_samples(batch: object) -> int:
    """Returns how many samples a batch seems to have: the length of the first tensor in it."""
    lengths: list[int] = []

    def note(tensor: Tensor) -> Tensor:  # of which a PackedSequence is made anew
        lengths.append(len(tensor) if tensor.ndim else 1)
        return tensor

    apply_to_collection(batch, Tensor, note)
    return lengths[0] if lengths else 0
