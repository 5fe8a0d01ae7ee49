"""Refuses what a network has made later: when a run resumes, the network is made anew, and gets what was saved."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from project.errors import UserError

Shapes = dict[str, tuple[int, ...] | None]
"""The shape of each tensor in a state_dict; None where it is not known, or may change: a buffer's, a lazy parameter's."""


def shapes(module: nn.Module) -> Shapes:
    """Returns the shape of each tensor in a module's state_dict."""
    sizes: Shapes = {name: None for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in sizes and not is_lazy(parameter):
            sizes[name] = tuple(parameter.shape)
    return sizes


def refuse_made_later(saved: Mapping[str, Any], at_start: Shapes) -> None:
    """Raises a UserError that names a tensor that was made, or a parameter that was given another shape, since the fit began.

    `saved`: a checkpoint's state_dict, as callbacks have left it; one that prunes takes back there what it adds.
    """
    for name, value in saved.items():
        if not isinstance(value, Tensor):
            continue
        shape = tuple(value.shape)
        if name not in at_start:
            problem = f"{name} was made while the run was going on"
        elif at_start[name] not in (None, shape):
            problem = f"{name} has changed its shape while the run was going on, from {at_start[name]} to {shape}"
        else:
            continue
        raise UserError(
            f"A run could not go on from this checkpoint: {problem}, and the network that a run goes on with is made anew. "
            "HINT: make it in __init__, or in the module's configure_model."
        )


def resize_buffers(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Gives buffers the shapes that were saved (a queue may have grown). A UserError reports another network."""
    buffers = dict(module.named_buffers())
    differing = []
    ours = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    saved_tensors = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    for name in {**ours, **saved_tensors}:
        here, saved_tensor = ours.get(name), saved_tensors.get(name)
        if here is not None and (is_lazy(here) or (saved_tensor is not None and here.shape == saved_tensor.shape)):
            continue
        if name in buffers and saved_tensor is not None:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, torch.empty_like(saved_tensor, device=buffers[name].device))
        else:
            differing.append(f"{name} is {_shape(saved_tensor)} there and {_shape(here)} here")
    if differing:
        raise UserError(
            f"The checkpoint is of another network: {len(differing)} tensor(s) differ ({', '.join(differing[:3])}). "
            "HINT: use the config.yaml of the run that it comes from."
        )


def _shape(tensor: Tensor | None) -> str:
    return "not" if tensor is None else str(tuple(tensor.shape))
