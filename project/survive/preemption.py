"""Stops all ranks at the same step when any of them receives a signal, with a checkpoint.

Lightning's own handlers talk to the other ranks from inside the handler, and hang when the ranks are not in step. Here a
handler only notes the signal; at every step, or at every eighth at most where steps are short, the ranks compare notes on the
CPU, asynchronously: what one step starts, the next reads, so nobody waits. docs/signals.md has the exit codes.
"""

import logging
import math
import signal
import time
from pathlib import Path
from typing import Protocol
from weakref import ref

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop

from project.checkpoints.callback import Checkpoints, checkpoints_of
from project.cluster.group import Group
from project.survive.failure import BY_COMMAND, resumption
from project.survive.requeue import REQUEUE, grace_period
from project.survive.signals import EXIT_CODES, Signals

log = logging.getLogger(__name__)

_INTERVAL, _MOST = 0.05, 8  # seconds and steps from one comparison to the next


class SharedAction(Protocol):
    """Describes a further action that all ranks begin at the same step."""

    def is_wanted(self, trainer: Trainer) -> bool:
        """Returns whether this rank requests the action. Called between steps."""

    def begin_on_all_ranks(self, trainer: Trainer, group: dist.ProcessGroup | None) -> None:
        """Begins the action. Called on all ranks before the same step, if any rank requests it; `group`: all ranks, on CPU."""


class StopTogether(Callback):
    """Stops all ranks at the same step when any of them has received a signal, and saves when a save is due by any clock.

    Args:
        signals: the signals that this process has received.
        action: a further action to begin on all ranks at the same step.
    """

    def __init__(self, signals: Signals, action: SharedAction | None = None) -> None:
        self.signals, self._action = signals, action
        self._group = Group()
        self._notes = torch.zeros(5, dtype=torch.int32)
        self._exchange: dist.Work | None = None
        self._pause = 0  # steps until the ranks compare notes again; all count alike
        self._stale = True  # how long a step takes is not known, or of another phase
        self._last, self._since = time.monotonic(), 0
        self._compared = time.monotonic()
        self._shared_batches: list[float] = []  # of this evaluation, by loader, that all ranks still have
        self._grace_period: tuple[float, str] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero and (checkpoints := checkpoints_of(trainer)) is not None:
            held = ref(checkpoints)  # a process outlives its Trainer, and must not hold on to it and the model
            REQUEUE.newest = lambda: known.last if (known := held()) else None
            REQUEUE.doing = lambda: "the checkpoint" if (known := held()) and known.writing else "a step, or the start-up,"
        self._notes = torch.zeros(5, dtype=torch.int32)  # not before: spawned ranks would share its memory
        if trainer.world_size > 1 and dist.is_initialized():  # a strategy may connect its ranks in another way
            self._group.make()

    def _compare(self, trainer: Trainer, checkpoints: Checkpoints | None) -> tuple[int, bool, bool, bool]:
        """Returns the signal that any rank had noted at the last step, or 0; whether any rank's clock calls for a save; whether
        any rank requests the action; whether all ranks have the time for a copy in memory.
        """
        is_wanted = self._action is not None and self._action.is_wanted(trainer)
        own = (int(self.signals.noted or 0), checkpoints is not None and checkpoints.overdue, is_wanted)
        interval = checkpoints.interval if checkpoints is not None else None
        if (group := self._group()) is None:
            return *own, interval is not None and interval.is_due(ahead=0.0, begins=False)
        last = (0, False, False, False)
        self._since += 1
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
            number, overdue, is_wanted, no_time, steps = self._notes.tolist()
            last = (number, bool(overdue), bool(is_wanted), not no_time)
            self._pause = 0 if self._stale else -steps - 1
        if self._pause:
            self._pause -= 1
        elif not last[0]:
            self._stale = False
            # The largest of the ranks' numbers is what all go by: of the steps to pass, negative here, the fewest.
            # Where all are about to save, or to answer, those have had their say.
            now = time.monotonic()
            no_time = interval is None or not interval.is_due(ahead=now - self._compared, begins=last[3])
            self._compared = now
            notes = (own[0], own[1] and not last[1], own[2] and not last[2], no_time, -self._steps_per_interval())
            for place, note in enumerate(notes):
                self._notes[place] = note
            self._exchange = dist.all_reduce(self._notes, dist.ReduceOp.MAX, group=group, async_op=True)
        return last

    def _steps_per_interval(self) -> int:
        """Returns how many of this rank's steps make an interval, going by the last ones."""
        if self._since < 3:  # of this phase
            return 1
        now = time.monotonic()
        each = (now - self._last) / self._since
        self._last, self._since = now, 0
        return max(1, min(_MOST, int(_INTERVAL / max(each, 1e-6))))

    def _restart_interval(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restarts the measurement of step times, and compares at the next step: another phase begins."""
        self._pause, self._stale = 0, True
        self._last, self._since = time.monotonic(), 0

    on_train_epoch_start = on_validation_end = _restart_interval

    def _begin_evaluation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the fewest batches that any rank has of each loader in this evaluation (0 where unknown), and restarts the
        interval: ranks can compare only at these, as all of them meet at the end of a loader.
        """
        self._restart_interval(trainer, pl_module)
        self._shared_batches = _evaluation_batches(trainer)
        if (group := self._group()) is not None:
            # Where nobody knows how many will come, a signal waits for the end of the evaluation.
            fewest = torch.tensor([count if math.isfinite(count) else 0.0 for count in self._shared_batches])
            dist.all_reduce(fewest, dist.ReduceOp.MIN, group=group)
            self._shared_batches = fewest.tolist()

    on_validation_start = on_test_start = on_predict_start = _begin_evaluation

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._grace_period = grace_period() if trainer.is_global_zero else None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            REQUEUE.remove_count_file()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Waits for the last comparison: it holds Gloo's threads as long as it is held, and they must not outlive Python."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None

    def _warn_of_short_grace_period(self, seconds: float | None) -> None:
        """Warns, once and long before a signal comes, that a checkpoint takes longer than the grace period."""
        if self._grace_period is not None and seconds is not None and seconds > self._grace_period[0]:
            given, setting = self._grace_period
            self._grace_period = None
            log.warning(
                "A checkpoint takes %.0f s, and after a signal this job has %.0f s: it would be cut short. HINT: %s",
                seconds, given, setting.format(max(60, round(2 * seconds))),
            )  # fmt: skip

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (checkpoints := checkpoints_of(trainer)) is not None:
            self._warn_of_short_grace_period(checkpoints.seconds)
        number, overdue, any_wants_action, has_time = self._compare(trainer, checkpoints)
        if number:
            self._stop(trainer, number)
        if overdue and checkpoints:
            checkpoints.save(trainer)
        if has_time and checkpoints:
            checkpoints.copy_to_memory(trainer)
        if any_wants_action and self._action is not None:
            self._action.begin_on_all_ranks(trainer, self._group())

    def _stop_between_batches(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = -1
    ) -> None:
        """Stops an evaluation before a batch that all ranks have, if any rank has received a signal."""
        if self._shared_batches[dataloader_idx] <= 0:
            return
        self._shared_batches[dataloader_idx] -= 1
        number, *_ = self._compare(trainer, checkpoints_of(trainer))
        if number:
            self._stop(trainer, number)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _stop_between_batches

    def _stop(self, trainer: Trainer, number: int) -> None:
        """Saves a checkpoint, requeues a Slurm job and exits with the signal's exit code. Called by all ranks."""
        name = signal.Signals(number).name
        checkpoints = checkpoints_of(trainer)
        if trainer.state.fn == "fit" and not trainer.sanity_checking and checkpoints:
            took = f", which took {checkpoints.seconds:.0f} s the last time" if (checkpoints.seconds or 0) > 1 else ""
            log.info("%s: all ranks stop here, with a checkpoint%s.", name, took)
            checkpoints.save(trainer)
            checkpoints.wait()
            self._warn_of_short_grace_period(checkpoints.seconds)
            text = f"Stopped by {name} after step {trainer.global_step}. Checkpoint: {checkpoints.last}"
            shown = BY_COMMAND.is_set() or log.isEnabledFor(logging.INFO) or not trainer.is_global_zero
            if shown:
                log.info(text)
            else:  # a program of the user's that has set up no log: Python prints its warnings alone
                log.warning(f"{text}. {resumption(Path(trainer.default_root_dir))}")
        elif trainer.state.fn == "fit" and not trainer.sanity_checking:
            log.warning(
                "Stopped by %s after step %d. No checkpoint was saved: the Trainer has another callback for that, or none. "
                "HINT: project.Trainer adds its own where no ModelCheckpoint is given.",
                *(name, trainer.global_step),
            )
        else:
            log.info("Stopped by %s.", name)
        if trainer.is_global_zero and number == signal.SIGUSR1:
            REQUEUE.requeue()
        if (group := self._group()) is not None:
            dist.barrier(group=group)  # srun and torchrun end all ranks when one has: not before rank 0 has saved
        raise SystemExit(EXIT_CODES[signal.Signals(number)])


def _evaluation_batches(trainer: Trainer) -> list[float]:
    """Returns how many batches this rank has of each loader in the evaluation that begins, and at last how many there are where
    Lightning names no loader: there is one, or they are read together. Infinite where unknown.
    """
    loop = trainer._active_loop
    assert isinstance(loop, (_EvaluationLoop, _PredictionLoop))
    length = None if loop._data_fetcher is None else loop._data_fetcher.length
    return [*map(float, loop.max_batches), math.inf if length is None else float(length)]
