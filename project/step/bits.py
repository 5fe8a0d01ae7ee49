"""A number for the bits of a tensor: another one where a value has changed."""

import torch
from torch import Tensor

_KINDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Returns a number for a tensor's values: a copy of a network's size might not fit beside it."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.element_size() not in _KINDS:
        return torch.zeros(())
    kind = _KINDS[tensor.element_size()]
    return tensor.view(kind).sum(dtype=kind)
