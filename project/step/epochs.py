"""The epochs of a run, and how it resumes within one, as if it had never stopped.

Lightning marks its loops as restarted, and leaves out in the first epoch after that what it takes to be done: the start of
the epoch, its schedules at the end, a validation. Here nothing is left out: the counters stand where the run was (`position`),
and the loops continue from there as they do at any other time.

What the start of an epoch did to weights, optimisers and states of callbacks lies in the checkpoint. What it did besides (it
unfroze a layer, exchanged a schedule, set an attribute) does not; so it is done again, and all that was saved is restored
over it.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch.optim import Optimizer

from project.errors import UserError
from project.step.chance import Moments
from project.step.ddp import wrap_again_if_outdated
from project.step.evaluation import install_evaluations, loaders_of
from project.step.loop import Steps
from project.step.measurements import silenced
from project.step.optimizers import restore_dtypes
from project.step.position import counts, is_over, stopped_within_epoch
from project.step.results import Results
from project.step.structure import Structure, apply_structure, current_structure
from project.typed import StateDict, Stateful, typed

T = TypeVar("T")


def install_loops(
    trainer: Trainer, val_check_interval: int | float | None, moments: Moments, results: type[Results]
) -> Results:
    """Replaces the trainer's loops with ours. Returns the store of what training logs.

    Args:
        trainer: the Trainer, with its `step_state`.
        val_check_interval: in steps, or a share of an epoch.
        moments: the random numbers of the run.
        results: the kind of store of what is logged.
    """
    before = trainer.fit_loop
    trainer.fit_loop = Epochs(trainer, min_epochs=before.min_epochs, max_epochs=before.max_epochs)
    trainer.fit_loop.val_check_interval = val_check_interval
    steps = before.epoch_loop
    trainer.fit_loop.epoch_loop = Steps(trainer, moments, min_steps=steps.min_steps, max_steps=steps.max_steps)
    install_evaluations(trainer)
    if results is not Results:  # else an evaluation keeps Lightning's store
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            loop._results = results(trainer, training=False)
    trainer.fit_loop.epoch_loop._results = of_training = results(trainer, training=True)
    return of_training


class Epochs(_FitLoop):
    """The loop over all epochs of a fit."""

    epoch_loop: Steps
    val_check_interval: int | float | None = 1.0
    _resumes_within_epoch = False
    """The run resumes within an epoch that has begun."""
    _structure_at_start: Structure | None = None
    """Which parameters learned before the start of this epoch."""

    @property
    def restarted_mid_epoch(self) -> bool:
        return self._resumes_within_epoch

    def reset(self) -> None:
        loaders_of(self.trainer).recount_progress(self.epoch_loop.batch_progress)
        if self.restarting:
            epoch = counts(self.epoch_progress.current)
            self._resumes_within_epoch = epoch.started > epoch.processed
            self.epoch_loop.resumes_within_epoch = self._resumes_within_epoch
            # Lightning's setter leaves it set where there is trainer.max_steps, and a loop that restarts leaves things out.
            self._restarting = self.epoch_loop.restarting = False
        super().reset()

    def setup_data(self) -> None:
        """Sets up the loaders so that validations come between steps. Lightning counts the micro-batches of a rank: a share of
        them may end within a step.
        """
        if is_over(self.trainer):
            return
        interval = self.val_check_interval
        with loaders_of(self.trainer).limits_of_loop("train"):
            try:
                super().setup_data()
            except ValueError as error:
                if "`val_check_interval`" not in str(error):
                    raise
                steps = self.max_batches // self.trainer.accumulate_grad_batches
                raise UserError(
                    f"trainer.val_check_interval={interval} is more than the {steps} steps of an epoch. "
                    "HINT: 1.0 is its end; with trainer.check_val_every_n_epoch=null epochs don't matter."
                ) from error
        many = self.trainer.accumulate_grad_batches  # known since the loaders are
        if isinstance(interval, float) and isinstance(self.trainer.val_check_batch, int) and isinstance(self.max_batches, int):
            steps = max(1, int(self.max_batches // many * interval)) * many
            self.trainer.val_check_batch = self.max_batches if interval == 1 else steps  # the last step may be a shorter one

    def on_advance_start(self) -> None:
        if not self._resumes_within_epoch:
            self._structure_at_start = current_structure(self.trainer)
            self.epoch_loop.restore_metrics()
        super().on_advance_start()
        if self._resumes_within_epoch:
            self._resumes_within_epoch = False
            self._repeat_epoch_start()
        strategy = self.trainer.strategy
        if isinstance(strategy, DDPStrategy):
            wrap_again_if_outdated(strategy, self.trainer.lightning_module)

    def on_advance_end(self) -> None:
        if not (stopped_within_epoch(self.trainer) and self.epoch_loop.is_out_of_time()):
            super().on_advance_end()
            return
        connector = self.trainer._logger_connector
        connector.update_train_epoch_metrics = lambda: None  # type: ignore[method-assign]  # its means are not known yet
        try:
            super().on_advance_end()
        finally:
            del connector.update_train_epoch_metrics

    def on_save_checkpoint(self) -> StateDict:
        return {
            **super().on_save_checkpoint(),
            "structure": current_structure(self.trainer),
            "began_with": self._structure_at_start,
        }

    def on_load_checkpoint(self, state_dict: StateDict) -> None:
        """Restores which parameters learn. Called before the optimisers' states are loaded, which must find their groups."""
        super().on_load_checkpoint(state_dict)
        if "structure" in state_dict:
            apply_structure(self.trainer, state_dict["structure"])
            self._structure_at_start = state_dict["began_with"]

    def _repeat_epoch_start(self) -> None:
        """Calls the hooks at the start of an epoch again when a run resumes within it, and restores what they have changed."""
        trainer, module = self.trainer, self.trainer.lightning_module
        callbacks = typed(trainer).callbacks
        starting = [
            callback
            for callback in callbacks
            if is_overridden("on_train_epoch_start", callback, Callback)
            and not type(callback).__module__.startswith("project.")  # which know the run's position
        ]
        if not starting and not is_overridden("on_train_epoch_start", module, LightningModule):
            return
        restore_copies, learning, loggers = _copy_states(trainer, callbacks), current_structure(trainer), trainer.loggers
        apply_structure(trainer, self._structure_at_start or learning)
        trainer.loggers = silenced(loggers)  # what was said then is said; what was logged for the epoch's end is logged again
        module.__dict__["_current_fx_name"] = "on_train_epoch_start"
        try:
            for callback in starting:
                with typed(trainer).profiler.profile(f"[Callback]{callback.state_key}.on_train_epoch_start"):
                    callback.on_train_epoch_start(trainer, module)
            with typed(trainer).profiler.profile(f"[LightningModule]{type(module).__name__}.on_train_epoch_start"):
                module.on_train_epoch_start()
        finally:
            trainer.loggers = loggers
            module.__dict__["_current_fx_name"] = None
        apply_structure(trainer, learning)
        restore_copies()


def _copy_states(trainer: Trainer, callbacks: list[Callback]) -> Callable[[], None]:
    """Copies the weights, and the states of optimisers, schedules and callbacks; returns a function that restores them."""

    def copied(value: T) -> T:
        copy: T = deepcopy(apply_to_collection(value, torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True)))
        return copy

    module = trainer.lightning_module
    weights = copied(module.state_dict())
    holders: list[Stateful] = [*trainer.optimizers, *(config.scheduler for config in trainer.lr_scheduler_configs), *callbacks]
    states = [copied(holder.state_dict()) for holder in holders]

    def restore_copies() -> None:
        module.load_state_dict(weights, strict=module.strict_loading)
        for holder, state in zip(holders, states, strict=True):
            if state:
                holder.load_state_dict(state)
            if isinstance(holder, Optimizer):
                restore_dtypes(holder, state)

    return restore_copies
