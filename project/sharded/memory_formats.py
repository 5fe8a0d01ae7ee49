"""Weights whose numbers lie in channels_last: `fully_shard` spreads them in their usual order, and layers compute with theirs.

The bits of a convolution depend on the order in which its weight lies, and on GPUs its speed does.
"""

from typing import Any

import torch
from torch import Tensor, nn

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def use_contiguous_order(module: nn.Module) -> dict[str, torch.memory_format]:
    """Makes a module's own parameters contiguous; each layer gets its weight in its former memory format for the time of a
    forward pass. Returns these formats, by name.
    """
    formats: dict[str, torch.memory_format] = {}
    for prefix, layer in module.named_modules():
        for name, weight in list(layer.named_parameters(recurse=False)):
            if weight.is_contiguous():
                continue
            format = _FORMATS.get(weight.ndim)
            weight.data = weight.data.contiguous()
            if format is not None:
                formats[f"{prefix}.{name}" if prefix else name] = format
                _restore_layout_in_forward(layer, name, format)
    return formats


def _restore_layout_in_forward(layer: nn.Module, name: str, format: torch.memory_format) -> None:
    """Gives a layer its weight in this memory format for the time of a forward pass: an attribute of the layer comes before its
    parameter of that name.
    """

    def give(layer: Any, _: Any) -> None:
        weight: Tensor = layer.get_parameter(name)
        layer.__dict__[name] = weight.contiguous(memory_format=format)

    def take_back(layer: Any, *_: Any) -> None:
        layer.__dict__.pop(name, None)

    layer.register_forward_pre_hook(give)
    layer.register_forward_hook(take_back, always_call=True)
