"""Keeps a run's decision to stop (`trainer.should_stop`): a resumed run trains on if its length, or what has stopped it, has
changed since.
"""

import inspect
import sys
from collections.abc import Mapping
from types import FunctionType

from lightning.pytorch import Trainer

from project.typed import StateDict, typed

Settings = Mapping[str, str]
"""The settings of the callbacks, by their classes; and, as 'Trainer', the length of the run."""


class NotesWhoStops:
    """A Trainer that notes which class has set `should_stop`."""

    stopped_by: str
    _should_stop = False

    @property
    def should_stop(self) -> bool:
        """Returns whether the run is to stop early; who sets it is noted, in `stopped_by`."""
        return self._should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        by = sys._getframe(1).f_locals.get("self")
        if value and not self._should_stop and not type(by).__module__.startswith("project."):
            self.stopped_by = "trainer.should_stop" if by is None else type(by).__name__
        self._should_stop = value


def stop_settings(trainer: Trainer) -> Settings:
    """Returns the settings that a decision to stop may go by: the arguments that callbacks keep. Called before their states are
    restored, which may hold some.
    """
    settings = {"Trainer": repr((trainer.max_epochs, trainer.max_steps, str(typed(trainer).max_time)))}
    for callback in typed(trainer).callbacks:
        kind, kept = type(callback), vars(callback)
        makers = [vars(base).get("__init__") for base in kind.__mro__]
        names = {name for maker in makers if isinstance(maker, FunctionType) for name in inspect.signature(maker).parameters}
        values = {name: kept.get(name, kept.get(f"_{name}")) for name in sorted(names)}
        plain = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}
        settings[kind.__name__] = settings.get(kind.__name__, "") + repr(plain)
    return settings


def decision(trainer: Trainer, settings: Settings) -> StateDict:
    """Returns what has stopped the run, and the settings that led to it."""
    by = typed(trainer).stopped_by
    return {"by": by, "settings": {name: settings[name] for name in ("Trainer", by) if name in settings}}


def stands(saved: StateDict, settings: Settings) -> bool:
    """Returns whether a saved decision stands: nothing that led to it has changed."""
    return bool(saved["settings"].items() <= settings.items())
