"""Seeds the random numbers: whenever code of the user runs, the generators' seed follows from the run, the moment and its key.

So what is drawn is the same on any number of ranks, after a restart, and with or without loader processes. A moment is a
hook of the module, its data or a callback (the key is the epoch, or the step, where there are several of them), the fetching
of a micro-batch, the micro-batch itself from its transfer to the device on, and the optimiser's step. Numbers that are drawn
outside any moment are reported: nothing says how often another rank, or a resumed run, has drawn before.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol, TypeAlias, cast
from zlib import crc32

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from project.data.dealing import (
    States,
    chance_kept,
    drawn_from,
    generator_states,
    restore_generators,
    seed_generators,
    warn_of_draws,
)
from project.data.order import chance
from project.data.values import users_class
from project.errors import UserError
from project.step.evaluated import arriving_key, begin_evaluated_micro_batch
from project.step.state import ends_step, micro_batch, step_state
from project.typed import typed

log = logging.getLogger(__name__)

_BETWEEN = 1 << 40  # no micro-batch has this number
_EVALUATED, _STEP, _FETCHED, _HOOK, _ARRIVING = 1 << 41, 1 << 42, 1 << 43, 1 << 44, 1 << 46  # nor these
_CHECKED_BATCHES = 32  # micro-batches of a fit after which it is asked whether numbers were drawn outside any moment

_OF_A_RUN = frozenset(
    (
        *("prepare_data", "setup", "configure_callbacks", "configure_sharded_model", "configure_model", "configure_optimizers"),
        *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "on_fit_start", "on_fit_end"),
        *("on_sanity_check_start", "on_sanity_check_end", "on_train_start", "on_train_end", "teardown"),
    )
)
_OF_AN_EPOCH = frozenset(("on_train_epoch_start", "on_train_epoch_end"))
_OF_A_STEP = frozenset(
    f"on_{stage}_{part}"
    for stage in ("validation", "test", "predict")
    for part in ("start", "end", "epoch_start", "epoch_end", "model_eval", "model_train")
) | {"on_save_checkpoint", "on_load_checkpoint"}
_MOMENTS = _OF_A_RUN | _OF_AN_EPOCH | _OF_A_STEP
_SEEDED_AFTER = ("prepare_data", "configure_callbacks")
"""Hooks after which Lightning itself seeds the generators, when it connects the ranks."""

Profile: TypeAlias = Callable[[str], AbstractContextManager[object]]
"""A profiler's context of an action, which it gets the name of."""


class _Profiler(Protocol):
    """A profiler whose method is replaced."""

    profile: Profile


def run_seed() -> int:
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def seed_moment(epoch: int, step: int, number: int) -> None:
    """Seeds the generators for a moment of this run."""
    _seed_all_generators(chance(run_seed(), (epoch, step, number)))


def _seed_all_generators(seed: int) -> None:
    """Seeds torch's generators, Python's, and NumPy's, which mixup, for one, draws from."""
    seed_generators(seed)
    if torch.cuda.is_initialized():  # by whoever trains on it
        torch.cuda.manual_seed(seed)


class Moments:
    """Seeds the generators at each moment of a Trainer, and reports what is drawn outside all of them.

    Args:
        trainer: the Trainer. Lightning calls each hook within `trainer.profiler.profile`, which is how a hook is seen.
        exact: numbers drawn outside any moment end the run.
    """

    def __init__(self, trainer: Trainer, exact: bool) -> None:
        self._trainer, self._exact = trainer, exact
        self._depth, self._last_moment, self._states_at_last_moment = 0, "", None  # type: int, str, States | None
        self._states_at_transfer: States | None = None
        self._checks, self._batches_to_check = True, _CHECKED_BATCHES
        profiler = cast(_Profiler, typed(trainer).profiler)
        vars(profiler).pop("profile", None)  # of another Trainer that had it
        profiler.profile = partial(self._wrap_profile, profiler.profile)

    @contextmanager
    def verb(self) -> Iterator[None]:
        """Runs a fit, or another verb. What a script draws between two of them belongs to neither, and is what it would draw
        without them.
        """
        self._checks, self._batches_to_check, self._states_at_last_moment = True, _CHECKED_BATCHES, None
        restore = restore_generators()
        try:
            yield
        finally:
            self.stop_checking()
            if not isinstance(sys.exc_info()[1], torch.AcceleratorError):  # else the device answers nothing any more
                restore()

    def _wrap_profile(self, profile: Profile, action: str) -> AbstractContextManager[object]:
        """Takes the place of the profiler's `profile`: seeds the generators around the hooks of the user's code, and for a
        micro-batch of an evaluation on its way to the device.
        """
        hook = action.rpartition(".")[2]
        if (
            hook == "on_before_batch_transfer"
            and (self._trainer.evaluating or self._trainer.predicting)
            and (position := arriving_key(self._trainer)) is not None
        ):
            seed_moment(*position, _ARRIVING)
            self._states_at_transfer = self._states_at_transfer or generator_states()  # of the first one
        if hook not in _MOMENTS or action.startswith("[Strategy]"):
            return profile(action)
        return self._seed_hook(profile, action, hook)

    @contextmanager
    def _seed_hook(self, profile: Profile, action: str, hook: str) -> Iterator[object]:
        """Seeds the generators for a hook, and notes their states when it ends."""
        kind = type(self._trainer.lightning_module)  # torch makes another one where several ranks share the network
        action = action.replace(f"]{kind.__name__}.", f"]{users_class(kind).__name__}.", 1)
        self._check_draws(action)
        # Within another moment, as when a checkpoint is saved in the middle of a step, that one goes on as if nothing were.
        with chance_kept() if self._depth else nullcontext():
            seed_moment(*self._epoch_and_step(hook), _HOOK | crc32(action.encode()))
            self._depth += 1
            try:
                with profile(action) as entered:
                    yield entered
            finally:
                self._depth -= 1
        if hook not in _SEEDED_AFTER and (hook not in _OF_A_STEP or hook.endswith("_end")):  # else micro-batches come next
            self._note_states(action)

    def _epoch_and_step(self, hook: str) -> tuple[int, int]:
        """Returns the epoch and the step in the key of a hook; 0 for a hook of a whole run, or of a whole epoch."""
        trainer = self._trainer
        if hook in _OF_A_RUN:
            often = typed(trainer).reload_dataloaders_every_n_epochs if hook == "train_dataloader" else 0
            return (trainer.current_epoch // often * often if often else 0), 0
        return trainer.current_epoch, 0 if hook in _OF_AN_EPOCH else trainer.global_step

    # The moments of a step -------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Seeds the same on all ranks, and in a resumed run: the iterators of loaders that are left as they are come next."""
        seed_moment(epoch, 0, _BETWEEN)
        self._depth, self._states_at_last_moment = 0, None  # an error may have ended an earlier fit anywhere

    def begin_fetch(self, number: int) -> None:
        """Seeds what a loader that is left as it is draws for its next micro-batch: its sampler, and its `collate_fn`."""
        seed_moment(self._trainer.current_epoch, number, _FETCHED)

    def begin_micro_batch(self, seed: int) -> None:
        """Seeds all that happens to a micro-batch, from its transfer to the device on."""
        self._check_draws("the next micro-batch")
        self._depth = 1
        _seed_all_generators(seed)

    def end_micro_batch(self) -> None:
        """Ends the moment of a micro-batch; in the first ones of a fit, notes the generators' states."""
        self._depth = 0
        if self._batches_to_check > 0:
            self._batches_to_check -= 1
            self._note_states("on_train_batch_end")

    def drawn_in_transfer(self) -> list[str]:
        """Returns the generators that were drawn from while the first micro-batch of an evaluation went to the device."""
        return [] if self._states_at_transfer is None else drawn_from(self._states_at_transfer)

    # What is drawn outside ---------------------------------------------------------------------------------------------

    def stop_checking(self) -> None:
        """Stops the check of draws outside any moment: the iterators of a loader that is left as it is draw there."""
        self._checks, self._states_at_last_moment = False, None

    @contextmanager
    def without_check(self) -> Iterator[None]:
        """Excludes code from the check of draws: code that draws, and then resets the generators."""
        states = self._states_at_last_moment
        try:
            yield
        finally:
            self._states_at_last_moment = states

    def _note_states(self, moment: str) -> None:
        """Notes the generators' states at the end of a moment."""
        if self._checks and not self._depth:
            self._last_moment, self._states_at_last_moment = moment, generator_states()

    def _check_draws(self, moment: str) -> None:
        """Reports, once, numbers that were drawn since the end of the last moment."""
        before, self._states_at_last_moment = self._states_at_last_moment, None
        if before is None or self._depth or not (drawn := drawn_from(before)):
            return
        self._checks = False  # once
        what = (
            f"random numbers ({', '.join(drawn)}) were drawn outside any hook, between {self._last_moment} and {moment}, and "
            "may be others on other ranks and after a restart"
        )
        hint = "a schedule, a logger or a thread may do so: draw in a hook, or from a generator that lies in a state_dict."
        if self._exact:
            raise UserError(f"trainer.exact can't be kept: {what}. HINT: {hint}")
        log.warning("%s%s. HINT: %s", what[0].upper(), what[1:], hint)


class ChanceByMicroBatch(Callback):
    """Seeds the generators where a step is common to all ranks, and before each micro-batch of an evaluation."""

    _states_at_start: States | None = None
    """The generators' states when the first micro-batch of an evaluation began."""
    _drawn_in_transfer: list[str] = []  # noqa: RUF012
    """The names of generators from which somebody has drawn when it went to the device."""
    _has_checked = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        # What is drawn between two steps (by a validation's sampler, say) is the same on all ranks.
        if ends_step(trainer):
            self._seed_all_ranks_alike(trainer, _BETWEEN)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # And so is what is added to the gradients, or drawn by the optimiser: all ranks take the same step. A module that steps
        # by itself may do so in the middle of what the ranks draw each for its own samples.
        if pl_module.automatic_optimization:
            self._seed_all_ranks_alike(trainer, _STEP)

    def _seed_all_ranks_alike(self, trainer: Trainer, what: int) -> None:
        """Seeds the generators with the step's key, the same on all ranks. `what`: a number for the place within the step."""
        epoch, step, _ = micro_batch(trainer).key
        seed_moment(epoch, step, what)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if (position := step_state(trainer).evaluated_key) is not None:
            looks = not self._has_checked and not typed(trainer).exact
            if looks:
                self._drawn_in_transfer = trainer.fit_loop.epoch_loop.moments.drawn_in_transfer()
            seed_moment(*position, _EVALUATED)
            if looks:
                self._has_checked, self._states_at_start = True, generator_states()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        before, self._states_at_start = self._states_at_start, None
        drawn = [] if before is None else [*dict.fromkeys([*self._drawn_in_transfer, *drawn_from(before)])]
        if trainer.is_global_zero:
            warn_of_draws(drawn)

    on_test_batch_start, on_test_batch_end = on_validation_batch_start, on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        begin_evaluated_micro_batch(trainer, dataloader_idx)
        self.on_validation_batch_start(trainer, pl_module, batch, batch_idx, dataloader_idx)
