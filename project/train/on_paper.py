"""A module on paper: its tensors have shapes, types and a device, and no memory, so that any size can be reckoned with here.

It is made on torch's meta device, and computes with torch's fake tensors, which stay on the device that they stand for:
autocast, and the kernel that an attention takes, follow from it, and with them what is kept for the backward pass.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

log = logging.getLogger(__name__)

Made = TypeVar("Made")

_STEPS = 1000  # of a run of which it is not known


@cache
def paper() -> FakeTensorMode:
    """The one that all tensors on paper belong to: those of two can't be used together."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def made_on_paper(make: Callable[[], Made]) -> Made:
    """What is made here takes no memory, if it can be made so: a network that looks at its numbers is made as ever."""
    try:
        with torch.device("meta"):
            return make()
    except Exception as error:
        log.debug("not on paper", exc_info=True)
        made = make()
        log.info("Made with numbers, and not on paper: %s", str(error).partition("\n")[0])
        return made


def like(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The same on paper. `dtype`: of floating-point numbers, if it is another one."""
    kept = dtype is None or not tensor.is_floating_point()
    size, stride = tensor.size(), tensor.stride()
    with paper():
        return torch.empty_strided(size, stride, dtype=tensor.dtype if kept else dtype, device=device)


def copied_to_paper(module: LightningModule, device: torch.device, dtype: torch.dtype | None = None) -> LightningModule:
    """A copy without memory, with the module's Trainer. What it does leaves no trace in the module.

    `dtype`: of the parameters, if they are computed with in another than their own.
    """
    made: dict[int, Any] = {id(one): like(one, device) for one in _without_numbers(module)}
    for parameter in module.parameters():
        if is_lazy(parameter):
            raise NotImplementedError("the shapes of its parameters follow from the first batch")
        made[id(parameter)] = nn.Parameter(like(parameter, device, dtype), requires_grad=parameter.requires_grad)
    made |= {id(one): like(one, device) for one in module.buffers()}
    copied = copy.deepcopy(module, made)
    copied.trainer = _told(module.trainer)
    for one in copied.modules():
        if "_device" in vars(one):  # Lightning's modules and torchmetrics' metrics, which make tensors there
            one.__dict__["_device"] = device
    for name in ("log", "log_dict"):  # nothing is trained
        copied.__dict__[name] = lambda *args, **kwargs: None
    return copied.train()


def _without_numbers(module: nn.Module) -> Iterator[Tensor]:
    """Attributes on the meta device that are neither parameters nor buffers."""
    waiting: list[Any] = [vars(one) for one in module.modules()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            if value.is_meta:
                yield value
        elif isinstance(value, (Mapping, list, tuple)):
            waiting.extend(value.values() if isinstance(value, Mapping) else value)


def _told(trainer: Trainer) -> Trainer:
    """The same Trainer, which knows its steps without a look at the data: schedules ask for them, and nothing is made of it."""
    steps = trainer.max_steps if trainer.max_steps > 0 else _STEPS
    kind = type(type(trainer).__name__, (type(trainer),), {"estimated_stepping_batches": property(lambda self: steps)})
    told: Any = object.__new__(kind)
    told.__dict__ = trainer.__dict__
    return cast(Trainer, told)


def batch_on_paper(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """A batch without memory. `dtype`: of its floating-point numbers."""
    return apply_to_collection(batch, Tensor, lambda one: like(one, device, dtype))
