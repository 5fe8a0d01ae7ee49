"""Reads a checkpoint's files beside the start of a run on several hosts.

The other hosts wait for rank 0 for `trainer.join_timeout` seconds, and to compare the checksums of a large checkpoint can take
longer than that. So rank 0 looks at its size alone before the ranks meet, and ends its reading before anything is loaded.
"""

import logging
from multiprocessing.pool import ThreadPool
from pathlib import Path

from lightning import Callback, LightningModule, Trainer

from project.checkpoints.files import read_manifest, set_aside_as_bad
from project.errors import TRY_AGAIN

log = logging.getLogger(__name__)


class Verification(Callback):
    """Ends a run whose checkpoint turns out to be damaged: the same command then resumes from the one before it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = ThreadPool(1)  # of daemons: a process that ends does not wait until a large file has been read
        self._manifest = self._reader.apply_async(read_manifest, (path,))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        try:
            self._manifest.get()
        except (ValueError, OSError) as error:
            set_aside_as_bad(self.path, error)
            log.error("The same command resumes from the checkpoint before it.")
            raise SystemExit(TRY_AGAIN) from None
        self._reader.terminate()  # who has threads must not fork
