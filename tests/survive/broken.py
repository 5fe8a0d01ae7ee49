"""What ends a run in the same way however often it is started."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from project.cluster.place import MEMORY
from project.cluster.processes import children
from project.errors import UserError
from tests.cluster.machine import wait_until
from tests.own import Points, PointsData, Regression


class Broken(Regression):
    """Fails in its third step."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == 2:
            raise RuntimeError("a bug of the user's")
        return super().training_step(batch, batch_idx)


class Refused(Regression):
    """Refuses its setting on rank 1 alone."""

    def setup(self, stage: str) -> None:
        if self.trainer.global_rank == 1:
            raise UserError("That can't work. HINT: another value.")


class Unprepared(Regression):
    """Fails before anything is trained."""

    def setup(self, stage: str) -> None:
        raise RuntimeError("a bug of the user's")


class ReadPoints(Points):
    """Points that lie in a file each."""

    def __init__(self, size: int, root: str) -> None:
        super().__init__(size)
        self.root = root

    def __getitem__(self, index: int) -> dict[str, Any]:
        Path(self.root, f"{index}.bin").read_bytes()
        return super().__getitem__(index)


class Filed(PointsData):
    """Points that lie in the files of a folder, listed in one of them."""

    def __init__(self, root: str, listed: bool, num_workers: int = 0) -> None:
        super().__init__(num_workers=num_workers)
        self.root, self.listed = root, listed

    def setup(self, stage: str) -> None:
        if self.listed:
            Path(self.root, "train.csv").read_text()

    def train_dataloader(self) -> Any:
        return DataLoader(ReadPoints(self.size, self.root), **self.settings)


class AlwaysKilled(Callback):
    """Kills rank 1 in its fourth step, whenever the run is started."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Noted(Regression):
    """Prints a number that it draws, and leaves a file, when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = random.random()
        print(f"a network is made: {self.scale}", flush=True)
        Path(f"made-{os.getpid()}").touch()


class KilledWithSpares(Callback):
    """Kills rank 1 once, in its fourth step, when the next ranks are there, and counts the networks made until then."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1 and not Path("struck").exists():
            wait_until(lambda: len(children(os.getppid())) == 1 + 2 * trainer.world_size, 60, "no spares")
            Path("struck").write_text(str(len(list(Path().glob("made-*")))))
            os.kill(os.getpid(), signal.SIGKILL)


class KilledAfterSignal(Callback):
    """In the sixth step, rank 0 sends SIGTERM to itself or to its supervisor, and rank 1 is killed half a second later, when
    the copy of that step is in memory.
    """

    def __init__(self, to_supervisor: bool) -> None:
        self.to_supervisor, self.sent = to_supervisor, Path("sent")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 5 or (self.sent.exists() and trainer.global_rank == 0):
            return
        if trainer.global_rank == 0:
            self.sent.touch()
            os.kill(os.getppid() if self.to_supervisor else os.getpid(), signal.SIGTERM)
        elif not Path("struck").exists():
            copy = Path(os.environ[MEMORY], "step-000000005.json")
            wait_until(lambda: self.sent.exists() and copy.exists(), 60, "no signal, or no copy")
            time.sleep(0.5)
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)
