"""A logger for TensorBoard, made to last: one continuous curve over restarts, and a full disk does not end a run."""

import logging
import secrets
import threading
import time
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from project.step.measurements import TakesMeasurements
from project.untrusted import open_to_append
from project.watch.curves import board_tag

log = logging.getLogger(__name__)

_HEAD = 128  # bytes of a file in which nothing is yet but its version
_LATEST = 2000  # values that may have been logged for the step at hand and the one before


def _thread_failed(before: Callable[[threading.ExceptHookArgs], object], args: threading.ExceptHookArgs) -> None:
    """Ignores an OSError of TensorBoard's writing thread: the next call reports it, with no traceback in between."""
    if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
        before(args)


def _put_before_now(folder: Path) -> None:
    """Gives files from the future an earlier time in their names, by which TensorBoard orders them. The clock may have been
    ahead when they were written: what they hold would be read after what is logged from now on, and shown again.
    """
    files = sorted(folder.glob("events.out.tfevents.*"), reverse=True)
    latest = int(time.time()) - 1
    for file in files:
        *start, stamp, rest = file.name.split(".", 4)
        if not (stamp.isascii() and stamp.isdecimal()):
            continue
        if int(stamp) > latest:
            with suppress(OSError):  # a folder of that name, say
                file.rename(file.with_name(".".join((*start, f"{latest:010d}", rest))))
            latest -= 1
        else:
            latest = int(stamp)


class Lasting:
    """A writer for those who use a logger's `experiment`: a full disk does not end a run here, either."""

    def __init__(self, writer: Callable[[], SummaryWriter], attempt: Callable[[Callable[[], object]], None]) -> None:
        self._writer, self._attempt = writer, attempt

    def __getattr__(self, name: str) -> Any:
        if not callable(getattr(SummaryWriter, name, None)):
            return getattr(self._writer(), name)
        return lambda *args, **kwargs: self._attempt(lambda: getattr(self._writer(), name)(*args, **kwargs))


class LoggedAgain:
    """The values that a resumed run had logged before its checkpoint, and logs a second time."""

    def __init__(self, logged: Sequence[tuple[int, str, float]] = ()) -> None:
        self._left: Counter[tuple[int | None, str]] = Counter((number, tag) for number, tag, _ in logged)

    def has(self, step: int | None, tag: str) -> bool:
        """Returns whether this value was logged already; each is reported once."""
        if logged := self._left[step, tag] > 0:
            self._left[step, tag] -= 1
        return logged


class Events(TakesMeasurements, TensorBoardLogger):
    """Writes TensorBoard's events into the run's folder."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, name="", version="")
        self._tensorboard: Any = None  # its writer
        self._hidden_from: int | None = None  # what is there from this step on is shown no more
        self._hides_from: int | None = None  # the same, of the newest file
        self._suffix = f".{secrets.token_hex(4)}"  # of the newest file's name
        self._failing = self._logged = False
        self._latest: deque[tuple[int, str, float]] = deque(maxlen=_LATEST)
        self._last: dict[str, tuple[int, float]] = {}
        self._again = LoggedAgain()
        hook = threading.excepthook
        if not (isinstance(hook, partial) and hook.func is _thread_failed):
            threading.excepthook = partial(_thread_failed, hook)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Returns TensorBoard's writer, for pictures, texts and so on."""
        return Lasting(self._writer, self._try)

    def _writer(self) -> Any:
        """Returns a writer that works. Lightning's logger would keep one whose disk was full, and takes no step later on."""
        if self._tensorboard is None or self._tensorboard.file_writer is None:  # there is none yet, or it was closed
            # A name that nobody can know before: it opens whatever lies there, a link, too.
            self._suffix = f".{secrets.token_hex(4)}"
            self._hides_from, self._hidden_from = self._hidden_from, None
            Path(self.log_dir).mkdir(parents=True, exist_ok=True)
            self._tensorboard = SummaryWriter(self.log_dir, purge_step=self._hides_from, filename_suffix=self._suffix)
            # TensorBoard would open its file by name at each flush, and wait for a pipe that somebody puts there.
            opened: Any = open_to_append(Path((writer := self._tensorboard.file_writer.event_writer)._file_name))
            writer._async_writer._writer._writer = opened.detach()
        return self._tensorboard

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the writer: a process that is started with a copy of this logger makes its own."""
        return {**super().__getstate__(), "_tensorboard": None}

    def logged_since(self, step: int) -> list[tuple[int, str, float]]:
        """Returns what has been logged for this step and later ones, which a checkpoint saves."""
        return [entry for entry in self._latest if entry[0] >= step]

    def resume_at(self, step: int, logged: Sequence[tuple[int, str, float]], starts_again: bool = True) -> None:
        """Hides the values from this step on: the run resumes from a checkpoint that had logged these values for it.

        Some log a step by the number of steps before it, and some by that with it. So the next step logs under the number of
        the last one; and what its start had logged before it was saved is logged by its start again, if it `starts_again`
        (a run that resumes with the validation after a step does not).
        """
        self.finalize("")  # a script may have written something already
        _put_before_now(Path(self.log_dir))
        self._hidden_from = step
        self._latest.clear()
        self._last.clear()
        for number, tag, value in logged:
            self.log_metrics({tag: value}, number)
        if starts_again:
            self._again = LoggedAgain(logged)

    @rank_zero_only
    def add_summary(self, summary: Summary, step: int) -> None:
        """Writes what TensorBoard's writer has no method for."""
        self._try(lambda: self._writer().file_writer.add_summary(summary, step))

    def flush(self) -> None:
        """Writes what was logged to the disk."""
        self._try(lambda: self._writer().flush())

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        def write() -> None:
            self._logged = True
            # One event with all values: an event each takes the writer's thread as many turns.
            several = {name: value for name, value in metrics.items() if isinstance(value, Mapping)}
            names = [name for name in metrics if name not in several and not self._again.has(step, name)]
            single = {name: float(metrics[name]) for name in names}
            if step is not None:
                # Lightning's LearningRateMonitor logs a step's rates once for each micro-batch of a rank.
                single = {name: value for name, value in single.items() if self._last.get(name) != (step, value)}
                self._last |= {name: (step, value) for name, value in single.items()}
                self._latest.extend((step, name, value) for name, value in single.items())
            summary = Summary(value=[Summary.Value(tag=board_tag(name), simple_value=value) for name, value in single.items()])
            self._writer().file_writer.add_summary(summary, step)
            for name, values in several.items():
                self._writer().add_scalars(name, values, step)

        self._try(write)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the run's config.yaml has them."""

    @rank_zero_only
    def save(self) -> None:
        pass  # Lightning calls this all the time, to write hparams.yaml

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._tensorboard is None or self._tensorboard.file_writer is None:
            return
        self._try(self._tensorboard.close)
        if not self._logged and self._remove_empty():  # a run that failed before its first step shows nothing
            self._tensorboard = None

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.warning("What is measured can't be written for TensorBoard: %s. Training continues.", error)
            self._failing = True
            self._tensorboard = None  # TensorBoard's does not recover: the next attempt gets a new one
            self._hidden_from = self._hides_from if self._remove_empty() else None

    def _remove_empty(self) -> bool:
        """Removes the newest file if it holds nothing, and returns whether there is none now."""
        files = [*Path(self.log_dir).glob(f"events.out.tfevents.*{self._suffix}")]
        for file in files:
            with suppress(OSError):
                if file.stat().st_size <= _HEAD:
                    file.unlink()
        return not any(file.exists() for file in files)


def boards(trainer: Trainer) -> list[Events]:
    """Returns those of a trainer's loggers that are TensorBoard's, by this project."""
    return [logger for logger in trainer.loggers if isinstance(logger, Events)]
