"""Reports a monitored metric that is never logged: no best checkpoint would be kept, silently, or an early stop end the run."""

import difflib
import logging
from collections.abc import Iterator
from typing import NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.fsdp import FSDPModule

from project.checkpoints.callback import Checkpoints, checkpoints_of
from project.errors import UserError
from project.step.position import stopped_within_epoch
from project.typed import typed

log = logging.getLogger(__name__)

_SCHEDULE = "model.lr_scheduler"


class Monitored(Callback):
    """Checks that monitored metrics are logged: a validation's in the first one, others after an epoch. Of what the sanity
    check does not log it warns: a user's module may log less there, or under other names.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = self._trained = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or self._validated:
            return
        if trainer.sanity_checking and len(trainer.num_sanity_val_batches) > 1:
            return  # of several loaders Lightning keeps nothing then
        self._validated = not trainer.sanity_checking
        kind = type(pl_module).__bases__[-1] if isinstance(pl_module, FSDPModule) else type(pl_module)
        as_in_any = trainer.callback_metrics and not any("sanity" in name for name in trainer.callback_metrics)
        for who, name in _unknown_metrics(trainer):
            if name.startswith("val") and trainer.sanity_checking and not kind.__module__.startswith("project."):
                if as_in_any and trainer.is_global_zero:
                    log.warning("%s If no validation logs it, the run ends after the first.", _describe(trainer, who, name))
            elif name.startswith("val"):
                _refuse(trainer, who, name)
            elif not trainer.sanity_checking and not self._trained:
                log.info("%s It may yet come from training.", _describe(trainer, who, name))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the metrics of training. A hook from elsewhere may log more, then Lightning decides."""
        if self._trained or stopped_within_epoch(trainer) or (trainer.enable_validation and not self._validated):
            return
        self._trained = True
        logs_more = is_overridden("on_train_epoch_end", pl_module, LightningModule) or any(
            is_overridden("on_train_epoch_end", callback, Callback)
            for callback in typed(trainer).callbacks
            if not type(callback).__module__.startswith(("project.", "lightning."))
        )
        for who, name in _unknown_metrics(trainer):
            if not name.startswith("val") and not logs_more and who != _SCHEDULE:  # which Lightning refuses next, in a line
                _refuse(trainer, who, name)


def _unknown_metrics(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yields the monitored metrics that have not been logged, each after the setting or callback that monitors it."""
    for callback in typed(trainer).callbacks:
        name = getattr(callback, "monitor", None)
        if isinstance(name, str) and name not in trainer.callback_metrics and _needs(trainer, callback, name):
            yield "checkpoints" if isinstance(callback, Checkpoints) else type(callback).__name__, name
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.strict and config.monitor and config.monitor not in trainer.callback_metrics:
            yield _SCHEDULE, config.monitor


def _needs(trainer: Trainer, callback: Callback, name: str) -> bool:
    """Returns whether a callback fails when the metric that it monitors is missing."""
    if isinstance(callback, Checkpoints):
        return name != "auto"
    if isinstance(callback, EarlyStopping):
        return callback.strict
    if isinstance(callback, Checkpoint):
        return name not in ("epoch", "step")  # which ModelCheckpoint knows by itself
    return name.startswith("val") or bool(_similar_metrics(trainer, name))  # which somebody else's callback may take otherwise


def _refuse(trainer: Trainer, who: str, name: str) -> NoReturn:
    """Saves a checkpoint, unless nothing was trained yet, and raises a UserError that names the metric."""
    if not trainer.sanity_checking and (checkpoints := checkpoints_of(trainer)):  # nothing that was trained is lost
        checkpoints.save(trainer)
        checkpoints.wait()
    key = f"{who}.monitor" if who in ("checkpoints", _SCHEDULE) else f"{who}'s monitor in trainer.callbacks"
    raise UserError(f"{_describe(trainer, who, name)} HINT: set {key}.")


def _describe(trainer: Trainer, who: str, name: str) -> str:
    meant = f" Did you mean {near[0]}?" if (near := _similar_metrics(trainer, name)) else ""
    return f"{who}.monitor={name}: there is no such metric.{meant} There are: {', '.join(sorted(trainer.callback_metrics))}."


def _similar_metrics(trainer: Trainer, name: str) -> list[str]:
    return difflib.get_close_matches(name, sorted(trainer.callback_metrics), n=1)
