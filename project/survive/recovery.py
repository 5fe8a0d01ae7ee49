"""Keeps what ranks need that are started again; `launch/supervisor.py` starts them."""

import logging
import os
import secrets
from typing import Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from project.checkpoints.callback import checkpoints_of
from project.checkpoints.in_memory import CopyInterval, MemoryWriter
from project.checkpoints.reading import memory_folder
from project.checkpoints.writing import clean_up
from project.cluster.interfaces import own_address
from project.cluster.place import ATTEMPT, restarts, shared_memory
from project.errors import UserError
from project.launch.fork_server import tell_supervisor
from project.launch.losses import STRIKES
from project.launch.nodes import Nodes
from project.launch.supervisor import PORT
from project.step.ddp import all_gather_objects
from project.survive.hang.watchdog import Watchdog
from project.typed import callbacks_of, typed

log = logging.getLogger(__name__)


class Recovery(Callback):
    """Starts the ranks of this host again when one of them is lost, and keeps the run's state in memory for that.

    Args:
        restarts: how often the ranks are started again; with 0 a lost rank ends the run. Under plain Python,
            torchrun, srun and Ray.
        every_n_steps: optimiser steps between two copies of the run's state in memory; 'auto' makes one when the last has cost
            less than 1 % of the time since then: after each step, where steps are long. None leaves it to the disk.
        strikes: don't use a host again that has lost ranks so many times within an hour, where the engine can do without it
            (scripts/launch.sh with NNODES=MIN:MAX, Slurm's requeue, Ray); the log names others.
    """

    def __init__(self, restarts: int = 0, every_n_steps: int | Literal["auto"] | None = "auto", strikes: int = STRIKES) -> None:
        if restarts < 0:
            raise UserError(f"recover.restarts is 0 at least, and not {restarts}.")
        if every_n_steps not in ("auto", None) and not (isinstance(every_n_steps, int) and every_n_steps >= 1):
            raise UserError(f"recover.every_n_steps is 1 at least, and not {every_n_steps}. HINT: null for never.")
        if strikes < 1:
            raise UserError(f"recover.strikes is 1 at least, and not {strikes}.")
        self.restarts, self.every_n_steps = restarts, every_n_steps

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or typed(trainer).fast_dev_run:
            return
        if ATTEMPT not in os.environ:
            if self.restarts:
                log.warning(
                    "recover.restarts=%d: no supervisor has started this rank, so it is not started again.", self.restarts
                )
            return
        lives = [watchdog.life for watchdog in callbacks_of(trainer, Watchdog) if watchdog.life]
        if trainer.is_global_zero and lives:  # in which the supervisor records how the run ended, where rank 0 can't
            tell_supervisor(life=str(lives[0].absolute()))
        if trainer.world_size > 1 and PORT in os.environ:  # each rank has a supervisor of its own: they get to know each other
            own = own_address() if trainer.num_nodes > 1 else "127.0.0.1"  # where it listens
            first = own, int(os.environ[PORT]), secrets.token_hex(32)
            address, port, secret = trainer.strategy.broadcast(first)
            tell_supervisor(address=address, port=port, secret=secret, ranks=trainer.world_size)
        folders = all_gather_objects(memory_folder(), trainer.world_size)
        folder, checkpoints = folders[trainer.global_rank - trainer.local_rank], checkpoints_of(trainer)
        if checkpoints is None or self.every_n_steps is None:
            return
        if folder is None or None in folders:
            if trainer.is_global_zero:
                log.warning("%s can't be written: ranks that restart resume from the disk.", shared_memory())
            return
        if trainer.local_rank == 0:
            clean_up(folder)
        can_lose_host = Nodes.of_environment(trainer.world_size).least > 0
        writer = MemoryWriter(folder, trainer, can_lose_host)
        interval = CopyInterval(None if self.every_n_steps == "auto" else self.every_n_steps)
        checkpoints.keep_in_memory(writer, interval, replaces_ranks=restarts() > 0)
