"""The loggers CSV, W&B and MLflow: a resumed run continues its curves there, and their faults do not end a training."""

import csv
import io
import logging
import re
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from queue import Full, Queue
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, WandbLogger

from project.cluster.settings import flat
from project.errors import FaultError, UserError
from project.masking import masked_text
from project.untrusted import open_to_append, read_text, write_text
from project.watch.events import LoggedAgain

log = logging.getLogger(__name__)

_FLUSH_SECONDS, _LAST_SECONDS = 5.0, 15.0  # that a checkpoint, and the end of a run, wait for a server
_LARGEST = 1 << 28  # bytes of metrics.csv; it is written anew, from memory, where a run goes on
_PAUSE = 30.0  # seconds between two attempts
_LONGEST = 100_000  # entries that may wait for a server that is away; later ones are dropped


class Steady(Logger):
    """A logger that YAML names. If it can't begin, the run does not; a later fault is logged once, and training continues."""

    called, hint = "", ""
    _begun = _failing = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Returns the library's run or client; the first call begins, and its failure ends the run."""
        if not self._begun:
            self._begun = True  # as `_begin` asks for `experiment`
            try:
                self._begin()
            except Exception as error:
                self._begun = False
                wrong = UserError if type(error).__name__ == "UsageError" else FaultError  # W&B's, where nobody has logged in
                raise wrong(f"{self.called} can't begin: {message_of(error)}. HINT: {self.hint}.") from error
        library: Any = super()
        return library.experiment

    def _begin(self) -> None:
        """Does what comes before the first value."""

    def attempt(self, what: Callable[[], object]) -> Exception | None:
        """Calls a function, or reports once why it failed."""
        try:
            what()
        except Exception as error:
            if not self._failing:
                log.warning("What is measured can't be written for %s: %s. Training continues.", self.called, message_of(error))
            self._failing = True
            return error
        return None


def _attempted(method: Callable[..., object]) -> Any:
    """Returns a method that reports once why another one failed."""

    @rank_zero_only
    def attempt(self: Steady, *args: Any, **settings: Any) -> None:
        self.attempt(lambda: method(self, *args, **settings))

    return attempt


def message_of(error: Exception) -> str:
    """Returns the message of an error, in a line, without the password of an address."""
    return masked_text(" ".join(str(error).split()) or type(error).__name__)[:300]


class CsvFile:
    """A file of rows, a step and its values each, which `save` writes. One that exists is continued, without the rows of the
    step `until` and of later ones: these steps are taken again.
    """

    def __init__(self, path: Path, until: int | None = None) -> None:
        self.path = path
        self.metrics: list[dict[str, Any]] = []
        """The rows that are not written yet; Lightning's logger looks at this."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = self._read()
        self._names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
        if rows:
            self._write([row for row in rows if until is None or int(row["step"]) < until])

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Adds a row, which `save` writes."""
        self.metrics.append({"step": step, **{name: float(value) for name, value in metrics.items()}})

    def save(self) -> None:
        """Writes the logged values to the file."""
        if not self.metrics:
            return
        new = {name for row in self.metrics for name in row} - set(self._names)
        if new or not self.path.exists():
            self._names += sorted(new)
            self._write([*self._read(), *self.metrics])
        else:
            with open_to_append(self.path) as file:
                csv.DictWriter(file, self._names).writerows(self.metrics)
        self.metrics.clear()

    def _read(self) -> list[dict[str, Any]]:
        try:
            rows = list(csv.DictReader(io.StringIO(read_text(self.path, _LARGEST, follow=False), newline="")))
        except FileNotFoundError:
            return []
        except (ValueError, csv.Error) as error:
            raise OSError(f"{self.path} is no CSV file: {error}") from error
        # The last line of a run that was killed may have been cut short.
        rows = [
            row for row in rows if None not in (*row, *row.values()) and re.fullmatch(r"\d{1,19}", row.get("step", ""), re.A)
        ]
        return [{name: value for name, value in row.items() if value} for row in rows]

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._names)
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())


class Csv(Steady, CSVLogger):
    """A file of rows, one over all starts of the run."""

    called = "CSV"
    _file: CsvFile | None = None
    _resumed: tuple[int | None, Sequence[tuple[int, str, float]]] = None, ()
    _again = LoggedAgain()

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Returns the file. Lightning's would delete what an earlier start has written."""
        if self._file is None:
            until, logged = self._resumed
            try:
                self._file = CsvFile(path := Path(self.log_dir, "metrics.csv"), until)
            except OSError as error:
                raise UserError(f"CSV can't continue with {path}: {message_of(error)}. HINT: move it away.") from error
            for step, entries in groupby(logged, key=itemgetter(0)):
                CSVLogger.log_metrics(self, {tag: value for _, tag, value in entries}, step)
        return self._file

    def resume_at(self, step: int, logged: Sequence[tuple[int, str, float]], starts_again: bool = True) -> None:
        """Resumes the curves, as `Events.resume_at` does."""
        self.save()
        self._file, self._resumed, self._again = None, (step, logged), LoggedAgain(logged if starts_again else ())

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if new := {name: value for name, value in metrics.items() if not self._again.has(step, name)}:
            self.attempt(lambda: CSVLogger.log_metrics(self, new, step))

    @rank_zero_only
    def log_hyperparams(self, params: Any = None) -> None:
        """Does nothing: the run's config.yaml has them."""

    @rank_zero_only
    def save(self) -> None:
        if self._file is not None:
            self._failing = self.attempt(self._file.save) is not None

    flush = save

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()


class Wandb(Steady, WandbLogger):
    """A run of W&B, which has an id before it begins."""

    called, hint = "W&B", "wandb login, or offline: true in its init_args"

    def _begin(self) -> None:
        import wandb

        wandb.setup()  # it is silent from here on, and not while it looks at the arguments of a run
        _ = self.experiment

    log_hyperparams, log_metrics = _attempted(WandbLogger.log_hyperparams), _attempted(WandbLogger.log_metrics)
    after_save_checkpoint = _attempted(WandbLogger.after_save_checkpoint)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Sends the rest, for a minute at most. Lightning leaves that to the end of the program, which may be another one."""
        if self._begun:
            self.attempt(lambda: WandbLogger.finalize(self, status))
            self.attempt(lambda: self.experiment.finish(exit_code=0 if status == "success" else 1))


class Sender:
    """Sends entries from a thread, in their order. Those that a server that is away does not take wait until it is back.

    `send` returns False where another attempt is worth it.
    """

    def __init__(self, send: Callable[[Any], bool]) -> None:
        self._send = send
        self._entries: Queue[Any] = Queue(_LONGEST)
        self._hurry, self._away, self._dropped = threading.Event(), False, 0
        threading.Thread(target=self._run, name="logger", daemon=True).start()

    def put(self, entry: Any) -> None:
        """Adds an entry, and returns at once."""
        try:
            self._entries.put_nowait(entry)
        except Full:
            self._dropped += 1

    def left(self, seconds: float, hurry: bool = False) -> int:
        """Returns how many entries were not sent, when all are, or after so many seconds, or when the server is away.

        With `hurry` it is their last chance: attempts follow each other at once.
        """
        if hurry:
            self._hurry.set()
        end = time.monotonic() + seconds
        while self._entries.unfinished_tasks and time.monotonic() < end and (hurry or not self._away):
            time.sleep(0.005)
        return self._entries.unfinished_tasks + self._dropped

    def _run(self) -> None:
        while True:
            entry = self._entries.get()
            while not self._send(entry):
                self._away = True
                if self._hurry.wait(_PAUSE):
                    time.sleep(1)
            self._away = False
            self._entries.task_done()


class MLFlow(Steady, MLFlowLogger):
    """A run of MLflow. A thread writes it, as its server may be far or away."""

    called, hint = "MLflow", "look at its tracking_uri"
    keep: Callable[[str], object] = str
    """Receives the id of the run as soon as there is one."""
    _sender: Sender | None = None

    def _begin(self) -> None:
        client, run_id = self.experiment, str(self.run_id)
        self.keep(run_id)
        client.update_run(run_id, status="RUNNING")

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Logs those that MLflow has no value of yet: it never takes another."""

        def write() -> None:
            logged = self.experiment.get_run(self.run_id).data.params
            named = flat(vars(params) if isinstance(params, Namespace) else params)
            new = {name: str(value) for name, value in named.items() if value is not None and name not in logged}
            MLFlowLogger.log_hyperparams(self, new)

        self.attempt(write)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._sender = self._sender or Sender(self._send)
        self._sender.put((dict(metrics), step))

    after_save_checkpoint = _attempted(MLFlowLogger.after_save_checkpoint)

    def _send(self, entry: tuple[dict[str, Any], int | None]) -> bool:
        error = self.attempt(lambda: MLFlowLogger.log_metrics(self, *entry))
        self._failing = error is not None
        # What it refuses for what it is would be refused again.
        return error is None or getattr(error, "error_code", None) in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")

    @rank_zero_only
    def flush(self) -> None:
        """Waits until what was logged is sent, if MLflow answers."""
        if self._sender is not None:
            self._sender.left(_FLUSH_SECONDS)

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        left = 0 if self._sender is None else self._sender.left(_LAST_SECONDS, hurry=True)
        if left:
            log.warning("MLflow does not answer, and lacks %d points of the curves.", left)
        else:
            self.attempt(lambda: MLFlowLogger.finalize(self, status))
