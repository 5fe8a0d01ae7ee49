"""The loggers CSV, W&B and MLflow: a resumed run continues its curves there, and their faults do not end a training."""

import logging
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, WandbLogger

from project.cluster.settings import flat
from project.errors import UserError
from project.masking import masked_text
from project.watch.csv_file import CsvFile
from project.watch.events import LoggedAgain
from project.watch.sending import Sender

log = logging.getLogger(__name__)

_FLUSH_SECONDS, _LAST_SECONDS = 5.0, 15.0  # that a checkpoint, and the end of a run, wait for a server


class Steady(Logger):
    """A logger that YAML names. If it can't begin, the run does not; a later fault is logged once, and training continues."""

    called = ""
    _failing = False

    def attempt(self, what: Callable[[], object]) -> Exception | None:
        """Calls a function, or reports once why it failed."""
        try:
            what()
        except Exception as error:
            if not self._failing:
                log.error("What is measured can't be written for %s: %s. Training goes on.", self.called, message_of(error))
            self._failing = True
            return error
        return None


def message_of(error: Exception) -> str:
    """Returns the message of an error, in a line, without the password of an address."""
    return masked_text(" ".join(str(error).split()) or type(error).__name__)[:300]


class Csv(Steady, CSVLogger):
    """A file of rows, one over all starts of the run."""

    called = "CSV"
    _file: CsvFile | None = None
    _resumed: tuple[int, Sequence[tuple[int, str, float]]] | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Returns the file. Lightning's would delete what an earlier start has written."""
        if self._file is None:
            until, logged = self._resumed or (None, ())
            try:
                self._file = CsvFile(path := Path(self.log_dir, "metrics.csv"), until)
            except OSError as error:
                raise UserError(f"CSV can't go on with {path}: {message_of(error)}. HINT: move it away.") from error
            for step, entries in groupby(logged, key=itemgetter(0)):
                CSVLogger.log_metrics(self, {tag: value for _, tag, value in entries}, step)
        return self._file

    def resume_at(self, step: int, logged: Sequence[tuple[int, str, float]], starts_again: bool = True) -> None:
        """Resumes the curves, as `Events.resume_at` does."""
        self._resumed, self._again = (step, logged), LoggedAgain(logged if starts_again else ())

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        def write() -> None:
            new = {name: value for name, value in metrics.items() if not (self._resumed and self._again.has(step, name))}
            if new:
                CSVLogger.log_metrics(self, new, step)

        self.attempt(write)

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

    called = "W&B"
    _begun = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Returns W&B's run."""
        if self._begun:
            return super().experiment
        import wandb

        try:
            wandb.setup()  # it is silent from here on, and not while it looks at the arguments of a run
            run = super().experiment
        except Exception as error:
            raise UserError(
                f"W&B can't begin: {message_of(error)}. HINT: wandb login, or offline: true in its init_args."
            ) from error
        self._begun = True
        return run

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        self.attempt(lambda: WandbLogger.log_hyperparams(self, params))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.attempt(lambda: WandbLogger.log_metrics(self, metrics, step))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.attempt(lambda: WandbLogger.after_save_checkpoint(self, checkpoint_callback))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Sends the rest, for a minute at most. Lightning leaves that to the end of the program, which may be another one."""
        if self._begun:
            self.attempt(lambda: WandbLogger.finalize(self, status))
            self.attempt(lambda: self.experiment.finish(exit_code=0 if status == "success" else 1))


class MLFlow(Steady, MLFlowLogger):
    """A run of MLflow. A thread writes it, as its server may be far or away."""

    called = "MLflow"
    keep: Callable[[str], object] = str
    """Receives the id of the run as soon as there is one."""
    _begun = False
    _sender: Sender | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Returns MLflow's client, for a run that has begun."""
        if self._begun:
            return super().experiment
        self._begun = True  # as `run_id` comes here
        try:
            client, run_id = super().experiment, str(self.run_id)
            self.keep(run_id)
            client.update_run(run_id, status="RUNNING")
        except Exception as error:
            raise UserError(f"MLflow can't begin: {message_of(error)}. HINT: look at its tracking_uri.") from error
        return client

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

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.attempt(lambda: MLFlowLogger.after_save_checkpoint(self, checkpoint_callback))

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
            log.error("MLflow does not answer, and lacks %d points of the curves.", left)
        else:
            self.attempt(lambda: MLFlowLogger.finalize(self, status))
