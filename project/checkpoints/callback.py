"""Decides when a checkpoint is saved, what it holds, and which are kept; `checkpoints/writing.py` writes it to the disk."""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from project.checkpoints.in_memory import CopyInterval, MemoryWriter
from project.checkpoints.reading import (
    Manifest,
    checkpoints_in,
    memory_folder,
    new_folder,
    same_step,
    whole_manifest,
    written_in,
)
from project.checkpoints.store import Store
from project.checkpoints.writing import (
    FileWriter,
    Lost,
    ShardWriters,
    cause,
    clean_up,
    remove,
    shard_writers,
)
from project.cluster.place import image
from project.errors import UserError
from project.sharded.shards import Split, split
from project.step.measurements import Flushes, TakesMeasurements, measurement_loggers
from project.step.monitored import chosen_metric, is_better
from project.step.position import out_of_time, position, stopped_within_epoch
from project.typed import callbacks_of, typed

log = logging.getLogger(__name__)


Record = tuple[Split, Manifest]
"""What this rank writes: a checkpoint, or its slices of one; and the manifest, which is rank 0's."""


class SaveFirst(Callback):
    """Runs before all other callbacks, and copies or saves the run's state before their hooks change it."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if checkpoints := checkpoints_of(trainer):
            checkpoints.copy_before_validation(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if checkpoints := checkpoints_of(trainer):
            checkpoints.save_before_epoch_end(trainer)


def checkpoints_of(trainer: Trainer) -> "Checkpoints | None":
    return next(iter(callbacks_of(trainer, Checkpoints)), None)


def _validation_may_change_state(trainer: Trainer, module: LightningModule) -> bool:
    """Returns whether what is not this project's has a hook at the start of a validation: it may exchange the weights."""
    owners: list[tuple[object, type]] = [(callback, Callback) for callback in typed(trainer).callbacks]
    owners.append((module, LightningModule))
    return any(
        is_overridden(hook, owner, kind)
        for owner, kind in owners
        if not type(owner).__module__.startswith("project.")
        for hook in ("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start")
    )


class Checkpoints(Checkpoint):
    """Saves the run every so many steps and minutes, after each validation, at the end, and when it is stopped.

    A thread writes one checkpoint at a time, from a copy in main memory: the peak is one more model and optimiser state there,
    on rank 0 or, of a sharded network, by ranks. A disk that is full or gone is reported and tried again; training continues.

    Args:
        every_n_steps: optimiser steps between two saves; None saves by minutes alone.
        every_n_minutes: minutes between two saves.
        keep_last: number of newest checkpoints to keep.
        monitor: the metric by which the best checkpoint is also kept; 'auto' is the highest val/acc or val_acc, else the lowest
            val/loss or val_loss.
        mode: 'max' if more of the metric is better, 'min' if less.
        copy_to: a store (s3://BUCKET/FOLDER, or whatever fsspec knows) or a folder on another disk, into which the run's folder
            is copied beside the training; a host that lacks the run's newest checkpoint brings it from there.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_n_minutes: float = 10.0,
        keep_last: int = 2,
        monitor: str | None = "auto",
        mode: str = "max",
        copy_to: str | None = None,
    ) -> None:
        if not every_n_minutes > 0:
            raise UserError(f"checkpoints.every_n_minutes is more than 0, and not {every_n_minutes}. HINT: .inf for never.")
        if keep_last < 1:
            raise UserError(f"checkpoints.keep_last is 1 at least, and not {keep_last}.")
        if every_n_steps is not None and every_n_steps < 1:
            raise UserError(f"checkpoints.every_n_steps is 1 at least, and not {every_n_steps}. HINT: null for never.")
        if mode not in ("min", "max"):
            raise UserError(f"checkpoints.mode is 'min' or 'max', and not {mode!r}.")
        self.every_n_steps, self.every_n_minutes, self.keep_last = every_n_steps, every_n_minutes, keep_last
        self.monitor, self.mode, self.copy_to = monitor, mode, copy_to
        self.store: Store | None = None
        self.before_save: list[Callable[[Trainer], None]] = []  # called before each save
        self.last: Path | None = None
        self.best: tuple[float, Path] | None = None
        self._best_score: float | None = None
        self._current_score: float | None = None
        self.failed: str | None = None  # why the last one could not be written
        self._reported = ""  # of a failure
        self.seconds: float | None = None  # that the last one took
        self.by_default = False
        """Whether the Trainer added it: it is removed if the module's `configure_callbacks` returns a checkpoint callback."""
        self._shared_best_path = ""
        self._measurements: dict[str, float] = {}  # for the loggers
        self._folder = Path()
        self._validated = False
        self._saved_at = (-1, False)
        self._began_at = 0  # the step
        self._saved_time = time.monotonic()
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._before_validation: Record | None = None
        self._ended_at: int | None = None
        self._file_writer = FileWriter()
        self._shard_writers: ShardWriters | None = None  # where the network is sharded
        self._memory: tuple[MemoryWriter, CopyInterval] | None = None
        self._replaces_ranks = False
        self._in_memory_at = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks = typed(trainer).callbacks
        if self.by_default and any(isinstance(callback, Checkpoint) and callback is not self for callback in callbacks):
            typed(trainer).callbacks = [callback for callback in callbacks if callback is not self]
            return
        self._folder = Path(trainer.default_root_dir) / "checkpoints"
        self._file_writer = FileWriter(typed(trainer).resuming.trusts_checkpoints)
        self._shard_writers = shard_writers(trainer) if stage == "fit" else None
        if self.copy_to and trainer.is_global_zero and stage == "fit" and not typed(trainer).fast_dev_run:
            self.store = Store(self.copy_to, self._folder.parent)
            self.store.claim()
        if trainer.is_global_zero and stage == "fit" and self._folder.is_dir():
            clean_up(self._folder)
            for path in checkpoints_in(self._folder):
                if manifest := whole_manifest(path):
                    self._update_last_and_best(path, manifest)
                    self._add_score(manifest.get("metrics", {}))
            in_memory = memory_folder()  # where the last validation may be that of a checkpoint which was not finished
            for path in checkpoints_in(in_memory) if in_memory else ():
                self._add_score((whole_manifest(path) or {}).get("metrics", {}))
        if trainer.world_size > 1 and stage == "fit":  # which may have nothing to do
            known = self.best_model_path, self._best_score, self._current_score
            self._shared_best_path, self._best_score, self._current_score = trainer.strategy.broadcast(known)

    def _put_other_run_aside(self) -> None:
        """Moves checkpoints into a folder of their own: another run wrote them, which this one does not continue."""
        aside = new_folder(self._folder.with_name(f"checkpoints-before-{datetime.now():%Y%m%d-%H%M%S}"))
        for path in written_in(self._folder):
            path.rename(aside / path.name)
        log.warning(
            "%s had checkpoints of another run, which lie in %s now. HINT: each run needs a default_root_dir of its own; "
            'fit(ckpt_path="last") resumes one.',
            *(self._folder.parent, aside),
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        named = bool(typed(trainer).configuration)  # a run of the command line, which knows whose folder it is
        if trainer.is_global_zero and not trainer.global_step and not named and checkpoints_in(self._folder):
            self._put_other_run_aside()
        self._began_at = self._in_memory_at = trainer.global_step
        if not trainer.global_step:  # what lies in the folder, or was saved for another Trainer, is another run's
            if not named:
                self.last, self.best, self._shared_best_path = None, None, ""
            self._best_score = self._current_score = None
        if not (self._replaces_ranks and trainer.global_step):
            # Now, and not when the run has been lost: could it resume from what would be saved?
            resuming = typed(trainer).resuming
            resuming.check_readable(resuming.dump_checkpoint(weights_only=False))
        self._saved_time = time.monotonic()
        self._saved_at = (trainer.global_step, False)

    @property
    def overdue(self) -> bool:
        """Returns whether a save is due by this process's clock. Clocks differ: the ranks must agree before they save."""
        return time.monotonic() - self._saved_time > 60 * self.every_n_minutes

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = trainer.state.fn == "fit" and not trainer.sanity_checking

    def _add_score(self, metrics: Mapping[str, float | Tensor]) -> None:
        """Notes the metric's value, on each rank: what is read does not depend on when the disk has taken the checkpoint."""
        score, mode = self._score_in(metrics)
        if score is not None:
            self._current_score = score
            if is_better(score, self._best_score, mode):
                self._best_score = score

    def _score_in(self, metrics: Mapping[str, float | Tensor]) -> tuple[float | None, str]:
        """Returns the value of the monitored metric, where it is known, and 'max' or 'min', whichever is better."""
        name, mode = chosen_metric(self.monitor, self.mode, metrics)
        return (float(metrics[name]) if name is not None and name in metrics else None), mode

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step = trainer.global_step
        self._log_cost(trainer)
        if self.store:
            self.store.check_owner()
        if self._validated or (self.every_n_steps and step and step % self.every_n_steps == 0):
            self.save(trainer)
        if self.interval and self.interval.steps and step - self._in_memory_at >= self.interval.steps:
            self.copy_to_memory(trainer)

    def copy_to_memory(self, trainer: Trainer) -> None:
        """Copies the run's state into memory, between two steps. Called by all ranks at the same position."""
        step = trainer.global_step
        if self._memory is None or step == self._in_memory_at or position(trainer).validation_due:
            return
        self._in_memory_at = step
        writer, interval = self._memory
        if not writer.is_busy():
            with interval.measured(trainer.strategy.root_device):
                for prepare in self.before_save:
                    prepare(trainer)
                writer.save(step, *self._state(trainer, finished=False), self._began_at)

    def keep_in_memory(self, writer: MemoryWriter, interval: CopyInterval, replaces_ranks: bool) -> None:
        """Also writes the run's state into memory from now on. `replaces_ranks`: these ranks were started in the place of
        others, and have just read such a state, or a checkpoint.
        """
        self._memory, self._replaces_ranks = (writer, interval), replaces_ranks

    @property
    def interval(self) -> CopyInterval | None:
        """Returns the interval of the copies in memory; None where none are made."""
        return self._memory[1] if self._memory else None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._shard_writers is not None:
            self.wait()  # whether it has failed is known to all ranks alike when all have written
        if self._has_failed(trainer) or self._ended_at != trainer.global_step:
            self.save(trainer, finished=not out_of_time(trainer))
        self.wait()
        if self._has_failed(trainer):  # the last one matters: once more, in case the disk has room again
            self.save(trainer, finished=not out_of_time(trainer))
        self.wait()
        if self.store:
            self.store.send()
            self.store.check_owner()
        if trainer.world_size > 1:  # rank 0 alone knows, and all of them read it
            self._shared_best_path = trainer.strategy.broadcast(self.best_model_path)
        self._log_cost(trainer)

    def _log_cost(self, trainer: Trainer) -> None:
        """Logs the time and size of the last checkpoint, some steps later; loggers that keep checkpoints receive it."""
        measurements, self._measurements = self._measurements, {}
        if measurements:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)  # type: ignore[arg-type]
            for logger in measurement_loggers(trainer):
                logger.log_metrics(measurements, step=trainer.global_step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.wait()
        if self._memory is not None:
            self._memory[0].close()
            self._memory = None
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None

    # Like Lightning's ModelCheckpoint, for loggers and scripts that read it.
    save_top_k, save_last, save_weights_only = 1, True, False

    @property
    def best_model_path(self) -> str:
        """Returns the path of the best checkpoint; '' where there is none."""
        if self._validated:
            log.warning(
                "checkpoint_callback.best_model_path is read before the checkpoint of the last validation is written: it is "
                "the best one of before. HINT: read it in on_fit_end, or after the fit."
            )
        return str(self.best[1]) if self.best else self._shared_best_path or self.last_model_path

    @best_model_path.setter  # by the processes that ddp_spawn started
    def best_model_path(self, path: str) -> None:
        self._shared_best_path = path

    @property
    def last_model_path(self) -> str:
        return str(self.last) if self.last else ""

    @property
    def dirpath(self) -> str | None:
        return None if self._folder == Path() else str(self._folder)

    @property
    def current_score(self) -> torch.Tensor | None:
        return None if self._current_score is None else torch.tensor(self._current_score)

    @property
    def best_model_score(self) -> torch.Tensor | None:
        return None if self._best_score is None else torch.tensor(self._best_score)

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        return {} if self.best is None else {str(self.best[1]): torch.tensor(self.best[0])}

    def copy_before_validation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copies the run's state before others exchange the weights: a run stopped within the validation resumes from here."""
        self._before_validation = None
        if trainer.state.fn == "fit" and not trainer.sanity_checking and _validation_may_change_state(trainer, pl_module):
            self._before_validation = self._copied_state(trainer, finished=False)

    def save_before_epoch_end(self, trainer: Trainer) -> None:
        """Saves a run that was stopped within an epoch before the epoch's end hooks run: a longer run calls them again."""
        if stopped_within_epoch(trainer):
            self.save(trainer, finished=not out_of_time(trainer))
            self._ended_at = trainer.global_step

    # Saving ----------------------------------------------------------------------------------------------------------

    def save(self, trainer: Trainer, finished: bool = False) -> None:
        """Saves the run where it is, between two steps. Called by all ranks at the same position."""
        if typed(trainer).fast_dev_run:
            return  # nothing is to be left of it
        at = position(trainer)
        if self._saved_at == (at.global_step, finished) and not self._validated:
            if self._shard_writers is not None:
                self.wait()
            if not self._has_failed(trainer):
                return
        for prepare in self.before_save:
            prepare(trainer)
        self._add_score(trainer.callback_metrics)
        self._validated = False
        self._saved_at, self._saved_time = (at.global_step, finished), time.monotonic()
        copied_before, self._before_validation = self._before_validation, None
        copy, manifest = copied_before if copied_before and at.validation_due else self._copied_state(trainer, finished)
        if not trainer.is_global_zero and self._shard_writers is None:
            return
        self.wait()
        # '-' sorts before '.': when the validation is over, the checkpoint without it is no longer the newest.
        due = "-validation" if at.validation_due else ""
        path = self._folder / f"step-{at.global_step:09d}{due}.ckpt"
        self._writer = self._writer or ThreadPoolExecutor(1, "checkpoint")
        self._pending = self._writer.submit(self._write, path, copy, manifest)

    def _has_failed(self, trainer: Trainer) -> bool:
        """Returns whether the last checkpoint could not be written, on all ranks alike: all of them take part in the next."""
        if self._shard_writers is not None or trainer.world_size == 1:
            return self.failed is not None
        return bool(trainer.strategy.broadcast(self.failed is not None))

    def _copied_state(self, trainer: Trainer, finished: bool) -> Record:
        """Copies what this rank writes of the run's state into main memory, and makes its manifest. The copy before it is on
        the disk by then, or the memory for two would be needed: it is waited for in any case.
        """
        self.wait()
        own, manifest = self._state(trainer, finished)
        return copy_to_host(own), manifest

    def _state(self, trainer: Trainer, finished: bool) -> Record:
        """Returns what this rank writes of the run's state, and its manifest; the tensors are those that training changes."""
        at = position(trainer)
        own = Split(typed(trainer).resuming.dump_checkpoint(weights_only=False), {})
        if self._shard_writers is not None:
            own = split(own.marked)
        if not trainer.is_global_zero:
            return Split({}, own.slices), {}
        # Where a module steps several optimisers, its steps count for each; `self.log` counts them once.
        first = min(at.global_step, at.logged_steps)
        logged: list[tuple[int, str, float]] = []
        for logger in trainer.loggers:  # what was logged up to here is on the disk no later than the checkpoint
            if isinstance(logger, Flushes):
                logger.flush()
            if isinstance(logger, TakesMeasurements):
                logged += logger.logged_since(first)
        configuration = typed(trainer).configuration
        manifest: Manifest = {"configuration": configuration} if configuration else {}
        manifest |= {
            "position": at.state_dict(),
            "finished": finished,
            "logged": logged,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "world_size": trainer.world_size,
            "versions": _versions(),
            "image": image(),
            "saved": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        return own, manifest

    @property
    def writing(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _write(self, path: Path, own: Split, manifest: Manifest) -> None:
        """Runs in the thread: writes a checkpoint, removes older ones, and records and logs a failure."""
        began = time.monotonic()
        first = self._shard_writers is None or bool(manifest)  # rank 0, who speaks for all
        try:
            path, size = (self._shard_writers or self._file_writer).write(path, own, manifest)
            self.failed, self.seconds = None, time.monotonic() - began
            if first:
                self._measurements = {"run/checkpoint_s": self.seconds, "run/checkpoint_mb": size / 1e6}
                self._update_last_and_best(path, manifest)
                self._prune()
                if self.store:
                    self.store.send_soon()
        except Lost as error:
            self.failed = str(error)
            log.log(logging.WARNING if first else logging.DEBUG, "Checkpoint %s is left unfinished: %s.", path, error)
        except Exception as error:
            self.failed = cause(error)
            newest = f"the newest good one is {self.last}" if self.last else "there is none yet"
            before, self._reported = self._reported, f"{path} could NOT be written: {self.failed}"
            level = logging.ERROR if first and self._reported != before else logging.DEBUG  # the last one is tried again
            log.log(level, "Checkpoint %s. Training continues; %s.", self._reported, newest)

    def _update_last_and_best(self, path: Path, manifest: Manifest) -> None:
        """Makes a checkpoint the last one and, if its metric is better than the best so far, the best one."""
        self.last = path
        score, mode = self._score_in(manifest.get("metrics", {}))
        again = self.best is not None and same_step(self.best[1], path)
        if score is not None and is_better(score, None if again or self.best is None else self.best[0], mode):
            self.best = score, path

    def _prune(self) -> None:
        """Removes all checkpoints but the newest `keep_last`, the last and the best; of the last one's position, all others."""
        paths = checkpoints_in(self._folder)
        newest = [path for path in paths if path == self.last or self.last is None or not same_step(path, self.last)]
        keep = {*newest[-self.keep_last :], self.last, self.best[1] if self.best else None}
        for path in paths:
            if path not in keep:
                remove(path)


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "lightning")}


def copy_to_host(own: Split) -> Split:
    """Returns a copy in main memory. The host waits for the device here: it must hold this step's values, not a later one's."""
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
        return tensor

    apply_to_collection(own, torch.Tensor, copy)
    return deepcopy(own, copies)  # arrays, lists and whatever else a state has: they may change while they are written
