"""Activations of a block that are computed again in the backward pass, and not kept until then."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(block: nn.Module) -> None:
    """Has a block keep its input from now on, and compute the rest again when its gradient is computed."""
    forward = block.forward

    def first_and_again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = first_and_again
