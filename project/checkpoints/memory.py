"""Keeps the run's newest states in memory, in a folder that outlives the ranks: a lost rank costs a few steps, and no disk.

They are checkpoints like those on the disk, written, verified and chosen by the same code.
"""

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lightning.pytorch import Trainer

from project.checkpoints.reading import Manifest, checkpoints_in, newest_good, step_of
from project.checkpoints.writing import FileWriter, ShardWriters, cause, remove
from project.cluster.place import MEMORY, host
from project.sharded.shards import Split
from project.sharded.strategy import Sharded

log = logging.getLogger(__name__)

_KEPT = 2


def memory_folder() -> Path | None:
    """Returns the folder in memory of a supervised run."""
    return Path(os.environ[MEMORY]) if MEMORY in os.environ else None


def newest_in_memory(after: Path | None) -> tuple[Path, Manifest] | None:
    """Returns the newest state in memory that is whole, where it is of a later step than a checkpoint on the disk."""
    folder = memory_folder()
    newest = newest_good(folder, complete=True) if folder and checkpoints_in(folder) else None
    return newest if newest and (after is None or step_of(newest[0]) > step_of(after)) else None


class MemoryWriter:
    """Writes the run's states into memory, beside the training."""

    def __init__(self, folder: Path, trainer: Trainer) -> None:
        self._folder = folder
        self._files = FileWriter(read_back=False)
        self._shards: ShardWriters | None = None
        if isinstance(trainer.strategy, Sharded) and trainer.strategy.is_sharded:
            self._shards = ShardWriters(host())
            self._shards.connect(trainer.strategy.patience)
        self._writes = trainer.is_global_zero or self._shards is not None
        self._thread = ThreadPoolExecutor(1, "memory")
        self._pending: Future[None] | None = None

    def save(self, step: int, own: Split, manifest: Manifest) -> None:
        """Begins to write a state, when the one before has been written."""
        if self._pending is not None:
            self._pending.result()
        if self._writes:
            self._pending = self._thread.submit(self._write, step, own, manifest)

    def close(self) -> None:
        """Waits, and ends the thread."""
        self._thread.shutdown()

    def _write(self, step: int, own: Split, manifest: Manifest) -> None:
        """Runs in the thread: writes a state and removes older ones. A failure is reported, and training continues."""
        try:
            (self._shards or self._files).write(self._folder / f"step-{step:09d}.ckpt", own, manifest)
            if manifest:  # rank 0's
                for path in checkpoints_in(self._folder)[:-_KEPT]:
                    remove(path)
        except Exception as error:
            log.warning("The state of step %d is not kept in memory: %s. Training continues.", step, cause(error))
