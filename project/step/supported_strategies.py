"""Refuses by name Lightning's strategies that can't train here."""

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy, ParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from project.errors import UserError


def refuse_ranks_in_process(strategy: Strategy, why: str) -> None:
    """Refuses strategies that start the ranks as parts of this process, as ddp_spawn, ddp_fork and ddp_notebook do.

    Raises:
        UserError: names the reason.
    """
    if isinstance(strategy.launcher, _MultiProcessingLauncher):
        raise UserError(
            f"trainer.strategy has this process start the ranks (ddp_spawn, ddp_fork and ddp_notebook do), {why}. HINT: "
            "trainer.strategy=ddp."
        )


def refuse_strategy(trainer: pl.Trainer, launched: bool, saves: bool) -> None:
    """Refuses what fails later, with an error that does not name the strategy.

    Args:
        trainer: is made, and not connected to other ranks yet.
        launched: whether a launcher has started the ranks.
        saves: whether the checkpoints are this project's, which hold whole tensors by the module's own names.
    """
    strategy = trainer.strategy
    if isinstance(strategy, ParallelStrategy) and strategy.local_rank >= (here := len(strategy.parallel_devices or [None])):
        raise UserError(
            f"LOCAL_RANK={strategy.local_rank} is set in the environment, and trainer.devices makes {here} process(es) "
            "on this host. HINT: unset LOCAL_RANK, or set trainer.devices."
        )
    if launched:
        refuse_ranks_in_process(trainer.strategy, "and a launcher has started them already")
    if saves and trainer.world_size > 1 and isinstance(trainer.strategy, FSDPStrategy):
        raise UserError(
            "trainer.strategy=fsdp has no network of which a checkpoint could be made here. HINT: trainer.strategy=sharded "
            "spreads it by torch's newer FSDP2; from Python, FSDPStrategy trains with a ModelCheckpoint of Lightning's."
        )
