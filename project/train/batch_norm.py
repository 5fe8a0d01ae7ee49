"""Batch norm's running statistics, moved once a step by the mean over all its micro-batches, on whatever ranks they were.

PyTorch moves them at every forward pass, each rank by its own micro-batches, and DDP keeps rank 0's: they would depend on
the number of ranks and on accumulation. Here each layer is given other buffers for the time of a forward pass in training,
which gather the mean over this rank's micro-batches; one small all-reduce, which travels during the backward pass, makes it
the mean over all, and the layer's own momentum is applied to that. Whoever looks at the layer at any other moment (a hook, an
average of the weights, a checkpoint) sees the running statistics, and nothing else.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from project.train.exact import WideSum
from project.train.micro_batch import skipped as is_skipped

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def batch_norms(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """The layers with running statistics, by name."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None:
            yield name, layer


def compiled(module: nn.Module) -> set[nn.Module]:
    """The layers that torch.compile has translated."""
    # What torch.compile wraps is in a class of this name, which has no public place.
    kinds = {one: type(one).__name__ == "OptimizedModule" for one in module.modules()}
    whole = (one for one, wraps in kinds.items() if wraps or one._compiled_call_impl is not None)
    return {layer for one in whole for layer in one.modules()}


class _Layer:
    """A layer, and the buffers that it has while it computes: the mean over the forward passes of this step, on this rank."""

    def __init__(self, norm: _BatchNorm, compiled: bool, passes: Tensor, mean: Tensor, var: Tensor) -> None:
        self.norm, self.compiled, self.passes = norm, compiled, passes
        self._other = {
            "running_mean": mean,
            "running_var": var,
            "num_batches_tracked": None if compiled else passes,
        }
        self._own: dict[str, Tensor | None] = {}
        self._momentum: float | None = None

    def lend(self, number: int) -> None:
        """Gives it the other buffers. A layer that does not train keeps its own, which it computes with."""
        norm = self.norm
        if not norm.training:
            return
        self._own, self._momentum = {name: norm._buffers[name] for name in _BUFFERS}, norm.momentum
        norm._buffers.update(self._other)
        # None is PyTorch's word for the mean over all forward passes; it counts them. A translated layer can't.
        norm.momentum = 1 / (number + 1) if self.compiled else None
        self.passes += self.compiled

    def take_back(self) -> None:
        if self._own:
            self.norm._buffers.update(self._own)
            self.norm.momentum = self._momentum
            self._own = {}

    @property
    def momentum(self) -> float:
        """What its own statistics are moved by: with momentum=None they are the mean over all steps."""
        if self.norm.momentum is not None:
            return self.norm.momentum
        tracked = self.norm.num_batches_tracked
        return 1 / (int(tracked) + 1) if tracked is not None else 0.0


def _running(norm: _BatchNorm) -> list[Tensor]:
    """Its own statistics, which may be other tensors than they were a step ago."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return [norm.running_mean, norm.running_var]


class _Row:
    """Statistics of one type, one beside the other in memory: one operation is enough for all of them."""

    def __init__(self, norms: list[_BatchNorm]) -> None:
        self.norms = norms
        own = [part for norm in norms for part in _running(norm)]
        self.sizes = [part.numel() for part in own]
        self.gathered = own[0].new_zeros(sum(self.sizes))  # in the layers' other buffers
        parts = torch.split(self.gathered, self.sizes)
        self.others = [part.view_as(one) for part, one in zip(parts, own, strict=True)]
        self._own, self._places = own[0].new_zeros(0), [-1] * len(own)

    def own(self) -> Tensor:
        """The layers' own statistics. They are moved there, and once more where somebody has given a layer others since."""
        parts = [part for norm in self.norms for part in _running(norm)]
        if [part.data_ptr() for part in parts] != self._places:
            self._own = torch.cat([part.detach().flatten() for part in parts])
            for part, place in zip(parts, torch.split(self._own, self.sizes), strict=True):
                part.data = place.view_as(part)
            self._places = [part.data_ptr() for part in parts]
        return self._own

    def leave(self) -> None:
        """Each layer's own statistics lie by themselves again."""
        if self._own.numel():
            for part in [part for norm in self.norms for part in _running(norm)]:
                part.data = part.detach().clone()


class StepStatistics(Callback):
    """Keeps the running statistics a function of the step's micro-batches. `num_batches_tracked` counts steps.

    `exact`: to the last bit, on any number of ranks.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self._exact = WideSum(0, 1)
        self._layers: list[_Layer] = []
        self._rows: list[_Row] = []
        self._passes = torch.zeros(0, dtype=torch.int64)  # of each layer; on the host: nobody waits for a device to read it
        self._sizes: list[int] = []
        self._layer_of = torch.zeros(0, dtype=torch.int64)  # for each statistic
        self._number = 0  # of the micro-batch within its step
        self._gathered = 0  # micro-batches that are in the layers' other buffers
        self._sums: Tensor | None = None
        self._arriving: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        kinds: dict[Any, list[_BatchNorm]] = {}
        for _, norm in batch_norms(pl_module):
            kinds.setdefault(_running(norm)[0].dtype, []).append(norm)
        self._rows = [_Row(norms) for norms in kinds.values()]
        translated, norms = compiled(pl_module), [norm for row in self._rows for norm in row.norms]
        others = iter([other for row in self._rows for other in row.others])
        self._passes = torch.zeros(len(norms), dtype=torch.int64)
        self._layers = [
            _Layer(norm, norm in translated, passes, next(others), next(others))
            for norm, passes in zip(norms, self._passes, strict=True)
        ]
        self._number = self._gathered = 0
        self._sums = self._arriving = None
        if not norms:
            return
        self._sizes = [size for row in self._rows for size in row.sizes]
        owners = torch.arange(len(norms)).repeat_interleave(2).repeat_interleave(torch.tensor(self._sizes))
        self._layer_of = owners.to(self._rows[0].gathered.device)
        for row in self._rows:
            row.own()  # before somebody notes where a tensor lies
        # Around the strategy's step, which automatic and manual optimisation both go through.
        step = trainer.strategy.training_step
        trainer.strategy.training_step = partial(self._forward, trainer, step)  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._number = batch_idx % trainer.accumulate_grad_batches
        if self._number == 0 and self._layers:
            self._forget()
            self._gathered = 0
            if self.exact:
                terms = trainer.accumulate_grad_batches * trainer.world_size
                device = self._layer_of.device
                self._exact = WideSum(len(self._layer_of), terms, device)
                self._all_passes = torch.zeros_like(self._passes)

    def _forget(self) -> None:
        """A mean that was not finite must leave no trace in the next."""
        for row in self._rows:
            row.gathered.zero_()
        self._passes.zero_()

    def _forward(self, trainer: Trainer, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a micro-batch."""
        if self.exact:  # each micro-batch by itself
            self._forget()
        for layer in self._layers:
            layer.lend(0 if self.exact else self._number)
        try:
            output = training_step(*args, **kwargs)
        finally:
            for layer in self._layers:
                layer.take_back()
        self._gathered += 1
        if self.exact:
            self._exact.add(torch.cat([row.gathered * times for row, times in zip(self._rows, self._times(), strict=True)]))
            self._all_passes += self._passes
        if self._number + 1 == trainer.accumulate_grad_batches:
            self._send(trainer)  # the sum over the ranks has the whole backward pass to arrive
        return output

    def _send(self, trainer: Trainer) -> None:
        """The sums over this rank's forward passes, and their numbers, set out to meet the other ranks'."""
        if self.exact:
            numbers = self._all_passes.to(self._layer_of.device, torch.float64, non_blocking=True)
            self._sums = torch.cat([self._exact.folds.view(-1), numbers])
            if trainer.world_size > 1:
                self._arriving = dist.all_reduce(self._sums, async_op=True)
            return
        sums = [row.gathered * times for row, times in zip(self._rows, self._times(), strict=True)]
        numbers = self._passes.to(sums[0].device, sums[0].dtype, non_blocking=True)
        self._sums = torch.cat([*sums, numbers])
        if trainer.world_size > 1:
            self._arriving = dist.all_reduce(self._sums, async_op=True)

    def _times(self) -> list[Tensor]:
        """For each statistic of each row, how often its layer was gone through."""
        numbers = self._passes.to(self._layer_of.device, non_blocking=True).index_select(0, self._layer_of)
        parts = torch.split(numbers, [len(row.gathered) for row in self._rows])
        return [part.to(row.gathered.dtype) for part, row in zip(parts, self._rows, strict=True)]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._sums is not None:
            self._move(is_skipped(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._gathered and self._number + 1 < trainer.accumulate_grad_batches:
            # The epoch ended within a step, as the one does in which StochasticWeightAveraging gathers statistics.
            self._send(trainer)
            self._move(False)
        self._gathered = 0

    def _move(self, skipped: bool | Tensor) -> None:
        """Moves the running statistics by the mean of the step. All ranks have met since it was sent: nobody waits.

        A step that was left out leaves no trace; nor does a step in a layer that none of its micro-batches went through.
        """
        assert self._sums is not None
        if self._arriving is not None:
            self._arriving.wait()
        sums, passes = self._sums[: -len(self._layers)], self._sums[-len(self._layers) :]
        if self.exact:
            dtype = self._rows[0].gathered.dtype
            sums, passes = WideSum.total(sums.view_as(self._exact.folds)).to(dtype), passes.to(dtype)
        self._sums = self._arriving = None
        if skipped is True:
            return
        moved = passes > 0 if skipped is False else (passes > 0) & ~skipped  # on a GPU, only the device knows
        own = [row.own() for row in self._rows]
        before = own[0] if len(own) == 1 else torch.cat(own)
        means = sums / passes.clamp(min=1).index_select(0, self._layer_of)
        means = torch.where(moved.index_select(0, self._layer_of), means, before)
        change, momenta = means - before, [layer.momentum for layer in self._layers]
        if len(set(momenta)) == 1:
            change.mul_(momenta[0])
        else:
            for at, part in enumerate(torch.split(change, self._sizes)):
                part.mul_(momenta[at // 2])
        for statistics, part in zip(own, torch.split(change, [len(one) for one in own]), strict=True):
            statistics.add_(part)
        for layer, counts in zip(self._layers, moved.to(torch.int64).unbind(), strict=True):
            if layer.norm.num_batches_tracked is not None:
                layer.norm.num_batches_tracked.add_(counts)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        trainer.strategy.__dict__.pop("training_step", None)
        for row in self._rows:
            row.leave()
        self._layers, self._rows = [], []
