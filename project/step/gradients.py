"""The gradients of a step: how those of its micro-batches and ranks become one, its norm, and clipping.

The loop calls these methods and knows no more of it. `Gradients` is for one rank, and for DistributedDataParallel, which adds
up in the backward pass. exact/step.py and sharded/gradients.py have others.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from project.step.optimizers import evaluates_once, is_fused
from project.typed import typed


class Gradients:
    """The mean over the micro-batches of a step: each divides its loss by their number; DDP takes the mean over the ranks."""

    strategies: tuple[type, ...] = (DDPStrategy, SingleDeviceStrategy)
    """Strategies with which the loop takes the steps by itself: these, and no subclass of them."""
    divides_loss = True
    """The loss of a micro-batch is divided by their number in the step."""
    why_no_graph: str | None = None
    """Why no step can be recorded as a graph."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def begin_epoch(self, why_not: str | None) -> None:
        """Called at the start of an epoch. `why_not`: why Lightning's own loop takes the steps, or None."""

    def begin_step(self) -> None:
        """Called before the first forward pass of a step."""

    def check_weights(self, where: str) -> None:
        """Called where weights must be what they were when the step began; `where` says where, for a message."""

    def pass_over(self) -> None:
        """Called for a micro-batch without a loss."""

    def begin_backward(self, last: bool) -> None:
        """Called before a backward pass; `last`: of this rank in this step."""

    def end_backward(self, last: bool) -> None:
        """Called after a backward pass."""

    def within_hook(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds the hook after the backward pass."""
        return nullcontext()

    def end_step(self) -> None:
        """Called when all gradients of a step are computed, before its update."""

    def unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Takes the loss scale off the gradients: a fused optimiser would do so by itself, after all that looks at them."""
        scaler.unscale_(optimizer)

    def unscale_before_hooks(self, whether: bool) -> None:
        """Has Lightning's own loop take the loss scale off the gradients of fused optimisers, too, before a hook or clipping
        sees them. torch's fused ones do so within their step, and Lightning refuses to clip then; the host waits for the device
        instead.
        """
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            for optimizer in filter(is_fused, self.trainer.optimizers):
                optimizer._step_supports_amp_scaling = not whether  # type: ignore[attr-defined]

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Returns the norm of the gradient at hand. Where it is sharded, all ranks call this."""
        return get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])

    def clip_by_norm(self, parameters: list[Tensor], most: float) -> Tensor:
        """Clips the gradient by its norm, and returns the norm before."""
        return clip_grad_norm_(parameters, most)

    def takes_step_of(self, optimizer: Optimizer) -> bool:
        """Returns whether the loop takes an optimiser's steps by itself, with one gradient for each."""
        return evaluates_once(optimizer)

    def step_arguments(self, optimizer: Optimizer) -> tuple[Callable[[], Tensor], ...]:
        """Returns what the optimiser's step is given: nothing here, where each optimiser is one of torch's."""
        return ()

    def update(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Surrounds the optimiser's step."""
        return nullcontext()

    def teardown(self) -> None:
        """Called at the end of a fit."""

    def state_dict(self) -> dict[str, float]:
        """Returns what a run resumes with."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes what `state_dict` gave."""


def with_gradients(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimiser that have a gradient."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None]


def clip_by_value(optimizer: Optimizer, most: float) -> None:
    """Clips gradients by value, also in a step that is skipped: torch's own fails where no parameter has a gradient."""
    if parameters := with_gradients(optimizer):
        torch.nn.utils.clip_grad_value_(parameters, most)


def gradient_norm(trainer: Trainer, parameters: Iterable[Tensor]) -> float:
    """Returns the norm of the gradient before it was clipped. The host waits for the device here; where it is sharded, all
    ranks call this.
    """
    norm = typed(trainer).step_state.clipped_norm
    return float(typed(trainer).gradients.norm(parameters) if norm is None else norm)
