"""The network that a run resumes with, which is made anew: its tensors must be those that were saved."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from project.errors import UserError

Shapes = Mapping[str, tuple[int, ...] | None]
"""The shape of each tensor in a state_dict; None where it is not known, or may change: a buffer's, a lazy parameter's."""


def _tensors(state: Mapping[str, object]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def shapes(module: nn.Module) -> Shapes:
    """Returns the shape of each tensor in a module's state_dict."""
    sizes: dict[str, tuple[int, ...] | None] = dict.fromkeys(_tensors(module.state_dict(keep_vars=True)))
    parameters = module.named_parameters(remove_duplicate=False)
    return sizes | {name: tuple(tensor.shape) for name, tensor in parameters if name in sizes and not is_lazy(tensor)}


def refuse_tensors_made_later(saved: Mapping[str, object], at_start: Shapes) -> None:
    """Raises a UserError that names a tensor that was made, or a parameter that was given another shape, since the fit began.

    `saved`: a checkpoint's state_dict, as callbacks have left it; one that prunes takes back there what it adds.
    """
    for name, value in _tensors(saved).items():
        if name not in at_start:
            problem = f"{name} was made while the run was going on"
        elif at_start[name] is not None and at_start[name] != (shape := tuple(value.shape)):
            problem = f"{name} has changed its shape while the run was going on, from {at_start[name]} to {shape}"
        else:
            continue
        raise UserError(
            f"A run could not resume from this checkpoint: {problem}, and the network that a run continues with is made anew. "
            "HINT: make it in __init__, or in the module's configure_model."
        )


def resize_buffers(module: nn.Module, saved: Mapping[str, object]) -> None:
    """Gives buffers the shapes that were saved (a queue may have grown). A UserError reports another network."""
    buffers, differing = dict(module.named_buffers()), []
    own, tensors = _tensors(module.state_dict(keep_vars=True)), _tensors(saved)
    for name in {**own, **tensors}:
        here, value = own.get(name), tensors.get(name)
        if here is not None and (is_lazy(here) or (value is not None and here.shape == value.shape)):
            continue
        if name in buffers and value is not None:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, torch.empty_like(value, device=buffers[name].device))
        else:
            differing.append(f"{name} is {_shape(value)} there and {_shape(here)} here")
    if differing:
        raise UserError(
            f"The checkpoint is of another network: {len(differing)} tensor(s) differ ({', '.join(differing[:3])}). "
            "HINT: use the config.yaml of the run that it comes from; where Python started that, there is none: name its class "
            "by --model."
        )


def _shape(tensor: Tensor | None) -> str:
    return "not" if tensor is None else str(tuple(tensor.shape))
