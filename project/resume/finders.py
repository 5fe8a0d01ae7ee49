"""Has Lightning's finders search when a run begins, and not when it resumes.

A finder ends its search with a checkpoint of its own, from where it began, which would take the place of the one that the run
resumes from.
"""

import logging

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from project.errors import UserError
from project.typed import callbacks_of, typed

log = logging.getLogger(__name__)


_BY_RANKS = (
    "LearningRateFinder goes by the loss of a rank's last micro-batch, and finds another rate on another number of ranks"
)
_HINT = "search once, and set the rate in the YAML."


class SearchOnce(Callback):
    """Leaves LearningRateFinder out where a run resumes, and refuses BatchSizeFinder there, whose size no checkpoint holds.

    A rate goes by the number of ranks, which is refused with trainer.exact. Subclasses may search at another time, and are left
    alone.
    """

    def __init__(self) -> None:
        self._left_out: list[Callback] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.teardown(trainer, pl_module, stage)  # after a fit that failed
        any_rates = callbacks_of(trainer, LearningRateFinder)
        rates = [finder for finder in any_rates if type(finder) is LearningRateFinder]
        sizes = [finder for finder in callbacks_of(trainer, BatchSizeFinder) if type(finder) is BatchSizeFinder]
        if stage != "fit" or not (sizes or any_rates):
            return
        if any_rates and typed(trainer).exact:
            raise UserError(f"trainer.exact can't be kept: {_BY_RANKS}. HINT: {_HINT}")
        resumes = trainer.strategy.broadcast(typed(trainer).resuming.chosen is not None)  # which rank 0 knows
        if resumes and sizes:
            raise UserError(
                "BatchSizeFinder has found a batch size when this run began, which no checkpoint holds. HINT: give the data "
                "the size that the run's log names, and leave BatchSizeFinder out."
            )
        if resumes and rates:
            self._left_out = [*rates]
            typed(trainer).callbacks = [callback for callback in typed(trainer).callbacks if callback not in rates]
        if not trainer.is_global_zero:
            return
        if sizes:
            log.warning(
                "BatchSizeFinder: no checkpoint holds the size that it finds, so this run will not resume with it. HINT: give "
                "the data that size, and leave BatchSizeFinder out."
            )
        if self._left_out:
            log.info("LearningRateFinder does not search again: the checkpoint holds the learning rate.")
        elif any_rates:
            log.warning("%s. HINT: %s", _BY_RANKS, _HINT)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._left_out:
            typed(trainer).callbacks = [*self._left_out, *typed(trainer).callbacks]
            self._left_out = []
