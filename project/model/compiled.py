"""Decides whether and how torch.compile translates the network."""

from collections.abc import Callable
from typing import Literal

from project.errors import UserError

Compile = Literal["none", "auto", "default", "reduce-overhead", "max-autotune"]

_WORTH_IT = 900  # seconds
IN_GRAPHS = ("reduce-overhead", "max-autotune")
"""These put the network into CUDA graphs."""


def mode_of(requested: Compile, least_seconds: Callable[[], float]) -> str | None:
    """Returns the mode of torch.compile; None leaves the network as it is.

    `auto` follows from the config and the kind of the GPU, which give the least time of a fit, and not from how fast the
    first steps went.
    """
    if requested == "auto":
        return "default" if least_seconds() > _WORTH_IT else None
    return None if requested == "none" else requested


def refuse_overwritten_gradients(requested: Compile, micro_batches: int, on_gpu: bool) -> None:
    """Refuses CUDA graphs with several micro-batches: each overwrites the gradients of the one before."""
    if requested in IN_GRAPHS and on_gpu and micro_batches > 1:
        raise UserError(
            f"model.compile={requested} works in CUDA graphs, where the gradients of {micro_batches} micro-batches overwrite "
            "each other: the sum may be wrong, and nobody would see it (pytorch#169545). HINT: model.compile=default, or a "
            "data.batch_size with which trainer.accumulate_grad_batches is 1."
        )
