"""Data ranks have different data: each rank is one, or, where several ranks share the layers of a network, each group of these.

Ranks of a group see the same micro-batches and compute the same losses. So what is dealt out, counted, added up or listed goes
by data ranks; a mean over all ranks is the same either way. What is about processes (who meets, who writes) goes by ranks.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.distributed import default_pg_timeout
from torchmetrics import Metric

from project.step.ddp import all_gather_objects

T = TypeVar("T")


@dataclass(frozen=True)
class DataRanks:
    """The data rank that this rank belongs to, and how many there are."""

    rank: int
    count: int
    group: dist.ProcessGroup | None = None
    """torch's, of one rank of each; None: of all ranks, or of none that are connected yet."""
    shared_by: int = 1
    """Ranks that are one data rank: neighbours."""

    def all_gather_objects(self, value: T) -> list[T]:
        """Returns the objects of all data ranks, by data rank. Called by all ranks together."""
        return all_gather_objects(value, self.count, self.group)

    def replica_groups(self) -> list[list[int]]:
        """Returns the ranks of each group in which each data rank is once."""
        return [[data_rank * self.shared_by + at for data_rank in range(self.count)] for at in range(self.shared_by)]


class ByDataRanks(DDPStrategy):
    """A strategy of which several neighbouring ranks may be one data rank.

    Args:
        shared_by: so many. On one rank there are no neighbours.
        timeout: as in DDPStrategy.
        process_group_backend: as in DDPStrategy.
    """

    def __init__(
        self,
        shared_by: int = 1,
        timeout: timedelta | None = default_pg_timeout,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(timeout=timeout, process_group_backend=process_group_backend)
        self.shared_by, self.patience = shared_by, timeout
        """`patience`: how long the ranks wait for each other."""
        self._group: dist.ProcessGroup | None = None
        self._met: list[tuple[Metric | nn.SyncBatchNorm, dist.ProcessGroup | None]] = []

    @property
    def data_ranks(self) -> DataRanks:
        """Returns the data ranks as seen from this rank."""
        share = self.shared_by if self.world_size > 1 else 1
        return DataRanks(self.global_rank // share, self.world_size // share, self._group, share)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Returns the data ranks under Lightning's names."""
        here = self.data_ranks
        return {"num_replicas": here.count, "rank": here.rank}

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.data_ranks.shared_by > 1 and self._group is None:
            own, _ = dist.new_subgroups_by_enumeration(self.data_ranks.replica_groups(), timeout=self.patience)
            self._group = cast(dist.ProcessGroup, own)  # each rank is in one

    def reduce(
        self, tensor: Tensor, group: dist.ProcessGroup | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        """Reduces what is logged over the data ranks: each sample counts once."""
        return super().reduce(tensor, group or self._group, reduce_op)

    def all_gather(self, tensor: Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False) -> Tensor:
        """Gathers for the module what the data ranks have computed from their data."""
        return super().all_gather(tensor, group or self._group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decides over all ranks, which Lightning counts in what `reduce` gives."""
        if self._group is None:
            return super().reduce_boolean_decision(decision, all)
        answers = all_gather_objects(bool(decision), self.world_size)
        return (False not in answers) if all else (True in answers)

    def reduce_over_data_ranks(self, module: nn.Module) -> None:
        """Makes modules that reduce over all ranks by themselves (torchmetrics, SyncBatchNorm) reduce over data ranks, while
        this strategy is set up.
        """
        for part in module.modules():
            if isinstance(part, (Metric, nn.SyncBatchNorm)) and part.process_group in (None, dist.group.WORLD):
                self._met.append((part, part.process_group))
                part.process_group = self._group

    def teardown(self) -> None:
        for part, before in self._met:
            part.process_group = before
        self._met.clear()
        super().teardown()


def shared_by(strategy: Strategy) -> int:
    """Returns how many ranks will be one data rank, where there are several."""
    return strategy.shared_by if isinstance(strategy, ByDataRanks) else 1


def data_ranks(trainer: Trainer) -> DataRanks:
    """Returns the data ranks of the run, as seen from this rank."""
    strategy = trainer.strategy
    if isinstance(strategy, ByDataRanks):
        return strategy.data_ranks
    return DataRanks(trainer.global_rank, trainer.world_size)
