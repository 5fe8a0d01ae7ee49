"""Monitored: who goes by a metric that nobody logs is told so before the run, or at its first validation.

Otherwise no best checkpoint is kept, silently, or the run is lost when an early stop looks for its metric.
"""

import difflib
import logging
from collections.abc import Iterator

from lightning.pytorch import Callback, LightningModule, Trainer

from project.errors import UserError
from project.survive.checkpoints import Checkpoints

log = logging.getLogger(__name__)


class Monitored(Callback):
    """Looks for the metrics that callbacks and schedules go by: in the sanity check, else in the first validation."""

    def __init__(self) -> None:
        self._looked = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._looked or trainer.state.fn != "fit":
            return
        if trainer.sanity_checking and len(trainer.num_sanity_val_batches) > 1:
            return  # of several loaders Lightning keeps nothing then
        self._looked = not trainer.sanity_checking
        known = sorted(trainer.callback_metrics)
        for who, name in _wanted(trainer):
            if name in known or (trainer.sanity_checking and not name.startswith("val")):
                continue  # what training logs is not there in the sanity check
            near = difflib.get_close_matches(name, known, n=1)
            meant = f" Did you mean {near[0]}?" if near else ""
            text = f"{who}.monitor={name}: there is no such metric.{meant} There are: {', '.join(known)}."
            if not name.startswith("val") and not near:
                log.warning("%s It may yet come from training.", text)
                continue
            if not trainer.sanity_checking:
                for one in trainer.callbacks:  # type: ignore[attr-defined]
                    if isinstance(one, Checkpoints):  # nothing that was trained is lost
                        one.save(trainer)
                        one.wait()
            raise UserError(f"{text} HINT: set {who}.monitor.")


def _wanted(trainer: Trainer) -> Iterator[tuple[str, str]]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = getattr(callback, "monitor", None)
        if isinstance(name, str) and not (isinstance(callback, Checkpoints) and not callback.needs_metric):
            yield "checkpoints" if isinstance(callback, Checkpoints) else type(callback).__name__, name
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor:
            yield "model.lr_scheduler", config.monitor
