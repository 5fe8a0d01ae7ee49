"""The protocols of loggers that take measurements, resume or flush; and their stand-ins that log nothing."""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger


class TakesMeasurements:
    """A logger that wants what this project measures beside what `self.log` logs: speed, memory, the gradient's norm."""

    def logged_since(self, step: int) -> list[tuple[int, str, float]]:
        """Returns what was logged for this step and later ones, which a checkpoint takes along."""
        return []


@runtime_checkable
class Resumes(Protocol):
    """A logger that replaces what it has from a step on by `logged`: that part of the run is repeated."""

    def resume_at(self, step: int, logged: Sequence[tuple[int, str, float]], starts_again: bool = True) -> None: ...


def resume_loggers(
    loggers: Iterable[Logger], step: int, logged: Sequence[tuple[int, str, float]] = (), starts_again: bool = True
) -> None:
    """Has the loggers that can resume their curves do so. Called by rank 0, who logs."""
    for logger in loggers:
        if isinstance(logger, Resumes):
            logger.resume_at(step, logged, starts_again)


@runtime_checkable
class Flushes(Protocol):
    """A logger that keeps lines back until it is told to write them."""

    def flush(self) -> None: ...


def measurement_loggers(trainer: Trainer) -> list[Logger]:
    """Returns the loggers for these measurements: all of them, where one wants them. A logger that the user made in Python
    receives what the user's module logs, and nothing else.
    """
    return trainer.loggers if any(isinstance(logger, TakesMeasurements) for logger in trainer.loggers) else []


def silenced(loggers: Iterable[Logger]) -> list[Logger]:
    """Returns stand-ins of the loggers' own types, with their names and folders, that log nothing."""
    return [_silenced(logger) for logger in loggers]


def _silenced(logger: Logger) -> Logger:
    kind = type(logger)
    methods = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
    members = {
        **dict.fromkeys(methods, _do_nothing),
        "__init__": lambda self: self.__dict__.update(vars(logger)),
        "experiment": property(lambda self: DummyLogger().experiment),
    }
    stand_in: Logger = type(kind.__name__, (kind,), members)()
    return stand_in


def _do_nothing(*args: object, **kwargs: object) -> None:
    pass
