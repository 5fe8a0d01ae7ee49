"""The network that a run resumes with, which is made anew: its tensors must be those that were saved."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from project.errors import UserError
from project.untrusted import shortened

log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...] | None]
"""The shape of each tensor in a state_dict; None where it is not known, or may change: a buffer's, a lazy parameter's."""


def _tensors(state: Mapping[str, object]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def shapes(module: nn.Module) -> Shapes:
    """Returns the shape of each tensor in a module's state_dict."""
    sizes: dict[str, tuple[int, ...] | None] = dict.fromkeys(_tensors(module.state_dict(keep_vars=True)))
    parameters = module.named_parameters(remove_duplicate=False)
    return sizes | {name: tuple(tensor.shape) for name, tensor in parameters if name in sizes and not is_lazy(tensor)}


def check_made_again(module: LightningModule, saved: Mapping[str, object], at_start: Shapes) -> None:
    """Raises a UserError that names a tensor that was made, or a parameter that was given another shape, since the fit began:
    a run that resumes makes its network anew. Where the module's `on_load_checkpoint` may make it, too, warns.

    `saved`: a checkpoint's state_dict, as hooks have left it: what they rename there, or leave out, is not the network's.
    """
    now = _tensors(module.state_dict(keep_vars=True))
    for name, value in _tensors(saved).items():
        if name not in now or is_lazy(value) or now[name].shape != value.shape:
            continue
        shape = tuple(value.shape)
        if name not in at_start:
            problem = f"{name} was made while the run was going on"
        elif at_start[name] is not None and at_start[name] != shape:
            problem = f"{name} has changed its shape while the run was going on, from {at_start[name]} to {shape}"
        else:
            continue
        if not is_overridden("on_load_checkpoint", module):
            raise UserError(
                f"A run could not resume from this checkpoint: {problem}, and the network that a run continues with is made "
                "anew. HINT: make it in __init__, or in the module's configure_model."
            )
        log.warning(
            "%s: a run resumes from its checkpoints only where on_load_checkpoint makes it anew, or leaves it out.", problem
        )
        return


def warn_if_not_loadable(module: LightningModule, saved: Mapping[str, object]) -> None:
    """Warns where a module made anew would not load a checkpoint's state_dict, whose names are not the network's. Loads it
    into a copy without values, and leaves to the module what its `on_load_checkpoint` puts back.
    """
    if is_overridden("on_load_checkpoint", module):
        return
    memo: dict[int, Tensor] = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
    for weight in module.parameters():
        memo[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
    try:
        twin = deepcopy(module, memo)
        with loading(twin):
            twin.load_state_dict({name: value.to("meta") for name, value in _tensors(saved).items()}, module.strict_loading)
    except UserError as error:
        log.warning(
            "A run could not resume from these checkpoints. %s",
            str(error).partition(" HINT: ")[0]
            + " HINT: have on_load_checkpoint put back what on_save_checkpoint leaves out, or set self.strict_loading = False.",
        )
    except Exception:  # it can't be copied, or looks at values: the resume will tell
        log.debug("Whether the checkpoint's network can be loaded could not be tried.", exc_info=True)


@contextmanager
def loading(module: nn.Module) -> Iterator[None]:
    """Has a module that loads a state_dict give its buffers the shapes that were saved (a queue may have grown), after all
    that its own hooks do. A UserError reports another network.
    """
    differing: list[str] = []

    def prepare(module: nn.Module, saved: Mapping[str, object], *more: object) -> None:
        _, _, strict, *_ = more
        differing[:] = _differing(module, saved, bool(strict))

    hook = module.register_load_state_dict_pre_hook(prepare)
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise
        what = f"{len(differing)} tensor(s) differ ({', '.join(differing[:3])})" if differing else shortened(error)
        raise UserError(
            f"The checkpoint is of another network: {what}. HINT: use the config.yaml of the run that it comes from; where "
            "Python started that, there is none: name its class by --model."
        ) from error
    finally:
        hook.remove()


def _differing(module: nn.Module, saved: Mapping[str, object], strict: bool) -> list[str]:
    """Returns what differs between a network and a state_dict, as text, once buffers have been given the shapes there."""
    buffers, differing = dict(module.named_buffers()), []
    own, tensors = _tensors(module.state_dict(keep_vars=True)), _tensors(saved)
    for name in {**own, **tensors}:
        here, value = own.get(name), tensors.get(name)
        if here is not None and (is_lazy(here) or (value is not None and here.shape == value.shape)):
            continue
        if name in buffers and value is not None:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, torch.empty_like(value, device=buffers[name].device))
        elif strict or not (here is None or value is None):
            differing.append(f"{name} is {_shape(value)} there and {_shape(here)} here")
    return differing


def _shape(tensor: Tensor | None) -> str:
    return "not" if tensor is None else str(tuple(tensor.shape))
