"""Runs the device's part of a micro-batch: here one operation after the other; step/capture.py has another, by graphs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

from torch import Tensor

from project.typed import Batch

Outputs: TypeAlias = dict[str, object]
"""What `training_step` returned, by name; the loss is under 'loss'."""
Transfer: TypeAlias = Callable[[Batch, int], Batch]
"""The data module's work on a batch on the device; the number is that of the loader."""
Train: TypeAlias = Callable[[Batch], Outputs]


class Runner:
    """Runs a micro-batch one operation after the other. Its subclass records graphs."""

    keeps_norm = False
    """The norm of the gradient is computed with the step: nothing else can be asked of a graph afterwards."""

    def begin_epoch(self) -> None:
        """Called at the start of an epoch, when callbacks and optimisers are known."""

    def change_callbacks(self) -> None:
        """Called when a callback was added or removed during training."""

    def prepare(self, batch: Batch, number: int, accumulates: bool, transfer: Transfer) -> Batch:
        """Returns the batch as the hooks before the step see it. `number`: of the micro-batch within its step; `transfer`: the
        data module's work on a batch on the device.
        """
        return transfer(batch, 0)

    def run(self, batch: Batch, transfer: Transfer, train: Train) -> tuple[Outputs, Batch]:
        """Returns the outputs of `train`, and the batch as the hooks after the step see it."""
        return train(batch), batch

    def rates(self) -> AbstractContextManager[None]:
        """Gives the optimiser its learning rates within, as a graph can read them."""
        return nullcontext()

    def repeated(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Returns `work`, which must always do the same with the same memory, in the runner's way."""
        return work
