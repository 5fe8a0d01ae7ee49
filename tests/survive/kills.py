"""A run that is killed in many places, for test_sharded_kills.py to plug in by class_path."""

import io
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from project.checkpoints import files
from project.checkpoints import shard_writers as together
from project.checkpoints.callback import Checkpoints

PLACES = ("step", "accumulation", "validation", "write", "named")


class Kill(Callback):
    """Kills this rank, or all of them, as soon as a place is reached, and leaves 'killed'; leaves the step that the run began
    with in 'began', and the steps whose checkpoints the run takes for finished in 'saved'.

    Args:
        where: before a step ('step'), in a later micro-batch of it ('accumulation'), in the validation after it ('validation'),
            when half of a file of a checkpoint is written, of this step or a later one ('write'), or when its manifest is there
            and it has not got its name ('named'); '': nowhere.
        step: which.
        rank: who strikes.
        all: whom.
    """

    def __init__(self, where: str = "", step: int = 0, rank: int = 0, all: bool = False) -> None:
        self.where, self.step, self.rank, self.all = where, step, rank, all

    def _strike(self, trainer: Trainer) -> None:
        if trainer.global_rank != self.rank:
            return
        Path("killed").write_text(str(sum(os.times()[:2])))
        others = [int(one.name.partition("-")[2]) for one in Path().glob("rank-*")] if self.all else []
        for pid in (*(one for one in others if one != os.getpid()), os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        Path(f"rank-{os.getpid()}").touch()
        trainer.strategy.barrier()
        note = Checkpoints._update_last_and_best

        def noted(checkpoints: Checkpoints, path: Path, manifest: dict[str, Any]) -> None:
            note(checkpoints, path, manifest)
            with Path("saved").open("a") as file:
                file.write(f"{manifest['position']['global_step']}\n")

        Checkpoints._update_last_and_best = noted  # type: ignore[method-assign]
        if self.where == "write":
            save = torch.save

            def half(value: Any, file: Any, **how: Any) -> None:
                if not isinstance(file, io.BytesIO) and not how and trainer.global_step >= self.step:
                    file.write(b"half a checkpoint")
                    file.flush()
                    self._strike(trainer)
                save(value, file, **how)

            torch.save = half
        if self.where == "named":
            write_manifest = files.write_manifest

            def written(path: Path, manifest: dict[str, Any]) -> None:
                write_manifest(path, manifest)
                if manifest["position"]["global_step"] >= self.step:
                    self._strike(trainer)

            files.write_manifest = together.write_manifest = written

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 0:
            Path("began").write_text(str(trainer.global_step))
        trainer.strategy.barrier()  # another rank may strike in the first step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        number = batch_idx % trainer.accumulate_grad_batches
        if trainer.global_step == self.step and self.where == {0: "step", 2: "accumulation"}.get(number):
            self._strike(trainer)

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if not trainer.sanity_checking and trainer.global_step == self.step and self.where == "validation":
            self._strike(trainer)
