"""Has Lightning's finders search when a run begins, and not when it resumes.

A finder ends its search with a checkpoint of its own, from where it began, which would take the place of the one that the run
resumes from.
"""

import logging

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from project.errors import UserError
from project.typed import callbacks_of, typed

log = logging.getLogger(__name__)


def search_once(trainer: Trainer, resumes: bool) -> None:
    """Leaves LearningRateFinder out where a run resumes, and refuses BatchSizeFinder there, whose size no checkpoint holds."""
    sizes, rates = callbacks_of(trainer, BatchSizeFinder), callbacks_of(trainer, LearningRateFinder)
    if resumes and sizes:
        raise UserError(
            "BatchSizeFinder has found a batch size when this run began, which no checkpoint holds. HINT: give the data the "
            "size that the run's log names, and leave BatchSizeFinder out."
        )
    if sizes and trainer.is_global_zero:
        log.warning(
            "BatchSizeFinder: no checkpoint holds the size that it finds, so this run will not resume with it. HINT: give the "
            "data that size, and leave BatchSizeFinder out."
        )
    if resumes and rates:
        typed(trainer).callbacks = [callback for callback in typed(trainer).callbacks if callback not in rates]
        if trainer.is_global_zero:
            log.info("LearningRateFinder does not search again: the checkpoint holds the learning rate.")
