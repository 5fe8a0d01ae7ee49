"""Weights whose numbers lie in channels_last: `fully_shard` spreads them in their usual order, and layers compute with theirs.

The bits of a convolution depend on the order in which its weight lies, and on GPUs its speed does.
"""

from functools import partial

import torch
from torch import nn

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
                layer.register_forward_pre_hook(partial(_lay_out, name, format))
                layer.register_forward_hook(partial(_restore, name), always_call=True)
    return formats


def _lay_out(name: str, format: torch.memory_format, layer: nn.Module, _: object) -> None:
    # An attribute of the layer comes before its parameter of that name.
    layer.__dict__[name] = layer.get_parameter(name).contiguous(memory_format=format)


def _restore(name: str, layer: nn.Module, *_: object) -> None:
    layer.__dict__.pop(name, None)
