"""Applies a function to each tensor of a batch, also in frozen dataclasses, which Lightning's function leaves as they are."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, cast

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class _IsFrozen(type):
    def __instancecheck__(cls, value: object) -> bool:
        settings = getattr(type(value), "__dataclass_params__", None)
        return settings is not None and bool(settings.frozen)


class _Frozen(metaclass=_IsFrozen):
    """Stands for the frozen dataclasses."""


def apply_to_tensors(batch: object, function: Callable[[Tensor], object]) -> object:
    """Returns a batch with what a function makes of each tensor in it."""

    def apply(value: object) -> object:
        if isinstance(value, Tensor):
            return function(value)
        kept = {field.name: getattr(value, field.name) for field in fields(cast("DataclassInstance", value)) if field.init}
        changed = {name: apply_to_tensors(item, function) for name, item in kept.items()}
        return replace(cast("DataclassInstance", value), **changed)

    return cast(object, apply_to_collection(batch, (Tensor, _Frozen), apply))
