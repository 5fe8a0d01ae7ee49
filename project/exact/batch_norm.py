"""Batch norm's running statistics, moved once a step by the mean over all its micro-batches, on whatever ranks they were.

PyTorch moves them at every forward pass, each rank by its own micro-batches, and DDP keeps rank 0's: they would depend on
the number of ranks and on accumulation. Here each layer is given other buffers while it computes in training, which gather
the mean over this rank's micro-batches; one small all-reduce, which travels during the backward pass, makes it the mean over
all, and the layer's own momentum is applied to that. Whoever looks at the layer at any other moment (`training_step` in its
evaluation mode, a hook, an average of the weights, a copy, a checkpoint) sees the running statistics, and nothing else. Where
torch.compile translates layers, they have the other buffers throughout `training_step`.

A forward pass that the backward pass takes again (`torch.utils.checkpoint`) gathers nothing: it was counted the first time.
A layer whose own `forward` goes by its running statistics in training (batch renorm) is left alone.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial, reduce
from types import MethodType
from typing import TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from project.exact.sums import WideSum, sum_from_coarsest
from project.step.batch_norm_layers import batch_norms, compiled_modules, has_translated_functions
from project.step.state import step_state

T = TypeVar("T")

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class _PassCounter(Tensor):
    """Stands in for a layer's `num_batches_tracked` while it computes: it counts on the host, and no device has work with it.

    `on_next_pass` is called when the layer is gone through once more within a forward pass.
    """

    number: int
    on_next_pass: Callable[[], None]

    @staticmethod
    def create(on_next_pass: Callable[[], None]) -> "_PassCounter":
        made = torch.zeros((), dtype=torch.int64).as_subclass(_PassCounter)
        made.number, made.on_next_pass = 0, on_next_pass
        return made

    def add_(self, other: object, *, alpha: object = 1) -> Tensor:
        if self.number:
            self.on_next_pass()
        self.number += 1
        return self


class _Layer:
    """A layer, and the buffers that it has while it computes: the mean and the variance of one forward pass."""

    def __init__(self, norm: _BatchNorm, compiled: bool, mean: Tensor, var: Tensor) -> None:
        self.norm, self.mean, self.var = norm, mean, var
        self._counter = None if compiled else _PassCounter.create(self._keep_pass)
        self._running_mean = norm.running_mean
        self._own: dict[str, Tensor | None] | None = None  # while it has others
        self._momentum: float | None = None
        self._scratch: tuple[Tensor | None, ...] = ()  # where a pass that is taken again writes
        self._earlier: list[tuple[Tensor, Tensor]] = []
        self._has_gathered = False

    def begin_forward(self) -> None:
        self._earlier, self._has_gathered, self._running_mean = [], False, self.norm.running_mean
        if self._counter is not None:
            self._counter.number = 0

    def lend(self, again: bool) -> None:
        """Gives the layer other buffers. `again`: those that are never read, for a pass that was counted the first time.

        A layer that does not train computes with its own, and one in torch.func.functional_call may have the user's.
        """
        norm = self.norm
        if not norm.training or (self._own is None and norm.running_mean is not self._running_mean):
            return
        if self._own is None:
            self._own, self._momentum = {name: norm._buffers[name] for name in _BUFFERS}, norm.momentum
        if again and not self._scratch:
            counter = None if self._counter is None else _PassCounter.create(lambda: None)
            self._scratch = self.mean.clone(), self.var.clone(), counter
        others = self._scratch if again else (self.mean, self.var, self._counter)
        self._has_gathered |= not again
        norm._buffers.update(zip(_BUFFERS, others, strict=True))
        norm.momentum = 1.0  # always the same: torch.compile translates the layer anew for another

    def return_buffers(self) -> None:
        """Gives the layer its own buffers back."""
        if self._own is not None:
            self.norm._buffers.update(self._own)
            self.norm.momentum = self._momentum
            self._own = None

    def _keep_pass(self) -> None:
        """Keeps the mean and the variance of a pass before the next pass overwrites them."""
        self._earlier.append((self.mean.clone(), self.var.clone()))

    @property
    def passes(self) -> int:
        """Returns how many passes went through the layer; nobody counts in a translated one."""
        return int(self._has_gathered) if self._counter is None else self._counter.number

    def sums(self) -> list[Tensor]:
        """Returns the sums of means and of variances over these passes, as new tensors: the backward pass needs the buffers."""
        if not self.passes:
            return [torch.zeros_like(self.mean), torch.zeros_like(self.var)]
        means, variances = zip(*self._earlier, (self.mean, self.var), strict=True)
        return [sum(means[1:], means[0]), sum(variances[1:], variances[0])]


class _Forward:
    """Stands in for the `forward` of a layer during a step. A copy of the layer, or one in a file, has its class's."""

    def __init__(self, layer: _Layer, again: bool) -> None:
        self._layer, self._again = layer, again

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        norm = self._layer.norm
        self._layer.lend(self._again)
        try:
            return type(norm).forward(norm, *args, **kwargs)
        finally:
            self._layer.return_buffers()

    def __deepcopy__(self, memo: dict[int, _BatchNorm]) -> MethodType:
        copied = memo[id(self._layer.norm)]
        return MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, str]]:
        return getattr, (self._layer.norm, "forward")


def _statistics_of(norms: list[_BatchNorm]) -> list[Tensor]:
    return [part for norm in norms for part in (norm.running_mean, norm.running_var) if part is not None]


class StepStatistics(Callback):
    """Keeps the running statistics a function of the step's micro-batches. `num_batches_tracked` counts steps.

    `exact`: to the last bit, on any number of ranks.
    """

    capturable = True

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self._layers: list[_Layer] = []
        self._norms: list[_BatchNorm] = []
        self._gathered: list[Tensor] = []  # the layers' other buffers, side by side in memory; one tensor for each dtype
        self._number = 0  # of the micro-batch within its step
        self._steps = 0  # taken before this one
        self._in_forward = self._in_backward = False
        self._hook: RemovableHandle | None = None
        self._throughout = False  # layers are translated
        self._sum = torch.zeros(0)  # over the forward passes of this step, on this rank; then each layer's number of passes
        self._passes: dict[tuple[int, ...], Tensor] = {}  # numbers that are on the device already
        self._momenta: dict[tuple[float | None, ...], Tensor] = {}  # likewise; kept as long as the fit: a graph may read it
        self._clear_step()

    def _clear_step(self) -> None:
        """Clears what a step has gathered: a mean that was not finite must leave no trace in the next step."""
        for tensor in (self._sum, *self._gathered):
            tensor.zero_()
        self._exact: WideSum | None = None
        self._sums: Tensor | None = None
        self._all_reduce: dist.Work | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        kinds: dict[torch.dtype, list[_BatchNorm]] = {}
        for _, norm in batch_norms(pl_module):
            kinds.setdefault(_statistics_of([norm])[0].dtype, []).append(norm)
        self._norms, self._layers, self._gathered = [norm for norms in kinds.values() for norm in norms], [], []
        if not kinds:
            return
        translated, self._sizes = compiled_modules(pl_module), []
        for norms in kinds.values():
            own = _statistics_of(norms)
            sizes = [len(statistic) for statistic in own]
            self._gathered.append(own[0].new_zeros(sum(sizes)))
            others = iter(self._gathered[-1].split(sizes))
            self._sizes += sizes
            self._layers += [_Layer(norm, norm in translated, next(others), next(others)) for norm in norms]
        self._throughout = has_translated_functions(pl_module) or not translated.isdisjoint(self._norms)
        device = self._gathered[0].device
        self._sum = torch.zeros(sum(self._sizes) + len(self._norms), device=device, dtype=reduce(torch.promote_types, kinds))
        self._passes, self._momenta = {}, {}
        self._clear_step()
        owners = torch.arange(len(self._norms)).repeat_interleave(2).repeat_interleave(torch.tensor(self._sizes))
        self._layer_of = owners.to(device)  # for each statistic
        # Around the strategy's step, which automatic and manual optimisation both go through.
        step = trainer.strategy.training_step
        trainer.strategy.training_step = partial(self._forward, trainer, step)  # type: ignore[method-assign]

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets the step before: its first micro-batch may be empty, and then no other hook comes."""
        self._steps = trainer.global_step
        if self._layers:
            self._clear_step()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._number = batch_idx % trainer.accumulate_grad_batches

    def _forward(self, trainer: Trainer, training_step: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Computes the forward pass of a micro-batch."""
        self._in_forward, self._in_backward = True, False
        for layer in self._layers:
            layer.begin_forward()
        self._begin_passes()
        try:
            output = training_step(*args, **kwargs)
        finally:
            self._in_forward = False
            self._end_passes()
        self._add(trainer, tuple(layer.passes for layer in self._layers))
        if self._number + 1 == trainer.accumulate_grad_batches:
            self._send(trainer)  # the sum over the ranks has the whole backward pass to arrive
        return output

    def _begin_passes(self) -> None:
        """Has each layer other buffers during its passes; where torch.compile translates layers, until these end."""
        for layer in self._layers:
            if self._throughout:
                layer.lend(self._in_backward)
            else:
                vars(layer.norm)["forward"] = _Forward(layer, self._in_backward)

    def _end_passes(self) -> None:
        for layer in self._layers:
            layer.return_buffers()
            vars(layer.norm).pop("forward", None)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._layers and loss.requires_grad:  # when it begins: what hooks look at till then are the running statistics
            self._hook = loss.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Tensor) -> None:
        self._in_backward = True
        self._begin_passes()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._in_backward = False
        if self._hook is not None:  # the loss may be differentiated once more
            self._hook.remove()
        if self._in_forward:  # a module that steps by itself
            self._begin_passes()
        else:
            self._end_passes()

    def _add(self, trainer: Trainer, passes: tuple[int, ...]) -> None:
        """Adds the statistics of a micro-batch's forward pass to those of its step."""
        if passes not in self._passes:
            self._passes[passes] = torch.tensor(passes).to(self._sum.device, self._sum.dtype)
        once = set(passes) == {1}
        gathered = self._gathered if once else [part for layer in self._layers for part in layer.sums()]
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

    def _lacks_micro_batches(self, trainer: Trainer) -> bool:
        """Returns whether the step has had fewer micro-batches than a whole one, after the last of which the sum is sent."""
        return bool(self._layers) and self._number + 1 < trainer.accumulate_grad_batches

    def on_step_taken(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._lacks_micro_batches(trainer):
            self._send(trainer)  # an epoch's last step may have fewer micro-batches, which only its end shows
        if self._sums is not None:
            self._move_statistics(self._sums, step_state(trainer).skipped)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._lacks_micro_batches(trainer) and trainer.global_step == self._steps:
            # The epoch ended within a step, as the one does in which StochasticWeightAveraging gathers statistics.
            self._send(trainer)
            assert self._sums is not None
            self._move_statistics(self._sums, False)

    def _move_statistics(self, sums: Tensor, skipped: bool | Tensor) -> None:
        """Moves the running statistics by the mean of the step. All ranks have met since it was sent, so no rank waits.

        A skipped step leaves no trace; nor does a step in a layer that none of its micro-batches went through.
        """
        if self._all_reduce is not None:
            self._all_reduce.wait()
        self._sums = self._all_reduce = None  # which would keep the connections open
        if skipped is True:
            return
        own = _statistics_of(self._norms)
        before = torch.cat(own)
        sums, passes = sums[: -len(self._layers)], sums[-len(self._layers) :]
        if self._exact is not None:
            sums, passes = sum_from_coarsest(sums.view_as(self._exact.folds)).to(before.dtype), passes.to(before.dtype)
        moved = passes > 0 if skipped is False else (passes > 0) & ~skipped  # on a GPU, only the device knows
        change = sums / passes.clamp(min=1).index_select(0, self._layer_of) - before
        change = torch.where(moved.index_select(0, self._layer_of), change, 0.0).mul_(self._momentum())
        torch._foreach_add_(own, [*change.split(self._sizes)])
        counts = [norm.num_batches_tracked for norm in self._norms]
        counting = [(count, by) for count, by in zip(counts, moved.long().unbind(), strict=True) if count is not None]
        if counting:
            torch._foreach_add_(*map(list, zip(*counting, strict=True)))

    def _momentum(self) -> float | Tensor:
        """Returns the momentum of the statistics: one number for all, or one for each of them."""
        momenta = tuple(norm.momentum for norm in self._norms)
        if momenta[0] is not None and len(set(momenta)) == 1:
            return momenta[0]
        if momenta not in self._momenta:
            numbers = [math.nan if momentum is None else momentum for momentum in momenta]
            self._momenta[momenta] = torch.tensor(numbers, device=self._layer_of.device)
        each = self._momenta[momenta]
        if None in momenta:  # PyTorch's word for the mean over all steps, which the layer's own count tells
            never = torch.full_like(each[0], math.inf)
            counts = [norm.num_batches_tracked for norm in self._norms]
            steps = torch.stack([never if count is None else count.to(each.dtype) + 1 for count in counts])
            each = torch.where(each.isnan(), 1 / steps, each)
        return each.index_select(0, self._layer_of)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with suppress(torch.AcceleratorError):
            self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives the strategy its own `training_step` back, and each layer its own buffers."""
        trainer.strategy.__dict__.pop("training_step", None)
        self._end_passes()
        self._layers, self._norms, self._gathered = [], [], []
