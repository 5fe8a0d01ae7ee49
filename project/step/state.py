"""The step at hand: what the loop notes of it, and parts of a run read."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from lightning.pytorch import Trainer
from torch import Tensor

from project.step.micro_batch import MicroBatch
from project.step.runner import Runner
from project.typed import typed

if TYPE_CHECKING:
    from project.step.epoch_loop import EpochLoop


@dataclass(slots=True)
class StepState:
    """The state of the step that this rank takes, and the micro-batch that it evaluates."""

    micro_batch: MicroBatch = field(default_factory=MicroBatch)
    """The micro-batch at hand."""
    loss: Tensor | None = None
    """Its loss as the module gave it, which no number of ranks or micro-batches divides; None before the forward pass. Where a
    module steps several optimisers, the last one's."""
    has_loss: bool = False
    """A micro-batch of this step had a loss."""
    clipped_norm: Tensor | None = None
    """The norm of the gradient before it was clipped; None where it was not."""
    skipped: bool | Tensor = False
    """Whether the step is skipped, as it is not finite: a tensor on a GPU, where only the device knows."""
    may_be_skipped: bool = False
    """A step of this fit may be skipped: what it has logged does not count in its epoch then."""
    recording: bool = False
    """The step is being recorded as a graph: no hook is called when it is repeated."""
    runner: Runner = field(default_factory=Runner)
    """What runs a micro-batch on the device: one operation after the other, or as a graph."""

    evaluated: MicroBatch | None = None
    """The micro-batch that is evaluated, where it was dealt out by us."""
    failed_evaluation: str = ""
    """The evaluation in which an error was raised, and the place in it, as the end of a sentence."""
    evaluated_key: tuple[int, int] | None = None
    """The micro-batch that is evaluated: the number of its loader, and the position of its first sample, if known."""
    peers_evaluate_more: bool = False
    """Other ranks evaluate another micro-batch of this loader after this rank's last one."""
    uneven: bool = False
    """A batch of an evaluation is at hand, of which some ranks have one more than others."""


def step_state(trainer: Trainer) -> StepState:
    """Returns the state of the step at hand."""
    return typed(trainer).step_state


def micro_batch(trainer: Trainer) -> MicroBatch:
    """Returns the micro-batch that this rank trains on."""
    return typed(trainer).step_state.micro_batch


def ends_step(trainer: Trainer) -> bool:
    """Returns whether a step ends with the micro-batch at hand: with the last of an epoch it does, however few it has had."""
    return not cast("EpochLoop", trainer.fit_loop.epoch_loop).accumulates()
