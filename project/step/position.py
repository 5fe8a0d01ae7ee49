"""The position of a run, in terms that mean the same on any number of ranks, and how Lightning's loops are put there.

A run is saved between two steps, when all that belongs to the one is done (its schedule, its validation, the end of its
epoch) and nothing of the next has begun. Lightning's own counters count the micro-batches of a rank and depend on the hook
in which they were saved; so they are not restored but written anew, from the position and today's accumulation.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Protocol, cast

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from lightning_utilities.core.apply_func import apply_to_collection

from project.data.dealing import DealtLoader
from project.data.order import Order
from project.errors import UserError
from project.step.data_ranks import data_ranks
from project.typed import Fetcher, StateDict, callbacks_of
from project.untrusted import as_count

log = logging.getLogger(__name__)


class Counts(Protocol):
    """Lightning's counts of epochs or micro-batches: how many are ready, and so on."""

    ready: int
    started: int
    processed: int
    completed: int


def counts(tracker: object) -> Counts:
    """Returns one of Lightning's counts, with types: it declares two of the four."""
    return cast(Counts, tracker)


@dataclass(frozen=True)
class Position:
    """The position of a run: so many steps of so many epochs are done. `validation_due`: stopped in the validation that follows
    the last.
    """

    epoch: int
    step: int
    global_step: int
    micro_batches: int
    """Done in this epoch, over all ranks."""
    total_micro_batches: int
    """Done since the run began, over all ranks."""
    logged_steps: int
    """Steps as `self.log` counts them: once, where a module steps several optimisers."""
    epoch_over: bool = False
    """All micro-batches of this epoch are done."""
    validation_due: bool = False
    begun: bool = False
    """The hooks at the start of this epoch have been called."""
    schedules_due: bool = False
    """Saved after a step, but before the schedules that go by a metric have moved."""

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, saved: StateDict) -> "Position":
        """Returns the position that `state_dict` gave; raises a TypeError or a ValueError where `saved` is something else."""
        switches = {field.name for field in fields(cls) if field.default is False}
        for name, value in saved.items():
            if not isinstance(value, bool):
                as_count(value)
            elif name not in switches:
                raise TypeError(name)
        return cls(**saved)


def all_trained(trainer: Trainer) -> bool:
    """Returns whether all micro-batches of the epoch have been trained on: they are 'processed' when their step is taken."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    batches = counts(progress.current)
    # A loader that does not know its length says at its last batch that it is that; from the start of this batch on.
    last = progress.is_last_batch and batches.processed == batches.ready
    return bool(last or batches.processed >= trainer.num_training_batches)


def beyond_last_step(trainer: Trainer) -> int:
    """Returns how many micro-batches of this rank belong to a step that is not taken yet, whichever hook this is."""
    batches = counts(trainer.fit_loop.epoch_loop.batch_progress.current)
    return 0 if all_trained(trainer) else batches.processed % trainer.accumulate_grad_batches


def position(trainer: Trainer) -> Position:
    """Returns the position between two steps: before the step at hand until it is taken, in a validation, or at the end."""
    loop = trainer.fit_loop
    progress = loop.epoch_loop.batch_progress
    batches, beyond, over = counts(progress.current), beyond_last_step(trainer), all_trained(trainer)
    ranks = data_ranks(trainer).count
    done = batches.processed - beyond
    step, micro_batches = done // trainer.accumulate_grad_batches, done * ranks
    total = (counts(progress.total).processed - beyond) * ranks
    logged = loop.epoch_loop._batches_that_stepped
    at_its_end = batches.processed > batches.completed and not beyond  # in on_train_batch_end
    # The step is done, but for what follows that hook: its validation, and that it is counted.
    fetcher: Fetcher = loop._data_fetcher
    due = bool(trainer.validating) or (at_its_end and loop.epoch_loop._should_check_val_fx(fetcher))
    plateaus = any(config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs)
    schedules_due = at_its_end and not due and plateaus
    if at_its_end and not due and not schedules_due:
        logged += 1
    epochs = counts(loop.epoch_progress.current)
    if epochs.processed < epochs.ready or step == 0:
        begun = epochs.started > epochs.processed
        at = epochs.processed, step, trainer.global_step, micro_batches, total, logged
        return Position(*at, epoch_over=over, validation_due=due, begun=begun, schedules_due=schedules_due)
    if over:
        return Position(epochs.processed, 0, trainer.global_step, 0, total, logged)
    # max_steps was reached inside an epoch: Lightning counts it as processed, and a longer run resumes within it.
    return Position(epochs.processed - 1, step, trainer.global_step, micro_batches, total, logged, begun=True)


def position_of_lightning(saved: StateDict) -> Position | None:
    """Returns the position within an epoch at which Lightning's own Trainer wrote a checkpoint; None where it did not. Counted
    in steps: of micro-batches, how many make a step there is not known.
    """
    try:
        loop = saved["loops"]["fit_loop"]
        batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]["current"]
        taken, counted = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"], "completed"
        if not taken["total"]["completed"]:  # a module that steps its optimisers by itself
            taken, counted = batches, "processed"
        within = batches["current"]["ready"] and not batches["is_last_batch"] and epochs["started"] > epochs["processed"]
        step, total = taken["current"][counted], taken["total"][counted]
        return Position(epochs["processed"], step, total, step, total, total, begun=True) if within else None
    except KeyError:  # of another version, or no weights of a run
        return None


def stopped_within_epoch(trainer: Trainer) -> bool:
    """Returns, at the end of an epoch, whether training was stopped before all its micro-batches had been trained on."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    return not batches.is_last_batch and batches.current.ready < trainer.num_training_batches


def timers(trainer: Trainer) -> list[Timer]:
    return callbacks_of(trainer, Timer)


def out_of_time(trainer: Trainer) -> bool:
    """Returns whether trainer.max_time or a Timer's duration is used up, by this process's clock."""
    return any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers(trainer))


def warn_if_cut_short(trainer: Trainer, limit: str) -> None:
    """Warns where a limit of time has ended a fit before its last step. `limit`: what has set it."""
    if out_of_time(trainer) and trainer.global_step < trainer.estimated_stepping_batches:
        log.warning(
            "Stopped by %s after step %d of %s, before the end of the run. HINT: more time for all starts "
            "together, and the same command resumes from the checkpoint.",
            *(limit, trainer.global_step, trainer.estimated_stepping_batches),
        )


def set_counters(fit_loop: StateDict, at: Position, ranks: int) -> None:
    """Rewrites the saved state of Lightning's fit loop so that it resumes from a position, on so many data ranks."""
    begun = at.begun or at.step > 0 or at.validation_due
    batches = fit_loop["epoch_loop.batch_progress"]
    for name in ("ready", "started", "processed", "completed"):
        batches["current"][name] = at.micro_batches // ranks
        batches["total"][name] = at.total_micro_batches // ranks
    batches["is_last_batch"] = at.epoch_over

    for counters in (fit_loop["epoch_progress"]["current"], fit_loop["epoch_progress"]["total"]):
        counters["ready"] = counters["started"] = at.epoch + int(begun)
        counters["processed"] = counters["completed"] = at.epoch

    due = {"validation_due": at.validation_due, "schedules_due": at.schedules_due}
    fit_loop["epoch_loop.state_dict"].update(due, _batches_that_stepped=at.logged_steps)
    validation = fit_loop["epoch_loop.val_loop.batch_progress"]  # it begins at its beginning
    for counters in (validation["total"], validation["current"]):
        counters.update(ready=0, started=0, processed=0, completed=0)
    validation["is_last_batch"] = False


def check_loop_progress(saved: object, name: str = "loops") -> None:
    """Raises a UserError where the saved progress of Lightning's loops is no count: it would fail much later."""
    if isinstance(saved, Mapping):
        for key, item in saved.items():
            if not str(key).endswith("state_dict"):  # what they keep beside it
                check_loop_progress(item, f"{name}.{key}")
    elif not isinstance(saved, int) or saved < 0 or name.count(".") < 3:
        raise UserError(f"{name} of the checkpoint can't be {str(saved)[:40]!r}. HINT: take an older one from the same folder.")


def epoch_size(trainer: Trainer) -> dict[str, int]:
    """Returns the steps of an epoch and their samples, where this project deals these out: the last step may be short."""
    orders: list[Order] = []
    apply_to_collection(trainer.train_dataloader, DealtLoader, lambda loader: orders.append(loader.keys.order))
    if not orders or not orders[0].steps:
        return {}
    return {"epoch_steps": orders[0].steps, "epoch_samples": orders[0].span(orders[0].steps - 1)[1]}


def planned_steps(trainer: Trainer) -> int | None:
    """Returns the steps of the whole run, where they are known."""
    if len(trainer.optimizers) > 1:  # whose steps all count: how many there will be, only the module knows
        return trainer.max_steps if trainer.max_steps > 0 else None
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 <= steps < float("inf") else None


def is_over(trainer: Trainer) -> bool:
    """Returns whether a fit has taken all its steps or epochs, or is to stop early, before it begins: no loader is needed, nor
    any advice.
    """
    steps, epochs = trainer.max_steps, trainer.max_epochs
    over = 0 < steps <= trainer.global_step or 0 < (epochs or 0) <= trainer.current_epoch
    return over or (trainer.should_stop and not out_of_time(trainer) and trainer.fit_loop.done)
