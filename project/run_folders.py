"""A folder for each run: a process that trains several runs in one `default_root_dir` gives each later one its own.

So a path to a run's checkpoint leads to that run's weights as long as the process lives, and records are of one run alone.
All ranks take the same folder without asking each other: each of them has seen the same fits.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS

from project.aliases import refuse_other_lightning
from project.checkpoints.callback import checkpoints_of
from project.runs import run_of
from project.survive.hang.watchdog import Watchdog
from project.typed import TypedTrainer, callbacks_of
from project.watch.events import Events
from project.watch.history import FILE as LIFE
from project.watch.loggers import by_name

log = logging.getLogger(__name__)

_RUNS: dict[Path, list[Path]] = {}
"""The folders of the runs that this process has trained, by the `default_root_dir` of their Trainers; the newest is last."""
Loggers = Logger | Iterable[Logger] | bool | None
"""A Trainer's `logger`."""
_OF_THE_NEWEST = ("last", "best", "hpc")


def _resolved(folder: str | Path) -> Path:
    return Path(os.path.realpath(os.path.expanduser(folder)))


def newest_folder(given: str | Path) -> str | Path:
    """Returns the folder of the newest run that this process has trained in a `default_root_dir`; that itself where it has
    trained none.
    """
    return next(reversed(_RUNS.get(_resolved(given), [])), given)


def loggers_in(given: object, rank: int, bare: bool, folder: Path) -> Loggers:
    """Returns a Trainer's loggers for a run's folder. `bare`: whether none is made that it was not given."""
    loggers: Loggers = by_name(given, folder, rank)
    return Events(str(folder)) if loggers in (None, True) and not bare else loggers


class FolderOfRun(TypedTrainer):
    """A Trainer whose `fit` takes a new folder for a new run, if another Trainer of this process has trained in its folder."""

    keeps_records: bool
    """Whether this project writes anything into the folder."""
    given_folder: str | Path
    """The `default_root_dir` that it was made with."""
    made_loggers: Sequence[Logger] = ()
    """Its loggers as it was made: a logger that was set later stays."""
    loggers_in: Callable[[Path], Loggers]
    """Returns its loggers for a run's folder."""
    _folder: str | None = None
    """The one that a fit took in the place of the Trainer's."""
    _has_fit = False

    @property
    def default_root_dir(self) -> str:
        """Returns the run's folder."""
        return self._folder or super().default_root_dir

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: TRAIN_DATALOADERS | LightningDataModule | None = None,
        val_dataloaders: EVAL_DATALOADERS | None = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        refuse_other_lightning(model)
        if not self.keeps_records or self.fast_dev_run:
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)
            return
        if not self.configuration:
            self._take_folder(ckpt_path)
        runs, folder = _RUNS.setdefault(_resolved(self.given_folder), []), _resolved(self.default_root_dir)
        is_new = folder not in runs
        runs[:] = [*(run for run in runs if run != folder), folder]  # now: a fit within this one takes another folder
        try:
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)
            self._has_fit = True
            if (saved := checkpoints_of(self)) and saved.store:  # what was written at the very end, too
                saved.store.send()
        finally:
            self._has_fit |= self.global_step > 0
            if is_new and not self._has_fit:  # one that has failed before its first step leaves nothing
                runs.remove(folder)

    fit.__doc__ = pl.Trainer.fit.__doc__

    def _take_folder(self, ckpt_path: str | Path | None) -> None:
        """Takes the folder of the run that a fit continues, or that of a new one."""
        given = _resolved(self.given_folder)
        runs = _RUNS.get(given, [])
        continued = _resolved(run_of(Path(ckpt_path))) if ckpt_path and ckpt_path not in _OF_THE_NEWEST else None
        if self._has_fit or not runs:
            folder = _resolved(self.default_root_dir)
        elif continued in runs:
            folder = continued
        else:
            folder = runs[-1] if ckpt_path in _OF_THE_NEWEST else given / f"run-{len(runs) + 1}"
        if folder not in runs and runs and self.is_global_zero:
            log.warning(
                "Another Trainer of this process has trained in %s: this run's folder is %s. HINT: give each run a "
                'default_root_dir of its own; fit(ckpt_path="last") continues the newest one.',
                *(runs[-1], folder),
            )
        if folder != _resolved(self.default_root_dir):
            self._move_to(folder)

    def _move_to(self, folder: Path) -> None:
        """Takes another folder. Nothing is set up yet; the user's own loggers stay."""
        self._folder = str(folder)
        for watchdog in callbacks_of(self, Watchdog):
            watchdog.life = folder / LIFE if watchdog.life else None
        if [*self.loggers] != self.made_loggers:
            return
        loggers = self.loggers_in(folder)
        self.loggers = [*loggers] if isinstance(loggers, Iterable) else [loggers] if isinstance(loggers, Logger) else []
        self.made_loggers = [*self.loggers]
