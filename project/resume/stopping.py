"""Keeps a run's decision to stop: a resumed run trains on if its length, or the EarlyStopping that has stopped it, has changed.

A stop by a user's own code is none: a clock may have been the reason, and who starts the run again wants it to train on.
"""

import inspect
import sys
from collections.abc import Mapping
from hashlib import sha256
from types import FunctionType

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping

from project.data.values import Digests
from project.typed import StateDict, callbacks_of, typed

Settings = Mapping[str, str]
"""Digests of the settings of the run's EarlyStopping callbacks, by their state's key; and, as 'Trainer', of its length."""
_UNKNOWN = "unknown"


class NotesWhoStops:
    """A Trainer that notes which EarlyStopping has set `should_stop`."""

    stopped_by: str
    _should_stop = False

    @property
    def should_stop(self) -> bool:
        """Returns whether the run is to stop early."""
        return self._should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        by = sys._getframe(1).f_locals.get("self")
        if value and isinstance(by, EarlyStopping):
            self.stopped_by = by.state_key
        self._should_stop = value


def stop_settings(trainer: Trainer) -> Settings:
    """Returns digests of the settings that a decision to stop may go by: the arguments that the callbacks keep. Called before
    their states are restored, which may hold some.
    """
    settings = {"Trainer": repr((trainer.max_epochs, trainer.max_steps, str(typed(trainer).max_time)))}
    for callback in callbacks_of(trainer, EarlyStopping):
        kept, digests = vars(callback), Digests()
        makers = [vars(base).get("__init__") for base in type(callback).__mro__]
        names = {name for maker in makers if isinstance(maker, FunctionType) for name in inspect.signature(maker).parameters}
        values = {name: digests.of(kept.get(name, kept.get(f"_{name}"))) for name in sorted(names)}
        settings[callback.state_key] = _UNKNOWN if None in values.values() else sha256(repr(values).encode()).hexdigest()
    return settings


def decision(trainer: Trainer, settings: Settings) -> StateDict:
    """Returns which EarlyStopping has stopped the run, and the settings that led to it."""
    by = typed(trainer).stopped_by
    return {"by": by, "settings": {name: settings.get(name, _UNKNOWN) for name in ("Trainer", by)}}


def stands(saved: StateDict, settings: Settings) -> bool:
    """Returns whether a saved decision stands: nothing that led to it has changed."""
    return bool(saved["settings"].items() <= settings.items()) and _UNKNOWN not in saved["settings"].values()
