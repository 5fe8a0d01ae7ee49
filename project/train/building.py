"""A model that a YAML names, built without memory for its weights (train/deferred.py), and its hooks that build on it."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import nn

from project.errors import UserError
from project.train.deferred import deferred
from project.train.replayed import HINT, Record, waiting

Made = TypeVar("Made")

_HOOKS = ("setup", "configure_model")  # Lightning calls them before a strategy gives the model its weights


def builder() -> Callable[..., Any]:
    """What makes the modules of a configuration: a class, and what its constructor is given."""
    record = Record()

    def made(class_type: Callable[..., Made], *args: Any, **kwargs: Any) -> Made:
        with deferred(record=record):
            module = class_type(*args, **kwargs)
        _note(record, module)
        return module

    return made


def build_in_hooks(module: nn.Module) -> None:
    """What the module's own hooks do to it is part of building it."""
    for name in _HOOKS if waiting else ():
        if name not in vars(module):
            setattr(module, name, _within(module, getattr(module, name)))


def built(module: nn.Module) -> None:
    """Its hooks are its own again; a UserError says so where weights were changed in between by others, and would be lost."""
    for name in _HOOKS:
        vars(module).pop(name, None)
    for record in waiting:
        for name, one in module.named_parameters():
            if record.knows(one) and record.versions.get(id(one), one._version) != one._version:
                raise UserError(
                    f"{name} was changed after the model was built, by neither its setup nor configure_model. {HINT}"
                )


def _within(module: nn.Module, usual: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(usual)
    def within(*args: Any, **kwargs: Any) -> Any:
        record = waiting[-1]
        with deferred(record=record):
            found = usual(*args, **kwargs)
        _note(record, module)
        return found

    return within


def _note(record: Record, module: Any) -> None:
    if isinstance(module, nn.Module):
        record.versions |= {id(one): one._version for one in module.parameters()}
