"""Declares the types of a Trainer's attributes: those that Lightning sets elsewhere, and those that ours adds."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

import lightning.pytorch as pl
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.profilers import Profiler

if TYPE_CHECKING:
    from project.resume.checkpoint import Resuming
    from project.step.gradients import Gradients
    from project.step.logged import Logged
    from project.step.state import StepState

Batch: TypeAlias = Any
"""A micro-batch as a user's loader gives it, which may be of any kind."""
StateDict: TypeAlias = dict[str, Any]
"""A checkpoint, or a part of it: what lies under a name is known to whoever has put it there."""
Configuration: TypeAlias = dict[str, Any]
"""A resolved YAML."""
Fetcher: TypeAlias = Any
"""Lightning's fetcher of micro-batches, whose class has no public name."""
Kind = TypeVar("Kind")


class Stateful(Protocol):
    """An object with a state that can be saved and restored."""

    def state_dict(self) -> StateDict:
        """Returns its state."""

    def load_state_dict(self, state_dict: StateDict, /) -> None:
        """Takes what `state_dict` gave."""


class TypedTrainer(pl.Trainer):
    """A Trainer whose attributes have types."""

    callbacks: list[Callback]
    datamodule: LightningDataModule | None
    profiler: Profiler
    fast_dev_run: bool | int
    log_every_n_steps: int
    overfit_batches: float
    reload_dataloaders_every_n_epochs: int

    configuration: Configuration
    """The resolved YAML; empty where the Trainer was made in Python."""
    global_batch: int | None
    """Samples behind one optimiser step, where they can be counted."""
    host_names: list[str]
    """The host of each rank, once the ranks of several hosts have met; before, this one."""
    host_of: Callable[[int], str | None]
    """Returns the host on which the launcher, where it knows, has put a rank."""
    shared_folder: bool
    rank_0_may_move: bool
    """Its host need not be the one that has the run's folder: there is a copy elsewhere."""
    max_time: str | timedelta | dict[str, int] | None
    stopped_by: str
    """The key of the EarlyStopping that has set `should_stop` in this fit; '' as long as none has."""

    own_attributes: set[str]
    """The names of those that Lightning or this project sets: others are the user's."""
    exact: bool
    """The run is the same to the last bit on any number of ranks."""
    step_state: "StepState"
    gradients: "Gradients"
    logged: "Logged"
    resuming: "Resuming"

    def best_checkpoint(self, monitor: str | None, mode: str) -> Path:
        """Returns the best checkpoint in the run's folder by a metric: its `min` or `max`."""
        raise NotImplementedError


def typed(trainer: pl.Trainer) -> TypedTrainer:
    """Returns the same Trainer, with types."""
    return cast(TypedTrainer, trainer)


def callbacks_of(trainer: pl.Trainer, kind: type[Kind]) -> list[Kind]:
    """Returns the trainer's callbacks of a kind, in their order."""
    return [callback for callback in typed(trainer).callbacks if isinstance(callback, kind)]
