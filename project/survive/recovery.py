"""Keeps what ranks need that are started again; `launch/supervisor.py` starts them."""

import logging
import os
import secrets
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from project.checkpoints.callback import checkpoints_of
from project.checkpoints.memory import MemoryWriter, memory_folder
from project.cluster.interfaces import own_address
from project.errors import UserError
from project.launch.fork_server import tell_supervisor
from project.launch.supervisor import PORT
from project.typed import typed

log = logging.getLogger(__name__)


class Recovery(Callback):
    """Starts the ranks of this host again when one of them is lost, and keeps the run's state in memory for that.

    Args:
        restarts: how often the ranks are started again; with 0 a lost rank ends the run. For fits that plain Python starts on
            one host; other launchers have restarts of their own.
        every_n_steps: keep the run's state in memory every so many optimiser steps; None leaves it to the checkpoints on disk.
    """

    def __init__(self, restarts: int = 0, every_n_steps: int | None = 10) -> None:
        if restarts < 0:
            raise UserError(f"recover.restarts is 0 at least, and not {restarts}.")
        if every_n_steps is not None and every_n_steps < 1:
            raise UserError(f"recover.every_n_steps is 1 at least, and not {every_n_steps}. HINT: null for never.")
        self.restarts, self.every_n_steps = restarts, every_n_steps
        self.life: Path | None = None
        """The file in which the supervisor records how the run ended, where rank 0 can't."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder, checkpoints = memory_folder(), checkpoints_of(trainer)
        if stage != "fit" or folder is None or typed(trainer).fast_dev_run:
            return
        if trainer.is_global_zero and self.life is not None:
            tell_supervisor(life=str(self.life.absolute()))
        if trainer.world_size > 1 and PORT in os.environ:  # each rank has a supervisor of its own: they get to know each other
            first = own_address(), int(os.environ[PORT]), secrets.token_hex(32)
            address, port, secret = trainer.strategy.broadcast(first)
            tell_supervisor(address=address, port=port, secret=secret, ranks=trainer.world_size)
        if checkpoints is not None and self.every_n_steps is not None:
            checkpoints.keep_in_memory(MemoryWriter(folder, trainer), self.every_n_steps)
