"""Finds convolutions that torch (2.15) computes wrongly in channels_last on some CPUs."""

import torch
from torch import nn


def corrupted(network: nn.Module, capability: str | None = None) -> str | None:
    """Returns the name of a layer whose backward pass would write beyond its memory: a strided 1x1 convolution of fewer than
    eight channels, on a CPU without AVX-512. `capability`: of the CPU, as torch names it; by default this one's."""
    if "AVX512" in (capability or torch.backends.cpu.get_cpu_capability()):
        return None
    name: str
    for name, layer in network.named_modules():
        if (
            isinstance(layer, nn.Conv2d)
            and set(layer.kernel_size) == {1}
            and max(layer.stride) > 1
            and layer.in_channels // layer.groups < 8
        ):
            return name
    return None
