"""Signals set a flag; all ranks stop at the same step, with a checkpoint.

Lightning's own handlers talk to the other ranks from inside the handler, and hang when the ranks are not in step. Here a
handler only notes the signal; at every step, or at every eighth at most where steps are short, the ranks compare notes on the
CPU, asynchronously: what one step starts, the next reads, so nobody waits. A second signal stops at once.

Exit codes: 130 after Ctrl-C (SIGINT), 143 after SIGTERM, 138 after SIGUSR1, 129 after SIGHUP: what a shell expects of a
program that these end. Under Slurm, SIGUSR1 is the warning before the time limit (--signal=USR1@60): the job goes back into
the queue.
"""

import logging
import math
import signal
import time
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from project.cluster.group import Group
from project.survive.checkpoints import Checkpoints, checkpoints_of
from project.survive.requeue import REQUEUE, lead
from project.survive.signals import EXIT_CODES, Signals

log = logging.getLogger(__name__)

_INTERVAL, _MOST = 0.05, 8  # seconds and steps from one comparison to the next


class Question(Protocol):
    """A further action that the ranks are to begin at the same step."""

    def asks(self, trainer: Trainer) -> bool:
        """Returns whether this rank wants it. Called between steps."""

    def answers(self, trainer: Trainer, group: Any) -> None:
        """Begins the action on all ranks before the same step, if any wants it; `group`: that of all ranks, on CPU."""


class StopTogether(Callback):
    """Stops all ranks at the same step when any of them was asked to, and saves when the time for it has come.

    Args:
        signals: those that have come.
        question: what else is to begin on all ranks at once.
    """

    def __init__(self, signals: Signals, question: Question | None = None) -> None:
        self.signals, self._question = signals, question
        self._group = Group()
        self._notes = torch.zeros(4, dtype=torch.int32)
        self._answer: Any = None
        self._pause = 0  # steps until the ranks compare notes again; all count alike
        self._stale = True  # how long a step takes is not known, or of another phase
        self._last, self._since = time.monotonic(), 0
        self._shared = 0.0  # batches of this evaluation that all ranks still have
        self._lead: tuple[float, str] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero and (checkpoints := checkpoints_of(trainer)) is not None:
            REQUEUE.newest = lambda: checkpoints.last
            REQUEUE.doing = lambda: "the checkpoint" if checkpoints.writing else "a step, or the start-up,"
        self._notes = torch.zeros(4, dtype=torch.int32)  # not before: spawned ranks would share its memory
        if trainer.world_size > 1 and dist.is_initialized():  # a strategy may connect its ranks in another way
            self._group.make()

    def _compare(self, trainer: Trainer, checkpoints: Checkpoints | None) -> tuple[int, bool, bool]:
        """Returns the signal that any rank had noted at the last step, or 0; whether any rank's clock calls for a save; whether
        any rank has a question.
        """
        asks = self._question is not None and self._question.asks(trainer)
        own = (int(self.signals.noted or 0), checkpoints is not None and checkpoints.overdue, asks)
        if (group := self._group()) is None:
            return own
        last = (0, False, False)
        self._since += 1
        if self._answer is not None:
            self._answer.wait()
            self._answer = None
            number, overdue, asks, steps = self._notes.tolist()
            last = (number, bool(overdue), bool(asks))
            self._pause = 0 if self._stale else -steps - 1
        if self._pause:
            self._pause -= 1
        elif not last[0]:
            self._stale = False
            # The largest of the ranks' numbers is what all go by: of the steps to pass, negative here, the fewest.
            # Where all are about to save, or to answer, those have had their say.
            notes = (own[0], own[1] and not last[1], own[2] and not last[2], -self._steps())
            self._notes[0], self._notes[1], self._notes[2], self._notes[3] = notes
            self._answer = dist.all_reduce(self._notes, dist.ReduceOp.MAX, group=group, async_op=True)
        return last

    def _steps(self) -> int:
        """Returns how many of this rank's steps make an interval, going by the last ones."""
        if self._since < 3:  # of this phase
            return 1
        now = time.monotonic()
        each = (now - self._last) / self._since
        self._last, self._since = now, 0
        return max(1, min(_MOST, int(_INTERVAL / max(each, 1e-6))))

    def _at_once(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures the steps anew: those that follow may take another time."""
        self._pause, self._stale = 0, True
        self._last, self._since = time.monotonic(), 0

    on_train_epoch_start = on_validation_end = _at_once

    def _evaluates(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the batches that all ranks have: ranks may differ in number, and compare notes at those that all of them
        have.
        """
        self._at_once(trainer, pl_module)
        self._shared = _batches(trainer)
        if (group := self._group()) is not None:
            # Where nobody knows how many will come, a signal waits for the end of the evaluation.
            fewest = torch.tensor(self._shared if math.isfinite(self._shared) else 0.0)
            dist.all_reduce(fewest, dist.ReduceOp.MIN, group=group)
            self._shared = float(fewest)

    on_validation_start = on_test_start = on_predict_start = _evaluates

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._lead = lead() if trainer.is_global_zero else None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            REQUEUE.forget()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Waits for the last comparison: it holds Gloo's threads as long as it is held, and they must not outlive Python."""
        if self._answer is not None:
            self._answer.wait()
            self._answer = None

    def _warn_of_a_short_lead(self, seconds: float | None) -> None:
        """Warns, once and long before a signal comes, that a checkpoint takes longer than the grace period."""
        if self._lead is not None and seconds is not None and seconds > self._lead[0]:
            given, setting = self._lead
            self._lead = None
            log.warning(
                "A checkpoint takes %.0f s, and after a signal this job has %.0f s: it would be cut short. HINT: %s",
                seconds, given, setting.format(max(60, round(2 * seconds))),
            )  # fmt: skip

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (checkpoints := checkpoints_of(trainer)) is not None:
            self._warn_of_a_short_lead(checkpoints.seconds)
        number, overdue, has_question = self._compare(trainer, checkpoints)
        if number:
            self._stop(trainer, number)
        if overdue and checkpoints:
            checkpoints.save(trainer)
        if has_question and self._question is not None:
            self._question.answers(trainer, self._group())

    def _between_batches(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._shared == 0:
            return
        self._shared -= 1
        number, *_ = self._compare(trainer, checkpoints_of(trainer))
        if number:
            self._stop(trainer, number)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _between_batches

    def _stop(self, trainer: Trainer, number: int) -> None:
        name = signal.Signals(number).name
        checkpoints = checkpoints_of(trainer)
        if trainer.state.fn == "fit" and not trainer.sanity_checking and checkpoints:
            took = f", which took {checkpoints.seconds:.0f} s the last time" if (checkpoints.seconds or 0) > 1 else ""
            log.info("%s: all ranks stop here, with a checkpoint%s.", name, took)
            checkpoints.save(trainer)
            checkpoints.wait()
            self._warn_of_a_short_lead(checkpoints.seconds)
            log.info("Stopped by %s after step %d. Checkpoint: %s", name, trainer.global_step, checkpoints.last)
        else:
            log.info("Stopped by %s.", name)
        if trainer.is_global_zero and number == signal.SIGUSR1:
            REQUEUE.put_back()
        if (group := self._group()) is not None:
            dist.barrier(group=group)  # srun and torchrun end all ranks when one has: not before rank 0 has saved
        raise SystemExit(EXIT_CODES[signal.Signals(number)])


def _batches(trainer: Trainer) -> float:
    """Returns how many batches this rank has in the evaluation that begins; infinite where that is unknown."""
    if trainer.sanity_checking:
        return float(sum(trainer.num_sanity_val_batches))
    counts = {"test": trainer.num_test_batches, "predict": trainer.num_predict_batches}
    return float(sum(counts.get(trainer.state.fn or "", trainer.num_val_batches)))
