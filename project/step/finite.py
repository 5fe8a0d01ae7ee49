"""Checks whether all gradients are finite, in one operation on the device, without waiting for it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm


def not_finite(gradients: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Returns more than 0 if a value is not finite, else 0. `scale`: 1.0 where the flag is to be.

    It is GradScaler's own check, with a scale of 1: exact, and the cheapest there is. Of bf16 it has none on a GPU.
    """
    places = {gradient.device for gradient in gradients}  # the host's memory, where a sharded network is offloaded
    if places != {scale.device}:
        by_place = [[gradient for gradient in gradients if gradient.device == place] for place in places]
        return torch.stack([not_finite(some, scale.to(some[0].device)).to(scale.device) for some in by_place]).amax(0)
    flag, values = torch.zeros_like(scale), [_values(gradient) for gradient in gradients]
    others = [value for value in values if not (value.is_cuda and value.dtype == torch.bfloat16)]
    torch._amp_foreach_non_finite_check_and_unscale_(others, flag, scale)
    if len(others) < len(values):
        short = [value for value in values if value.dtype == torch.bfloat16 and value.numel()]
        largest = get_total_norm(short, torch.inf) if short else flag
        flag = torch.maximum(flag, largest.isfinite().logical_not().to(flag.dtype))
    return flag


def _values(gradient: Tensor) -> Tensor:
    """Returns all numbers of a gradient, as real ones: of a sparse one, those that it has."""
    if gradient.is_sparse:
        gradient = gradient._values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
