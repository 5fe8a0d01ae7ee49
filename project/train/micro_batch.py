"""What the Trainer knows of the micro-batch at hand. The module sees the batch that its `collate_fn` made, and no more."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from project.data.order import Key, Order, chance


@dataclass(frozen=True)
class MicroBatch:
    """Names a micro-batch, and tells what follows from its name."""

    key: Key = (0, 0, 0)
    """(epoch, step within the epoch, number within the step)."""
    run_seed: int = 0
    order: Order | None = None
    """The order that it was dealt out in; None where a loader has one of its own."""
    counted: int = 0
    """Its samples, as far as they can be counted, where there is no order."""

    @property
    def seed(self) -> int:
        """Of all that is drawn at random for it."""
        return chance(self.run_seed, self.key)

    @cached_property
    def weight(self) -> float:
        """What its mean loss counts for in its step: 1.0 except in a shorter last step."""
        return 1.0 if self.order is None else self.order.weight(*self.key[1:])

    @property
    def samples(self) -> list[int] | None:
        """Their numbers in the dataset, where they are known."""
        return None if self.order is None else self.order.indices(self.key).tolist()

    @cached_property
    def size(self) -> int:
        """How many samples it has."""
        if self.order is None:
            return self.counted
        low, high = self.order.micro_span(*self.key[1:])
        return high - low


def samples_of(batch: Any) -> int:
    """How many samples a batch seems to have: the length of the first tensor in it."""
    found: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: found.append(len(tensor) if tensor.ndim else 1))
    return found[0] if found else 0


def micro_batch(trainer: Trainer) -> MicroBatch:
    """The one that this rank trains on."""
    loop: Any = trainer.fit_loop.epoch_loop
    return cast(MicroBatch, loop.micro_batch)


def evaluated(trainer: Trainer) -> tuple[int, int] | None:
    """The one that this rank evaluates: the number of its loader, and the position of its first sample, if known."""
    logged: Any = trainer._logger_connector
    return cast(tuple[int, int] | None, logged.evaluated)


def arriving(trainer: Trainer) -> tuple[int, int] | None:
    """The same of the one that goes to the device, before it is there."""
    logged: Any = trainer._logger_connector
    return cast(tuple[int, int] | None, logged.arriving)


def joins(trainer: Trainer) -> bool:
    """Whether other ranks evaluate another micro-batch after this rank's last one."""
    logged: Any = trainer._logger_connector
    return bool(logged.joins)


def begin_prediction(trainer: Trainer, dataloader_idx: int) -> None:
    """Notes the micro-batch that is predicted now, as Lightning does not say so to whoever logs."""
    logged: Any = trainer._logger_connector
    logged.take_evaluated(dataloader_idx)


def may_skip(trainer: Trainer, whether: bool) -> None:
    """Says whether a step of this fit may be left out."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop.may_leave_out(whether)


def skip(trainer: Trainer, whether: bool | Tensor) -> None:
    """Says whether the step at hand is left out, as it is not finite: a tensor on a GPU, where only the device knows."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop.skipped = whether


def skipped(trainer: Trainer) -> bool | Tensor:
    """What was said by `skip`."""
    loop: Any = trainer.fit_loop.epoch_loop
    return cast(bool | Tensor, loop.skipped)


def loss_at_hand(trainer: Trainer) -> Tensor | None:
    """Of the micro-batch at hand, on its device, as the module gave it; None where there is none (yet)."""
    loop: Any = trainer.fit_loop.epoch_loop
    return cast(Tensor | None, loop.loss)
