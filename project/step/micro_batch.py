"""The Trainer's knowledge of the micro-batch at hand. The module sees the batch that its `collate_fn` made, and no more."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from lightning.pytorch import Trainer
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


def count_samples(batch: Any) -> int:
    """Returns how many samples a batch seems to have: the length of the first tensor in it."""
    lengths: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: lengths.append(len(tensor) if tensor.ndim else 1))
    return lengths[0] if lengths else 0


def micro_batch(trainer: Trainer) -> MicroBatch:
    """Returns the micro-batch that this rank trains on."""
    loop: Any = trainer.fit_loop.epoch_loop
    return cast(MicroBatch, loop.micro_batch)


def evaluated_key(trainer: Trainer) -> tuple[int, int] | None:
    """Returns the key of the micro-batch that this rank evaluates, if known: the number of its loader, and the position of its
    first sample.
    """
    logged: Any = trainer._logger_connector
    return cast(tuple[int, int] | None, logged.evaluated_key)


def arriving_key(trainer: Trainer) -> tuple[int, int] | None:
    """Returns the key, as `evaluated_key` does, of the micro-batch that is on its way to the device."""
    logged: Any = trainer._logger_connector
    return cast(tuple[int, int] | None, logged.arriving_key)


def peers_evaluate_more(trainer: Trainer) -> bool:
    """Returns whether other ranks evaluate another micro-batch after this rank's last one."""
    logged: Any = trainer._logger_connector
    return bool(logged.peers_evaluate_more)


def begin_predicted_micro_batch(trainer: Trainer, dataloader_idx: int) -> None:
    """Notes which micro-batch is predicted now: Lightning does not report it to its logger connector."""
    logged: Any = trainer._logger_connector
    logged.begin_evaluated_micro_batch(dataloader_idx)


def allow_skipped_steps(trainer: Trainer, whether: bool) -> None:
    """Sets whether a step of this fit may be skipped."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop.allow_skipped_steps(whether)


def set_step_skipped(trainer: Trainer, whether: bool | Tensor) -> None:
    """Sets whether the step at hand is skipped, as it is not finite: a tensor on a GPU, where only the device knows."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop.step_skipped = whether


def is_step_skipped(trainer: Trainer) -> bool | Tensor:
    """Returns whether the step at hand is skipped, as `set_step_skipped` has set it."""
    loop: Any = trainer.fit_loop.epoch_loop
    return cast(bool | Tensor, loop.step_skipped)


def loss_at_hand(trainer: Trainer) -> Tensor | None:
    """Returns the loss of the micro-batch at hand, on its device, as the module gave it; None where there is none (yet)."""
    loop: Any = trainer.fit_loop.epoch_loop
    return cast(Tensor | None, loop.loss)
