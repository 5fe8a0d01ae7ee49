"""Batch norm's running statistics, moved once a step by the mean over all its micro-batches, on whatever ranks they were.

PyTorch moves them at every forward pass, each rank by its own micro-batches, and DDP keeps rank 0's: they would depend on
the number of ranks and on accumulation. Here each layer is given other buffers for the time of a forward pass in training,
which gather the mean over this rank's micro-batches; one small all-reduce, which travels during the backward pass, makes it
the mean over all, and the layer's own momentum is applied to that. Whoever looks at the layer at any other moment (a hook, an
average of the weights, a checkpoint) sees the running statistics, and nothing else.

A forward pass that the backward pass takes again (`torch.utils.checkpoint`) gathers nothing: it was counted the first time.
A layer whose own `forward` goes by its running statistics in training (batch renorm) is left alone.
"""

import functools
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from project.exact.sums import WideSum
from project.step.batch_norm_layers import batch_norms, compiled_modules
from project.step.state import step_state

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class _PassCounter(Tensor):
    """Stands in for a layer's `num_batches_tracked` while it computes: it counts on the host, and no device has work with it.

    `on_next_pass` is called when the layer is gone through once more within a forward pass.
    """

    number: int
    on_next_pass: Callable[[], None]

    @staticmethod
    def create(on_next_pass: Callable[[], None]) -> "_PassCounter":
        made: Any = torch.zeros((), dtype=torch.int64).as_subclass(_PassCounter)
        made.number, made.on_next_pass = 0, on_next_pass
        return made  # type: ignore[no-any-return]

    def add_(self, other: Any, *, alpha: Any = 1) -> Tensor:
        if self.number:
            self.on_next_pass()
        self.number += 1
        return self


class _Layer:
    """A layer, and the buffers that it has while it computes: the mean and the variance of one forward pass."""

    def __init__(self, norm: _BatchNorm, compiled: bool, mean: Tensor, var: Tensor) -> None:
        self.norm, self.mean, self.var = norm, mean, var
        self._passes = None if compiled else _PassCounter.create(self._keep_pass)
        self._lent = {"running_mean": mean, "running_var": var, "num_batches_tracked": self._passes}
        self._own: dict[str, Tensor | None] = {}
        self._momentum: float | None = None
        self._scratch: dict[str, Tensor | None] = {}  # where a pass that is taken again writes
        self._before_backward: tuple[dict[str, Tensor | None], float | None] | None = None
        self._earlier: list[tuple[Tensor, Tensor]] = []
        self.passes = 0

    def lend_buffers(self) -> None:
        """Gives the layer the other buffers. A layer that does not train keeps its own, which it computes with."""
        norm = self.norm
        if not norm.training:
            return
        self._own, self._momentum = {name: norm._buffers[name] for name in _BUFFERS}, norm.momentum
        norm._buffers.update(self._lent)
        norm.momentum = 1.0  # always the same: torch.compile translates the layer anew for another
        self._earlier = []
        if self._passes is not None:
            self._passes.number = 0

    def begin_backward(self) -> None:
        """Diverts what is computed again in a backward pass, which was counted when it was computed first: it writes where
        nobody reads.
        """
        norm = self.norm
        if self._before_backward is not None or not norm.training:
            return
        if not self._scratch:
            passes = None if self._passes is None else _PassCounter.create(lambda: None)
            self._scratch = dict(zip(_BUFFERS, (self.mean.clone(), self.var.clone(), passes), strict=True))
        self._before_backward = {name: norm._buffers[name] for name in _BUFFERS}, norm.momentum
        norm._buffers.update(self._scratch)
        norm.momentum = 1.0

    def end_backward(self) -> None:
        if self._before_backward is not None:
            buffers, self.norm.momentum = self._before_backward
            self.norm._buffers.update(buffers)
            self._before_backward = None

    def _keep_pass(self) -> None:
        """Keeps the mean and the variance of a pass before the next pass overwrites them."""
        self._earlier.append((self.mean.clone(), self.var.clone()))

    def return_buffers(self) -> int:
        """Gives the layer its own buffers back; returns how many passes went through it."""
        if not self._own:
            self.passes = 0
            return 0
        self.norm._buffers.update(self._own)
        self.norm.momentum = self._momentum
        self._own = {}
        self.passes = 1 if self._passes is None else self._passes.number  # nobody counts in a translated layer
        return self.passes

    def sums(self) -> list[Tensor]:
        """Returns the sums of the means and of the variances, over these passes. The backward pass may need its other buffers
        as they are.
        """
        if not self.passes:
            return [torch.zeros_like(self.mean), torch.zeros_like(self.var)]
        means, variances = zip(*self._earlier, (self.mean, self.var), strict=True)
        return [sum(means[1:], means[0]), sum(variances[1:], variances[0])]


class _FlatTensors:
    """The layers' own tensors of one dtype, side by side in memory: one operation is enough for all of them."""

    def __init__(self, parts: Callable[[], list[Tensor]]) -> None:
        self._parts = parts  # they may be others than they were a step ago
        self.sizes = [part.numel() for part in parts()]
        self._all, self._places = parts()[0].new_zeros(0), [-1] * len(self.sizes)

    def flat(self) -> Tensor:
        """Returns the tensors as one: they are moved there, and once more where a layer has received others since."""
        parts = self._parts()
        if [part.data_ptr() for part in parts] != self._places:
            self._all = torch.cat([part.detach().flatten() for part in parts])
            for part, place in zip(parts, torch.split(self._all, self.sizes), strict=True):
                part.data = place.view_as(part)
            self._places = [part.data_ptr() for part in parts]
        return self._all

    def unflatten(self) -> None:
        """Gives each tensor memory of its own again."""
        if self._all.numel():
            for part in self._parts():
                part.data = part.detach().clone()


def _statistics_of(norms: list[_BatchNorm]) -> list[Tensor]:
    return [part for norm in norms for part in (norm.running_mean, norm.running_var) if part is not None]


def _counts_of(norms: list[_BatchNorm]) -> list[Tensor]:
    return [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]


class _DtypeGroup:
    """The layers whose statistics are of one dtype: what they gather in a forward pass, and the sum over a step's."""

    def __init__(self, norms: list[_BatchNorm]) -> None:
        self.own = _FlatTensors(partial(_statistics_of, norms))
        own = _statistics_of(norms)
        self.gathered = own[0].new_zeros(sum(self.own.sizes))  # in the layers' other buffers
        self.others = [
            part.view_as(tensor) for part, tensor in zip(torch.split(self.gathered, self.own.sizes), own, strict=True)
        ]


class StepStatistics(Callback):
    """Keeps the running statistics a function of the step's micro-batches. `num_batches_tracked` counts steps.

    `exact`: to the last bit, on any number of ranks.
    """

    capturable = True

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self._layers: list[_Layer] = []
        self._groups: list[_DtypeGroup] = []
        self._counts: _FlatTensors | None = None
        self._number = 0  # of the micro-batch within its step
        self._sum = torch.zeros(0)  # over the forward passes of this step, on this rank; then each layer's number of passes
        self._passes: dict[tuple[int, ...], Tensor] = {}  # numbers that are on the device already
        self._clear_step()

    def _clear_step(self) -> None:
        """Clears what a step has gathered: a mean that was not finite must leave no trace in the next step."""
        self._sum.zero_()
        for row in self._groups:
            row.gathered.zero_()
        self._exact: WideSum | None = None
        self._sums: Tensor | None = None
        self._all_reduce: Any = None
        self._is_begun = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        kinds: dict[Any, list[_BatchNorm]] = {}
        for _, norm in batch_norms(pl_module):
            kinds.setdefault(_statistics_of([norm])[0].dtype, []).append(norm)
        self._groups = [_DtypeGroup(norms) for norms in kinds.values()]
        translated, norms = compiled_modules(pl_module), [norm for same in kinds.values() for norm in same]
        others = iter([other for row in self._groups for other in row.others])
        self._layers = [_Layer(norm, norm in translated, next(others), next(others)) for norm in norms]
        if not norms:
            return
        device = self._groups[0].gathered.device
        self._sizes = [size for row in self._groups for size in row.own.sizes]
        kind = functools.reduce(torch.promote_types, kinds)
        self._sum, self._passes = torch.zeros(sum(self._sizes) + len(norms), device=device, dtype=kind), {}
        self._clear_step()
        owners = torch.arange(len(norms)).repeat_interleave(2).repeat_interleave(torch.tensor(self._sizes))
        self._layer_of = owners.to(device)  # for each statistic
        counting = [at for at, norm in enumerate(norms) if norm.num_batches_tracked is not None]
        self._counting = None if len(counting) == len(norms) else torch.tensor(counting, device=device)
        self._counts = _FlatTensors(partial(_counts_of, norms)) if counting else None
        self._momenta: dict[tuple[float | None, ...], Tensor] = {}
        for row in self._groups:
            row.own.flat()  # before somebody notes where a tensor lies
        # Around the strategy's step, which automatic and manual optimisation both go through.
        step = trainer.strategy.training_step
        trainer.strategy.training_step = partial(self._forward, trainer, step)  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._number = batch_idx % trainer.accumulate_grad_batches
        if self._number == 0 and self._is_begun:  # the step before had no last micro-batch
            self._clear_step()

    def _forward(self, trainer: Trainer, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Computes the forward pass of a micro-batch."""
        for layer in self._layers:
            layer.lend_buffers()
        try:
            output = training_step(*args, **kwargs)
        finally:
            passes = [layer.return_buffers() for layer in self._layers]
        self._add(trainer, tuple(passes))
        if self._number + 1 == trainer.accumulate_grad_batches:
            self._send(trainer)  # the sum over the ranks has the whole backward pass to arrive
        return output

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._layers and loss.requires_grad:  # when it begins: what hooks look at till then are the running statistics
            loss.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Tensor) -> None:
        for layer in self._layers:
            layer.begin_backward()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for layer in self._layers:
            layer.end_backward()

    def _add(self, trainer: Trainer, passes: tuple[int, ...]) -> None:
        """Adds the statistics of a micro-batch's forward pass to those of its step."""
        self._is_begun = True
        if passes not in self._passes:
            self._passes[passes] = torch.tensor(passes).to(self._sum.device, self._sum.dtype)
        once = all(layer.passes == 1 for layer in self._layers)
        gathered = [row.gathered for row in self._groups] if once else [part for layer in self._layers for part in layer.sums()]
        if self.exact:
            if self._exact is None:
                terms = trainer.accumulate_grad_batches * trainer.world_size
                self._exact = WideSum(len(self._layer_of), terms, self._layer_of.device)
            self._exact.add(torch.cat(gathered))
            self._sum[-len(self._layers) :] += self._passes[passes]
        else:
            self._sum += torch.cat([*gathered, self._passes[passes]])

    def _send(self, trainer: Trainer) -> None:
        """Starts the sum over the ranks: of the sums over this rank's forward passes, and of their numbers."""
        if self._exact is None:
            self._sums = self._sum.clone()
        else:
            sums = self._exact.folds.view(-1)
            self._sums = torch.cat([sums, self._sum[-len(self._layers) :].to(sums.dtype)])
        if trainer.world_size > 1:
            self._all_reduce = dist.all_reduce(self._sums, async_op=True)

    def on_step_taken(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._sums is not None:
            self._move_statistics(step_state(trainer).skipped)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._layers and self._number + 1 < trainer.accumulate_grad_batches:
            # The epoch ended within a step, as the one does in which StochasticWeightAveraging gathers statistics.
            self._send(trainer)
            self._move_statistics(False)
        self._clear_step()

    def _move_statistics(self, skipped: bool | Tensor) -> None:
        """Moves the running statistics by the mean of the step. All ranks have met since it was sent: nobody waits.

        A skipped step leaves no trace; nor does a step in a layer that none of its micro-batches went through.
        """
        assert self._sums is not None
        if self._all_reduce is not None:
            self._all_reduce.wait()
        sums, passes = self._sums[: -len(self._layers)], self._sums[-len(self._layers) :]
        own = [row.own.flat() for row in self._groups]
        before = own[0] if len(own) == 1 else torch.cat(own)
        if self._exact is not None:
            sums, passes = WideSum.total(sums.view_as(self._exact.folds)).to(before.dtype), passes.to(before.dtype)
        self._clear_step()
        if skipped is True:
            return
        moved = passes > 0 if skipped is False else (passes > 0) & ~skipped  # on a GPU, only the device knows
        change = sums / passes.clamp(min=1).index_select(0, self._layer_of) - before
        change = torch.where(moved.index_select(0, self._layer_of), change, 0.0).mul_(self._momentum())
        for statistics, part in zip(own, torch.split(change, [len(tensor) for tensor in own]), strict=True):
            statistics.add_(part)
        if self._counts is not None:
            self._counts.flat().add_(moved if self._counting is None else moved.index_select(0, self._counting))

    def _momentum(self) -> float | Tensor:
        """Returns the momentum of the statistics: one number for all, or one for each of them."""
        momenta = [layer.norm.momentum for layer in self._layers]
        if (first := momenta[0]) is not None and momenta.count(first) == len(momenta):
            return first
        if (key := tuple(momenta)) not in self._momenta:  # kept as long as the fit: a graph may read it
            numbers = [math.nan if momentum is None else momentum for momentum in momenta]
            self._momenta[key] = torch.tensor(numbers, device=self._layer_of.device)
        each = self._momenta[key]
        # None is PyTorch's word for the mean over all steps, which the layer's own count tells.
        steps = torch.full_like(each, math.inf)
        if self._counts is not None:
            counts = self._counts.flat().to(each.dtype) + 1
            steps = counts if self._counting is None else steps.index_copy(0, self._counting, counts)
        return torch.where(each.isnan(), 1 / steps, each).index_select(0, self._layer_of)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with suppress(torch.AcceleratorError):
            self._detach(trainer)

    def _detach(self, trainer: Trainer) -> None:
        """Gives the strategy its own `training_step` back, and each layer its own buffers and memory."""
        trainer.strategy.__dict__.pop("training_step", None)
        for layer in self._layers:
            layer.end_backward()
        for together in (*(row.own for row in self._groups), self._counts):
            if together is not None:
                together.unflatten()
        self._layers, self._groups, self._counts = [], [], None
