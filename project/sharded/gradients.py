"""Gradients of which each rank has a shard: `fully_shard` adds them up in the backward pass."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import cast

from torch import Tensor
from torch.optim import Optimizer

from project.sharded.local_step import clip, on_shards
from project.sharded.shards import total_norm
from project.sharded.strategy import Sharded
from project.step.gradients import Gradients


class ShardedGradients(Gradients):
    """The gradients of a sharded network."""

    strategies = (Sharded,)

    @property
    def why_no_graph(self) -> str | None:  # type: ignore[override]
        return "a sharded network is gathered in between" if cast(Sharded, self.trainer.strategy).is_sharded else None

    def unscale_before_hooks(self, whether: bool) -> None:
        """Does nothing: optimisers of shards are not fused."""

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        return total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])

    def clip_by_norm(self, parameters: list[Tensor], most: float) -> Tensor:
        return clip(parameters, most, self.norm(parameters))

    def update(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        return on_shards(optimizer)
