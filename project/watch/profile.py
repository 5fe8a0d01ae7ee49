"""Profiles of a few steps, at a step that the YAML names, or when a file in the run's folder asks for one: a trace for
Perfetto, and a table, so that most people need not open it.

Nothing of this is among a step's hooks until it is wanted. `python -m project profile RUN` puts the file there.
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from project.errors import UserError
from project.step.epoch_loop import add_callback
from project.untrusted import read_text, shortened
from project.watch.asked import FILE, FOLDER, Asked
from project.watch.recorded import ran_out, write_held
from project.watch.recording import Recording, StepRanges

log = logging.getLogger(__name__)

_LONGEST = 10_000  # bytes of a request
_PAUSE = 1.0  # seconds from one look at the folder to the next


class Profile(Callback):
    """Records a few steps on request.

    Args:
        step: the first recorded step; None waits for `python -m project profile RUN`.
        steps: the number of recorded steps.
        ranks: the recorded ranks; null is all of them.
        memory: also record what each operator allocates, and what occupies memory after these steps.
        nvtx: names the parts of every step for Nsight Systems; needs a GPU.
    """

    def __init__(
        self,
        step: int | None = None,
        steps: int = 5,
        ranks: Sequence[int] | None = (0,),
        memory: bool = False,
        nvtx: bool = False,
    ) -> None:
        if step is not None and step < 1:
            raise UserError(f"profile.step is the number of a step, from 1 on, not {step}.")
        self._requested = Asked(steps, None if ranks is None else list(ranks), memory)
        self.step, self.nvtx = step, nvtx
        self._recording: Recording | None = None
        self._folder = Path()
        self._look_at, self._file_exists = 0.0, False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._recording = None
        on_gpu = trainer.strategy.root_device.type == "cuda"
        # Also for what the memory holds when it runs out. The run's name is known to rank 0 alone.
        self._folder = Path(trainer.strategy.broadcast(str(trainer.default_root_dir))) / FOLDER
        if self.nvtx:
            if not on_gpu:
                raise UserError(
                    "profile.nvtx names the parts of a step for Nsight Systems, which needs a GPU. HINT: leave it out."
                )
            add_callback(trainer, StepRanges(nvtx=True))
        if self.step is None:
            return
        if self.step > trainer.global_step:
            self._begin(trainer, self._requested, self.step)
        elif trainer.is_global_zero:
            log.warning("profile.step=%d is behind: the run goes on after step %d.", self.step, trainer.global_step)

    def is_wanted(self, trainer: Trainer) -> bool:
        """Returns whether rank 0 has found the file. It is called between steps."""
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _PAUSE
            file = Path(trainer.default_root_dir) / FILE
            free = trainer.is_global_zero and (self._recording is None or self._recording.over)
            self._file_exists = free and os.path.lexists(file) and (file.is_symlink() or not file.is_dir())
        return self._file_exists

    def begin_on_all_ranks(self, trainer: Trainer, group: dist.ProcessGroup | None) -> None:
        """Starts the recording that a file asks for, on all ranks before the same step."""
        requests: list[Asked | None] = [self._take(trainer) if trainer.is_global_zero else None]
        if group is not None:
            dist.broadcast_object_list(requests, src=0, group=group)
        self._file_exists = False
        if requests[0] is not None:
            self._begin(trainer, requests[0], trainer.global_step + 2)  # the one before it warms up

    def _take(self, trainer: Trainer) -> Asked | None:
        file = Path(trainer.default_root_dir) / FILE
        try:
            try:
                text = read_text(file, _LONGEST, follow=False)
            finally:
                file.unlink()
            return Asked.of(text)
        except (OSError, ValueError) as error:
            log.warning("%s can't be answered: %s", file, shortened(error))
            return None

    def _begin(self, trainer: Trainer, request: Asked, first: int) -> None:
        known = {*range(trainer.world_size)}
        wanted = known if request.ranks is None else {*request.ranks}
        if (missing := sorted(wanted - known)) and trainer.is_global_zero:
            log.warning("There is no rank %s to profile, but %d ranks.", ", ".join(map(str, missing)), len(known))
        if ranks := sorted(wanted & known):
            self._recording = Recording(first, request.steps, ranks, request.memory, self._folder)
            add_callback(trainer, self._recording)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes what the memory holds when it has run out."""
        if not ran_out(exception):
            return
        stem = self._folder / f"out-of-memory-step-{trainer.global_step + 1:09d}-rank{trainer.global_rank}"
        try:
            log.error("Memory has run out. What it holds: %s", write_held(trainer, pl_module, stem))
        except Exception as error:  # the one that ends the run is the one to be told
            log.debug("What the memory holds can't be written: %s", error)
