"""Gradients that are the same to the last bit on any number of ranks: each micro-batch's is a term of an exact sum.

DistributedDataParallel adds up in the order of a ring, and a rank's own micro-batches in their order; on another number of
ranks these are other orders. Here each micro-batch's gradient is rounded to a grid, by itself, and the rest is exact
(train/exact.py). The grid of a parameter follows the largest value that its gradients had in the step before, over all
micro-batches; so it is a function of the run, too, and a checkpoint takes it along.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from project.train.exact import ExactSum

_AT_FIRST = 2.0**-10  # before a step has shown how large a parameter's gradients are; larger ones take a second sum
_MARGIN = 4.0  # so much larger than in the step before is no surprise


class ExactGradients:
    """Of the parameters that learn. `collect` after each backward pass; `finish` after the last one of a step, by all ranks.

    `micro_batches`: of a step, over all ranks; the gradient is the mean over them.
    """

    def __init__(self, module: nn.Module, micro_batches: int, world_size: int) -> None:
        self._named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        self._terms, self._world_size = micro_batches, world_size
        self.largest = {name: _AT_FIRST for name, _ in self._named}
        """By parameter, a power of two: what the grid of this step was made for."""
        self._sums: dict[str, ExactSum] = {}
        self._seen: dict[str, float] = {}

    def state_dict(self) -> dict[str, float]:
        return dict(self.largest)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.largest.update({name: value for name, value in state.items() if name in self.largest})

    def collect(self) -> None:
        """Takes the gradients that a backward pass has left."""
        for name, parameter in self._named:
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            largest = float(gradient.abs().max()) if gradient.numel() else 0.0
            if not math.isfinite(largest):
                self._seen[name] = math.inf
                continue
            self._seen[name] = max(largest, self._seen.get(name, 0.0))
            self._sum(name, gradient).add(gradient, largest)

    def _sum(self, name: str, like: Tensor) -> ExactSum:
        if name not in self._sums:
            self._sums[name] = ExactSum(like.shape, self.largest[name], self._terms, like.device)
        return self._sums[name]

    def finish(self) -> None:
        """Leaves the mean over all micro-batches of all ranks as the gradient of each parameter."""
        seen = torch.tensor([self._seen.get(name, -1.0) for name, _ in self._named], dtype=torch.float64)
        levels = torch.tensor([float(self._levels(name)) for name, _ in self._named], dtype=torch.float64)
        both = torch.cat([seen, levels])
        if self._world_size > 1:
            dist.all_reduce(both, dist.ReduceOp.MAX)
        for (name, parameter), largest, count in zip(self._named, *(one.tolist() for one in both.view(2, -1)), strict=True):
            if largest < 0:
                continue  # no micro-batch of any rank has come to it
            if not math.isfinite(largest):
                parameter.grad = torch.full_like(parameter, math.inf)
                continue
            total = self._sum(name, parameter)
            for fold in total.up_to(int(count)):
                if self._world_size > 1:
                    dist.all_reduce(fold)
            parameter.grad = total.total().mul_(1 / self._terms).to(parameter.dtype)
            if largest:
                _, exponent = math.frexp(largest * _MARGIN)
                self.largest[name] = math.ldexp(1.0, exponent)
        self._sums, self._seen = {}, {}

    def _levels(self, name: str) -> int:
        return len(self._sums[name].folds) if name in self._sums else 0
