"""Adapts Lightning's own loop of a step, so that a run is the same on any number of ranks."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeAlias, TypeVar, cast

from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from project.step.ddp import wrap_again_before_backward
from project.step.gradients import clip_by_value
from project.step.micro_batch import MicroBatch
from project.step.optimizers import all_evaluate_once, refuse_accumulation_of_lbfgs
from project.step.state import micro_batch, step_state
from project.typed import Batch, Fetcher

log = logging.getLogger(__name__)

T = TypeVar("T")
Fetched: TypeAlias = tuple[Batch, int, int]
"""A micro-batch, and the numbers that Lightning gives it and its loader."""


class WeightedResults:
    """Takes the place of Lightning's ClosureResult in Lightning's own loop: the loss is multiplied by the weight of its
    micro-batch.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._warned = trainer, False
        self._last: MicroBatch | None = None

    def _warn_of_second_evaluation(self) -> None:
        """Warns once where an optimiser evaluates the loss again: it means that of the step, and gets that of the last
        micro-batch.
        """
        at, trainer = micro_batch(self._trainer), self._trainer
        many = trainer.accumulate_grad_batches
        if at is self._last and many > 1 and not self._warned and trainer.is_global_zero:
            self._warned = True
            log.warning(
                "%s asks for the loss more than once in a step of %d micro-batches, and is given the last one's: the step "
                "depends on the number of ranks. HINT: trainer.accumulate_grad_batches=1, and a batch_size %d times as large.",
                *(type(trainer.optimizers[0]).__name__, many, many),
            )
        self._last = at

    def from_training_step_output(self, output: STEP_OUTPUT, micro_batches: int) -> ClosureResult:
        self._warn_of_second_evaluation()
        result = ClosureResult.from_training_step_output(output, micro_batches)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        step_state(self._trainer).loss = loss.detach() if isinstance(loss, Tensor) else None
        weight = micro_batch(self._trainer).weight
        if weight != 1.0 and result.closure_loss is not None:
            result.closure_loss = result.closure_loss * weight
        return result


class NotingFetcher:
    """Wraps Lightning's data fetcher: each micro-batch is noted before any other code sees it."""

    def __init__(self, fetcher: Fetcher, fetch: Callable[[Fetcher], Fetched], note: Callable[[Batch], None]) -> None:
        self._fetcher, self._fetch, self._note = fetcher, fetch, note

    @property
    def done(self) -> bool:
        return bool(self._fetcher.done)

    def __next__(self) -> Fetched:
        fetched = self._fetch(self._fetcher)
        self._note(fetched[0])
        return fetched


class _Replaceable(Protocol):
    """A strategy's methods that are replaced for a fit."""

    backward: Callable[..., object]
    optimizer_step: Callable[..., object]


def adapt_strategy(trainer: Trainer) -> None:
    """Weighs the loss of a module that steps its optimisers by itself, and of an optimiser that evaluates the loss again. Clips
    by value what has a gradient: a skipped step has none left, and torch's function fails then.
    """
    strategy, plugin = cast(_Replaceable, trainer.strategy), trainer.precision_plugin
    weighs = not trainer.lightning_module.automatic_optimization
    if type(plugin).clip_grad_by_value is Precision.clip_grad_by_value:
        plugin.clip_grad_by_value = clip_by_value  # type: ignore[method-assign,assignment]
    refuse_accumulation_of_lbfgs(trainer)
    if "backward" not in vars(strategy):  # which `manual_backward` calls, too
        strategy.backward = partial(_weighted_backward if weighs else _wrapped_backward, trainer, strategy.backward)
    if trainer.world_size > 1 and "optimizer_step" not in vars(strategy) and not all_evaluate_once(trainer):
        strategy.optimizer_step = partial(_step_with_mean_loss, trainer, strategy.optimizer_step)


def restore_strategy(trainer: Trainer) -> None:
    """Takes back what `adapt_strategy` has done, at the end of a fit."""
    for replaced in ("backward", "optimizer_step"):
        vars(trainer.strategy).pop(replaced, None)


def _weighted_backward(trainer: Trainer, backward: Callable[..., T], loss: Tensor, *args: object, **kwargs: object) -> T:
    """Takes the place of the strategy's `backward`, which `manual_backward` calls: notes the loss as the module gave it, and
    multiplies it by the micro-batch's weight for the backward pass.
    """
    state = step_state(trainer)
    weight, state.loss = state.micro_batch.weight, loss.detach()
    return backward(loss if weight == 1.0 else loss * weight, *args, **kwargs)


def _wrapped_backward(trainer: Trainer, backward: Callable[..., T], loss: Tensor, *args: object, **kwargs: object) -> T:
    """Takes the place of the strategy's `backward` where Lightning's loop calls it: a forward pass may have frozen layers."""
    wrap_again_before_backward(trainer.strategy, loss)
    return backward(loss, *args, **kwargs)


def _step_with_mean_loss(
    trainer: Trainer, step: Callable[..., T], optimizer: object, closure: Callable[[], object], **settings: object
) -> T:
    """Takes the place of the strategy's `optimizer_step`: an optimiser that evaluates the loss again gets its mean over the
    ranks. By its own loss a rank would end a search earlier than the others, which would wait for it.
    """

    def evaluate() -> object:
        loss = closure()
        if not isinstance(loss, Tensor):
            return loss
        return trainer.strategy.reduce(loss * micro_batch(trainer).weight, reduce_op="mean")

    return step(optimizer, evaluate, **settings)
