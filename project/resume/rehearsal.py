"""Warns of values that change during training and that no checkpoint holds, in the first steps of a run.

A resumed run makes the module, its data and its callbacks anew, and restores what was saved. Whatever else has changed since
the start it would not have: a counter, a list of outputs, a generator of its own. Values are compared, so that no code of the
user runs but what saves its state. What changes later is named by the run that is resumed: digests of it lie in the checkpoint.
"""

import logging
from collections.abc import Container, Iterable, Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from project.checkpoints.callback import checkpoints_of
from project.data.generators import Generators
from project.data.values import GENERATORS
from project.errors import listed
from project.exact.checks import check_compiled
from project.resume.attributes import (
    UNKNOWN,
    Attributes,
    attributes,
    by_name,
    changed_attributes,
    generators,
    lies_in,
    unsaved_attributes,
    values,
)
from project.sharded.shards import split
from project.step.position import position
from project.typed import callbacks_of, typed

log = logging.getLogger(__name__)

_SHOWN = 12  # names
_KEEP = "keep it in a buffer, in on_save_checkpoint and on_load_checkpoint, or in state_dict"
_ONCE = "change it in on_before_optimizer_step, by what all ranks have"
_DRAW = (
    "a generator of its own; draw from torch's, Python's or NumPy's own (torch.randn without generator=), which are seeded for "
    "each sample and micro-batch"
)
_HINTS = (
    (GENERATORS, _DRAW),
    ((Optimizer, LRScheduler), "return it in configure_optimizers, or save it in the state_dict of what has it"),
    (Metric, "make it an attribute of the LightningModule, which saves what it has counted and brings the ranks' together"),
)
"""What helps for values of some kinds, in place of `_KEEP`."""
_STEPS = 3  # before the comparison; they are of the first epoch that this process trains, whose start a resumed run does again


class Rehearsal(Callback):
    """Warns of attributes that change in the first steps unsaved, and of those that a resumed run could not restore."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if callbacks_of(trainer, ModelPruning):
            log.warning("ModelPruning leaves its masks out of checkpoints: after a restart what was pruned grows again.")
        resuming = typed(trainer).resuming
        self._at_start = attributes(trainer) if resuming.changed_values else {}
        self._before: Attributes | None = None  # the values at the first step; {} once they have been compared
        self._generators: Generators | None = None  # of a run that begins
        self._reported = set[str]()
        self._first_step = trainer.global_step
        self._changed_by_first: Container[str] = ()  # attributes that the first micro-batch has changed
        self._after_first: Attributes = {}  # the values after it, until the next one has been compared
        self._micro_batches_compared = False

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._before is not None:
            return
        check_compiled(pl_module, typed(trainer).exact)  # after all hooks that may compile a layer
        self._before = {}
        if checkpoints_of(trainer) and not typed(trainer).fast_dev_run:
            self._before = attributes(trainer)
            self._generators = generators(trainer) if trainer.global_step == 0 else None
            connector = typed(trainer).resuming  # which has none of objects that were made since the fit began (training sets)
            connector.values_as_built = {**self._before, **connector.values_as_built}
            self._warn_of_lost_values(trainer, self._before)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Warns of values that follow a rank's micro-batches: the first step's first one changes them, and its second, too."""
        if self._after_first:
            self._compare_micro_batches(trainer)
        elif self._before and not self._micro_batches_compared and batch_idx % trainer.accumulate_grad_batches == 1:
            self._after_first = attributes(trainer)
            self._changed_by_first = changed_attributes(self._after_first, self._before)

    def _compare_micro_batches(self, trainer: Trainer) -> None:
        """Warns of values that the first step's first two micro-batches have changed, each of them."""
        if self._after_first:
            changed = changed_attributes(attributes(trainer), self._after_first)
            self._after_first, self._micro_batches_compared = {}, True
            _warn(
                "changes with each micro-batch of a rank, and not once a step: on another number of ranks it is another one. "
                "HINT: {hint}.",
                *(trainer, [name for name in changed if name in self._changed_by_first], self._drawn, _ONCE),
            )

    @property
    def _drawn(self) -> dict[str, bytes]:
        """Returns the digests of generators that have drawn since the run began, by name."""
        return self._generators.moved() if self._generators is not None else {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Warns of attributes that have changed unsaved. What an epoch's end empties need not be saved."""
        if trainer.is_last_batch:  # of an epoch of one step
            self._compare_micro_batches(trainer)
        if self._before and (trainer.global_step >= self._first_step + _STEPS or trainer.is_last_batch):
            resuming = typed(trainer).resuming
            checkpoint = resuming.dump_checkpoint(weights_only=False)
            # What the first steps have brought into it: counts, what was logged, states of callbacks.
            resuming.check_readable(split(checkpoint).marked)
            drawn = self._drawn
            unsaved = unsaved_attributes(trainer, self._before, drawn, checkpoint)
            self._before, self._generators = {}, None
            _warn(
                "changed in the first steps, and not in what a checkpoint holds, so that a resumed run begins with what it was "
                "at the start: harmless if each step sets it anew. HINT: {hint}.",
                *(trainer, [name for name in unsaved if name not in self._reported], drawn),
            )

    def _warn_of_lost_values(self, trainer: Trainer, now: Attributes) -> None:
        """Warns of attributes that had another value in the checkpoint; where an epoch begins here, not of those it sets."""
        begun, saved = position(trainer).step > 0, typed(trainer).resuming.changed_values
        values, at_start = by_name(now), by_name(self._at_start)
        others = [
            name
            for name, digest in saved.items()
            if values.get(name) not in (digest, UNKNOWN) and (begun or values.get(name) == at_start.get(name))
        ]
        self._reported.update(others)
        _warn(
            "not what it was when the checkpoint was saved: it is not saved, or not restored, or setup or on_train_start sets "
            "it anew. HINT: {hint}; set it in __init__ alone.",
            *(trainer, others),
        )


def _warn(text: str, trainer: Trainer, names: Sequence[str], drawn: Iterable[str] = (), otherwise: str = _KEEP) -> None:
    """Prints a warning with names of attributes, and the hint for each; `drawn`: the names of generators that have drawn."""
    if names and trainer.is_global_zero:
        known = {name: value for name, value in values(trainer) if name in names}
        by_hint: dict[str, list[str]] = {}
        for name in (names := sorted(names)):
            hint = next((hint for kinds, hint in _HINTS if isinstance(known.get(name), kinds)), otherwise)
            hint = _DRAW if any(lies_in(generator, name) for generator in drawn) else hint
            by_hint.setdefault(hint, []).append(name)
        whose = [f"{', '.join(those[:_SHOWN])}: {hint}" for hint, those in by_hint.items()]
        hint = "; ".join(whose) if len(whose) > 1 or otherwise not in by_hint else otherwise
        log.warning("%s: %s", listed(names, _SHOWN), text.replace("{hint}", hint))
