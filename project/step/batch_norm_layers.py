"""Finds the layers that are batch norms and compute as torch's do: exact/batch_norm.py moves their statistics once a step."""

import copy
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType, MethodType
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from project.data.dealing import chance_kept

log = logging.getLogger(__name__)


def batch_norms(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """Yields the layers with running statistics that are torch's batch norm, or compute the same, by name."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None and is_plain(layer):
            yield name, layer


def normalises_batches(module: nn.Module) -> bool:
    """Returns whether a layer needs two samples at once in training."""
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())


_PLAIN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
_KNOWN: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()


def is_plain(layer: _BatchNorm) -> bool:
    """Returns whether a layer only gathers its running statistics in training, and does not compute with them.

    A subclass with a `forward` of its own (timm's with an activation, batch renorm) is tried on a twin in the host's memory.
    """
    own = vars(layer).get("forward")
    if own is not None and not (isinstance(own, MethodType) and own.__func__ is type(layer).forward):
        return False
    if type(layer).forward in _PLAIN_FORWARDS:
        return True
    if layer not in _KNOWN:
        try:
            with chance_kept():
                _KNOWN[layer] = _gathers_only(layer)
        except Exception as error:  # whatever a layer of one's own makes of an input that is not its own
            log.debug("%s can't be tried: %s", type(layer).__name__, error)
            _KNOWN[layer] = False
    return _KNOWN[layer]


def _gathers_only(layer: _BatchNorm) -> bool:
    """Returns whether a layer only gathers: computes a batch with two different running statistics, and looks whether they
    leave a trace, and what is gathered.
    """
    memory: dict[int, torch.Tensor] = {
        id(parameter): nn.Parameter(torch.ones(parameter.shape)) for parameter in layer.parameters()
    }
    memory |= {id(buffer): torch.zeros(buffer.shape, dtype=buffer.dtype) for buffer in layer.buffers()}
    twin = copy.deepcopy(layer, memory).train()
    twin.momentum = 1.0
    mean, var = twin.running_mean, twin.running_var
    assert mean is not None
    assert var is not None
    generator, outputs, values = torch.Generator().manual_seed(0), [], torch.empty(0)
    for dimensions in (2, 0, 3):  # beyond samples and channels; of another number than its own it raises an error
        with suppress(ValueError), torch.no_grad():
            values = torch.randn(4, twin.num_features, *[3] * dimensions, generator=generator)
            for start in (0.0, 2.0):
                mean.fill_(start)
                var.fill_(start)
                outputs.append(twin.forward(values))
            break
    over = [at for at in range(values.ndim) if at != 1]
    return torch.equal(*outputs) and torch.allclose(
        torch.stack([mean, var]), torch.stack([values.mean(over), values.var(over)]), atol=1e-5
    )


def compiled_modules(module: nn.Module) -> set[nn.Module]:
    """Returns the modules that torch.compile has translated."""
    return {layer for translated in module.modules() if is_translated(translated) for layer in translated.modules()}


def is_translated(module: nn.Module) -> bool:
    """Returns whether torch.compile has translated a module."""
    # What torch.compile wraps is in a class of this name, which has no public place.
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def has_translated_functions(module: nn.Module) -> bool:
    """Returns whether a module, a part of it, or a file of their classes has a function that torch.compile has translated: it
    may call any layer.
    """
    parts = [part for part in module.modules() if not is_translated(part)]
    kinds = {kind for part in parts for kind in type(part).__mro__}
    files = {sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules}
    values = [
        value for holder in (*parts, *kinds, *files) for value in vars(holder).values() if isinstance(value, FunctionType)
    ]
    return any("get_compiler_config" in vars(value) for value in values)
