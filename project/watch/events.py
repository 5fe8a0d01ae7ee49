"""Events: TensorBoard's logger, made to last. One continuous curve over restarts, and a full disk does not end a run."""

import logging
import threading
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

log = logging.getLogger(__name__)


def _thread_failed(args: threading.ExceptHookArgs) -> None:
    """TensorBoard's writing thread leaves its OSError to the next call, which reports it: no traceback in between."""
    if not isinstance(args.exc_value, OSError):
        threading.__excepthook__(args)


class Events(TensorBoardLogger):
    """Writes TensorBoard's events into the run's folder.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder, name="", version="")
        self._failing = False
        threading.excepthook = _thread_failed

    def purge(self, step: int) -> None:
        """What is there from this step on was logged by a part of the run that is done again: it is shown no more."""
        self._kwargs["purge_step"] = step

    def flush(self) -> None:
        """What was logged is on the disk afterwards."""
        self._try(lambda: self.experiment.flush())

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        def write() -> None:
            # One event with all values: an event each takes the writer's thread as many turns.
            single = {name: value for name, value in metrics.items() if not isinstance(value, Mapping)}
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in single.items()])
            self.experiment._get_file_writer().add_summary(summary, step)
            for name in metrics.keys() - single.keys():
                self.experiment.add_scalars(name, metrics[name], step)

        self._try(write)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None, *args: Any, **kwargs: Any) -> None:
        """The run's config.yaml has them."""

    @rank_zero_only
    def save(self) -> None:
        pass  # Lightning calls this all the time, to write hparams.yaml

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._experiment is not None:
            self._try(lambda: self.experiment.close())

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.error("What is measured can't be written for TensorBoard: %s. Training goes on.", error)
            self._failing = True
            self._experiment = None  # TensorBoard's writer does not recover: the next attempt gets a new one
            self._kwargs.pop("purge_step", None)
