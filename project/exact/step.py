"""The gradients of a step with trainer.exact, and what must hold for them while the step is computed."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, Optimizer

from project.errors import UserError
from project.exact.checks import MovedWeights, explain_missing_gradients, is_equal
from project.exact.gradients import ExactGradients
from project.exact.logged import ExactResults
from project.sharded.local_step import clip, on_shards
from project.sharded.shards import total_norm
from project.sharded.strategy import Sharded
from project.step.gradients import Gradients
from project.step.optimizers import evaluates_once
from project.typed import typed


class _UnknownLoss(Tensor):
    """Stands for the loss of a step, of which each rank has a part. An optimiser may return it, and not compute with it."""

    @classmethod
    def __torch_function__(cls, *arguments: object, **settings: object) -> object:
        raise UserError(
            "trainer.exact can't be kept: the optimiser computes with the loss, of which each rank has that of its own "
            "micro-batches. HINT: an optimiser that goes by gradients alone, or trainer.exact=false."
        )


class ExactStep(Gradients):
    """Adds up the gradients of a step exactly, after the backward pass of each micro-batch. Weights and buffers must stay from
    the first forward pass of a step to its last gradient, which the first step of an epoch checks.
    """

    strategies = (DDPStrategy, SingleDeviceStrategy, Sharded)
    divides_loss = False
    why_no_graph = "trainer.exact adds up gradients by itself"

    def __init__(self, trainer: Trainer, results: ExactResults) -> None:
        super().__init__(trainer)
        self._results = results
        self._sums: ExactGradients | None = None
        self._restored: dict[str, float] = {}
        self._checks_weights = False  # until a step has shown that they stay
        self._weights: MovedWeights | None = None
        self._checks_optimizer = False  # until its first step of the epoch

    def begin_epoch(self, why_not: str | None) -> None:
        if why_not is not None:
            raise UserError(
                f"trainer.exact can't be kept: {why_not}, and so Lightning's own loop takes the steps (docs/own.md). "
                "HINT: change that, or set trainer.exact to false."
            )
        self._make_sums()
        self._checks_optimizer = True
        callbacks = typed(self.trainer).callbacks
        others = [callback for callback in callbacks if not type(callback).__module__.startswith(("project.", "lightning."))]
        self._results.logs_at_the_end = is_overridden("on_train_batch_end", self.trainer.lightning_module) or any(
            is_overridden("on_train_batch_end", callback) for callback in others
        )

    def _make_sums(self) -> None:
        """Makes the sums, with the grids that were in use, or those of the checkpoint."""
        trainer, strategy = self.trainer, self.trainer.strategy
        grids = self._restored or self.state_dict()
        if self._sums is not None:
            self._sums.close()
        sharded = strategy if isinstance(strategy, Sharded) else None
        ranks: int = trainer.world_size
        self._sums = ExactGradients(
            trainer.lightning_module,
            trainer.accumulate_grad_batches * ranks,
            ranks,
            sharded.gathered_parameters() if sharded else None,
            sharded.layouts if sharded else None,
        )
        self._sums.scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._sums.load_state_dict(grids)
        self._restored, self._checks_weights = {}, True

    def begin_step(self) -> None:
        assert self._sums is not None
        if self._sums.outdated:
            self._make_sums()
        self._weights = MovedWeights(self.trainer.lightning_module) if self._checks_weights else None

    def check_weights(self, where: str) -> None:
        if self._weights is not None:
            self._weights.refuse(where)

    def pass_over(self) -> None:
        raise UserError(
            "trainer.exact can't be kept: training_step returned None (or the loader gave None), and other ranks would wait "
            "for its gradient. HINT: return a loss that has none: (output * 0).sum()."
        )

    def begin_backward(self, last: bool) -> None:
        assert self._sums is not None
        self._sums.begin(last)

    def end_backward(self, last: bool) -> None:
        assert self._sums is not None
        self._sums.end()
        if last:
            self._sums.finish()

    def within_hook(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else explain_missing_gradients()

    def end_step(self) -> None:
        self.check_weights("in a hook between the micro-batches of a step")
        if self._weights is not None:
            self._weights, self._checks_weights = None, False

    def unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        super().unscale(scaler, optimizer)
        assert self._sums is not None
        scale: Callable[[Tensor], Tensor] = scaler.scale
        self._sums.unscale_whole(scale)

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        gradients = {id(parameter): parameter.grad for parameter in parameters if parameter.grad is not None}
        if self._sums is not None:
            gradients |= {at: whole for at, whole in self._sums.whole.items() if at in gradients}
        return total_norm(gradients.values())

    def clip_by_norm(self, parameters: list[Tensor], most: float) -> Tensor:
        if self._sums is None or not self._sums.whole:
            return super().clip_by_norm(parameters, most)
        return clip(parameters, most, self.norm(parameters))

    def takes_step_of(self, optimizer: Optimizer) -> bool:
        """Returns whether the optimiser needs one gradient, which `step_arguments` checks of others than torch's. On shards
        these may add up over a tensor, in another order on another number of ranks.
        """
        unknown = isinstance(optimizer, LBFGS) or isinstance(self.trainer.strategy, Sharded)
        return evaluates_once(optimizer) or not unknown

    def step_arguments(self, optimizer: Optimizer) -> tuple[Callable[[], Tensor], ...]:
        """Returns the closure of an optimiser that is not torch's. It gives the step's loss once, whose gradient is there."""
        if evaluates_once(optimizer):
            return ()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        weights = [parameter.detach().clone() for parameter in parameters] if self._checks_optimizer else []
        self._checks_optimizer = False
        calls: list[None] = []

        def closure() -> Tensor:
            calls.append(None)
            moved = any(not is_equal(weight, parameter) for weight, parameter in zip(weights, parameters, strict=False))
            if len(calls) > 1 or moved or any(at.grad is not grad for at, grad in zip(parameters, gradients, strict=True)):
                raise UserError(
                    f"trainer.exact can't be kept: {type(optimizer).__name__} asks for the loss again, at other weights. HINT: "
                    "an optimiser that needs one gradient for a step, or trainer.exact=false."
                )
            return torch.zeros(()).as_subclass(_UnknownLoss)

        return (closure,)

    def update(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        return on_shards(optimizer)

    def teardown(self) -> None:
        """Takes the hooks off the parameters: another Trainer may train them."""
        if self._sums is not None:
            self._restored = self.state_dict()
            self._sums.close()
            self._sums = None

    def state_dict(self) -> dict[str, float]:
        """Returns the grids of the sums, by parameter."""
        return self._restored if self._sums is None else self._sums.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._restored = state
