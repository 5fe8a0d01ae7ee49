"""Somebody who makes a run's folder hostile while it trains."""

import hashlib
from contextlib import suppress
from pathlib import Path

from lightning import Callback

from tests.hostile import cases, harm


class Vandal(Callback):
    """On rank 0, before each step, does to the run's folder what some cases say, all of them by the end.

    Args:
        steps: of the training; 0 does nothing.
    """

    def __init__(self, steps: int = 0) -> None:
        self._steps = steps

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank or trainer.global_step >= self._steps:
            return
        # A checkpoint's own values belong to who resumes it.
        wanted = [case for case in cases(8 * self._steps) if (case.file, case.way) != ("checkpoint", "another value")]
        for case in wanted[trainer.global_step :: self._steps]:
            with suppress(OSError, ValueError, LookupError, RecursionError):  # what is there has been harmed already
                harm(Path(trainer.default_root_dir), case, Path("outside").absolute())

    def on_train_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            state = b"".join(tensor.numpy().tobytes() for tensor in pl_module.state_dict().values())
            Path(f"weights-{self._steps}.txt").write_text(hashlib.sha256(state).hexdigest())
