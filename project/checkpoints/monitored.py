"""Reports a monitored metric that is never logged, before the run or at its first validation.

Otherwise no best checkpoint is kept, silently, or the run is lost when an early stop looks for its metric.
"""

import difflib
import logging
from collections.abc import Iterator
from typing import NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.utilities.model_helpers import is_overridden

from project.checkpoints.callback import Checkpoints
from project.errors import UserError
from project.step.position import stopped_within_epoch
from project.typed import typed

log = logging.getLogger(__name__)

_SCHEDULE = "model.lr_scheduler"


class Monitored(Callback):
    """Checks that the metrics that callbacks and schedules monitor are logged: those of a validation in the sanity check, else
    in the first validation; those of training after the first epoch.
    """

    def __init__(self) -> None:
        self._validated = self._trained = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = self._trained = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validated or trainer.state.fn != "fit":
            return
        if trainer.sanity_checking and len(trainer.num_sanity_val_batches) > 1:
            return  # of several loaders Lightning keeps nothing then
        self._validated = not trainer.sanity_checking
        for who, name in self._unknown_metrics(trainer):
            if name.startswith("val"):
                self._raise_unknown(trainer, who, name)
            if not trainer.sanity_checking and not self._trained:
                log.info("%s It may yet come from training.", _describe_unknown(trainer, who, name))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the metrics of training: those of the step are logged by now; a hook from elsewhere may log more, then
        Lightning decides.
        """
        callbacks = typed(trainer).callbacks
        foreign = [callback for callback in callbacks if not type(callback).__module__.startswith(("project.", "lightning."))]
        logs_more = is_overridden("on_train_epoch_end", pl_module, LightningModule) or any(
            is_overridden("on_train_epoch_end", callback, Callback) for callback in foreign
        )
        if self._trained or stopped_within_epoch(trainer) or (trainer.enable_validation and not self._validated):
            return
        self._trained = True
        for who, name in self._unknown_metrics(trainer):
            if not name.startswith("val") and not logs_more and who != _SCHEDULE:  # which Lightning refuses next, in a line
                self._raise_unknown(trainer, who, name)

    @staticmethod
    def _unknown_metrics(trainer: Trainer) -> list[tuple[str, str]]:
        """Returns the monitored metrics that have not been logged, each with the setting that monitors it."""
        return [(who, name) for who, name in _monitored_metrics(trainer) if name not in trainer.callback_metrics]

    @staticmethod
    def _raise_unknown(trainer: Trainer, who: str, name: str) -> NoReturn:
        """Saves a checkpoint, unless nothing was trained yet, and raises a UserError that names the metric."""
        if not trainer.sanity_checking:
            for callback in typed(trainer).callbacks:
                if isinstance(callback, Checkpoints):  # nothing that was trained is lost
                    callback.save(trainer)
                    callback.wait()
        raise UserError(f"{_describe_unknown(trainer, who, name)} HINT: set {who}.monitor.")


def _describe_unknown(trainer: Trainer, who: str, name: str) -> str:
    meant = f" Did you mean {near[0]}?" if (near := _similar_metrics(trainer, name)) else ""
    return f"{who}.monitor={name}: there is no such metric.{meant} There are: {', '.join(sorted(trainer.callback_metrics))}."


def _monitored_metrics(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yields the setting or callback that monitors a metric, and the metric's name."""
    for callback in typed(trainer).callbacks:
        name = getattr(callback, "monitor", None)
        if not isinstance(name, str):
            continue
        if isinstance(callback, Checkpoints):
            if callback.needs_metric:
                yield "checkpoints", name
        elif isinstance(callback, EarlyStopping):
            if callback.strict:  # else it is content to go on without
                yield type(callback).__name__, name
        elif isinstance(callback, Checkpoint):
            if name not in ("epoch", "step"):  # which ModelCheckpoint knows by itself
                yield type(callback).__name__, name
        elif name.startswith("val") or _similar_metrics(
            trainer, name
        ):  # what somebody else's callback takes it for, nobody knows
            yield type(callback).__name__, name
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor and config.strict:
            yield _SCHEDULE, config.monitor


def _similar_metrics(trainer: Trainer, name: str) -> list[str]:
    return difflib.get_close_matches(name, sorted(trainer.callback_metrics), n=1)
