"""Warns of values that change during training and that no checkpoint holds, in the first steps of a run.

A resumed run makes the module, its data and its callbacks anew, and restores what was saved. Whatever else has changed since
the start it would not have: a counter, a list of outputs, a generator of its own. Values are compared, so that no code of the
user runs but what saves its state. What changes later is named by the run that is resumed: digests of it lie in the checkpoint.
"""

import logging
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch.optim import Optimizer

from project.checkpoints.callback import checkpoints_of
from project.exact.checks import MovedWeights, check_compiled
from project.resume.attributes import UNKNOWN, Attributes, attributes, changed_attributes, unsaved_attributes
from project.resume.checkpoint import current_checkpoint, note_initial_values, unsaved_digests
from project.sharded.strategy import is_sharded
from project.step.position import position
from project.typed import typed

log = logging.getLogger(__name__)

_SHOWN = 12  # names
_STEPS = 3  # before the comparison; they are of the first epoch that this process trains, whose start a resumed run does again


class Rehearsal(Callback):
    """Warns of each attribute that has changed in the first steps and that a checkpoint would not hold and, where a run is
    resumed, of each that differs from its value at the time of the checkpoint.
    """

    def __init__(self) -> None:
        self._before: Attributes | None = None
        self._at_start: Attributes = {}
        self._compare_at = 0
        self._reported = set[str]()
        self._micro_batches_compared = False
        self._buffers_at_start: MovedWeights | bool | None = None
        """The buffers at the start of the first step; False once they have been compared."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks = typed(trainer).callbacks
        if any(isinstance(callback, ModelPruning) for callback in callbacks):
            log.warning("ModelPruning leaves its masks out of checkpoints: after a restart what was pruned grows again.")
        check_compiled(pl_module, typed(trainer).exact)
        self._before, self._reported, self._micro_batches_compared, self._buffers_at_start = None, set(), False, None
        self._at_start = attributes(trainer) if unsaved_digests(trainer) else {}

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._buffers_at_start is None:
            looks = trainer.is_global_zero and not typed(trainer).exact
            self._buffers_at_start = MovedWeights(pl_module, parameters=False) if looks else False
        if self._before is None and checkpoints_of(trainer) and not is_sharded(trainer) and not typed(trainer).fast_dev_run:
            self._before = attributes(trainer)
            note_initial_values(trainer, self._before)
            self._compare_at = trainer.global_step + _STEPS
            self._compare_with_saved(trainer, self._before)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Warns, when the first step's second micro-batch begins, of values that have changed: they follow a rank's
        micro-batches.
        """
        if self._before and not self._micro_batches_compared and batch_idx % trainer.accumulate_grad_batches == 1:
            self._micro_batches_compared = True
            moved = [f"{owner}.{attribute}" for owner, attribute in changed_attributes(trainer, self._before)]
            if moved and trainer.is_global_zero:
                log.warning(
                    "%s: changes with each micro-batch of a rank, and not once a step: on another number of ranks it is "
                    "another one. HINT: change it in on_before_optimizer_step, by what all ranks have.",
                    _join_names(moved),
                )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Warns, when the first step's gradients are there, of buffers that have changed: a micro-batch of this rank has
        moved them.
        """
        if isinstance(self._buffers_at_start, MovedWeights):
            moved, self._buffers_at_start = self._buffers_at_start.moved_buffers(), False
            if moved:
                log.warning(
                    "%s: the network moves it with each micro-batch of a rank, and on several ranks it is rank 0's: on another "
                    "number of ranks it is another one. HINT: move it in on_before_optimizer_step, by what all ranks have.",
                    _join_names(moved),
                )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # An epoch's end is another matter: what it empties need not be saved.
        if self._before and (trainer.global_step >= self._compare_at or trainer.is_last_batch):
            before, self._before = self._before, {}
            self._compare(trainer, before)

    def _compare(self, trainer: Trainer, before: Attributes) -> None:
        """Warns of attributes that have changed and that a checkpoint would not hold. Called by all ranks."""
        checkpoint = current_checkpoint(trainer)
        moved = [name for name in unsaved_attributes(trainer, before, checkpoint) if name not in self._reported]
        if moved and trainer.is_global_zero:
            log.warning(
                "%s: changed in the first steps, and not in what a checkpoint holds, so that a resumed run begins with what it "
                "was at the start. HINT: keep it in a buffer, in on_save_checkpoint and on_load_checkpoint, or in state_dict.",
                _join_names(moved),
            )

    def _compare_with_saved(self, trainer: Trainer, now: Attributes) -> None:
        """Warns of attributes that are not what they were when the checkpoint was saved. The start of an epoch sets some anew:
        where one begins here, those do not count.
        """
        saved, begun = unsaved_digests(trainer), position(trainer).step > 0
        self._reported = {
            name
            for name, digest in saved.items()
            if (value := _digest_of(now, name)) not in (digest, UNKNOWN)
            and (begun or value == _digest_of(self._at_start, name))
        }
        if self._reported and trainer.is_global_zero:
            log.warning(
                "%s: not what it was when the checkpoint was saved, which does not hold it. HINT: keep it in a buffer, in "
                "on_save_checkpoint and on_load_checkpoint, or in state_dict.",
                _join_names(sorted(self._reported)),
            )


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _digest_of(values: Attributes, name: str) -> bytes | None:
    """Returns the digest of an attribute by its full name, owner.attribute."""
    owner, _, attribute = name.rpartition(".")
    return values.get(owner, {}).get(attribute)
