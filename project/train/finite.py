"""Is a gradient finite? One look at all gradients, on the device, without a wait."""

from collections.abc import Sequence

import torch
from torch import Tensor


def not_finite(gradients: Sequence[Tensor], one: Tensor) -> Tensor:
    """More than 0 if a value is not finite, else 0. `one`: 1.0 where the flag is to be.

    It is GradScaler's own check, with a scale of 1: exact, and the cheapest there is.
    """
    place = gradients[0].device  # the host's memory, where a sharded network is offloaded
    if place != one.device:
        return not_finite(gradients, one.to(place)).to(one.device)
    flag = torch.zeros_like(one)
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), flag, one)
    return flag
