"""Finds the random generators that users' objects hold, wherever these lie: behind a Subset, in a partial or a closure, in a
library's object that a function uses by its name.

No code of the user runs: attributes are read as they lie in an object, and names as they stand in a function's code.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import cast

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import get_worker_info

from project.data.values import CACHED, GENERATORS, Digests, attributes_of, is_of_a_library, is_own_file, users_class

_MOST = 20_000  # objects that are looked at: a tenth of a second
_SHARED = (*(cast(BuiltinFunctionType, draw).__self__ for draw in (np.random.rand, random.random)), torch.default_generator)
"""The generators that all have, which are seeded for each micro-batch."""
_ITEMS = 128  # of a list or a dict, that are looked at
_WHOLE_RUN = (Trainer, Strategy, Logger)
_NOTHING_INSIDE = (str, bytes, int, float, complex, bool, type(None), Tensor, np.ndarray, random.SystemRandom)


class Generators:
    """Tells which generators that are held by some objects have drawn since the first look.

    Args:
        holders: the objects, by name.
    """

    def __init__(self, holders: Iterable[tuple[str, object]]) -> None:
        self._held: dict[str, object] = {}
        for name, generator in held(holders, _is_generator):
            same = sum(of.partition(" ")[0] == name for of in self._held)
            self._held[f"{name} {same + 1}" if same else name] = generator
        self._before = self._digests()

    def moved(self) -> dict[str, bytes]:
        """Returns digests of the generators that have drawn, by name: the way to them from an object."""
        return {name: digest for name, digest in self._digests().items() if digest != self._before[name]}

    def _digests(self) -> dict[str, bytes]:
        digests = Digests()
        return {name: digests.of(generator) or b"" for name, generator in self._held.items()}


def _is_generator(value: object) -> bool:
    # A loader's process can't ask a device.
    can_ask = not isinstance(value, torch.Generator) or value.device.type == "cpu" or get_worker_info() is None
    return issubclass(type(value), GENERATORS) and can_ask and not isinstance(value, random.SystemRandom)


def held(holders: Iterable[tuple[str, object]], is_sought: Callable[[object], bool]) -> Iterator[tuple[str, object]]:
    """Yields what is sought and objects hold, with its name; the nearest objects are looked at first."""
    queue = deque(holders)
    seen = {id(thing): thing for thing in (*_SHARED, *torch.cuda.default_generators)}
    while queue and len(seen) < _MOST:
        name, value = queue.popleft()
        if id(value) in seen:
            continue
        if is_sought(value):
            seen[id(value)] = value  # which keeps it: another one could have its id
            yield name, value
            continue
        if issubclass(type(value), _NOTHING_INSIDE):
            continue
        seen[id(value)] = value
        try:
            queue.extend([(f"{name}.{part}" if part else name, item) for part, item in _inside(value)])
        except Exception:  # of an object that pretends to be another one, or imports what it stands for
            continue


def _inside(value: object) -> Iterator[tuple[str, object]]:
    """Yields what an object holds, with the names of its parts; with none, what is the object itself in another way."""
    kind = type(value)
    if container := next((base for base in (dict, list, tuple, deque, set, frozenset) if issubclass(kind, base)), None):
        each = cast(Callable[[object], Iterable[object]], container.__iter__)(value)  # and not a subclass's own
        items: Iterable[tuple[object, object]] = (
            dict.items(cast(dict[object, object], value)) if container is dict else enumerate(each)
        )
        yield from ((str(key) if type(key) in (str, int) else "item", item) for key, item in islice(items, _ITEMS))
    if container and is_of_a_library(kind):
        return
    if isinstance(value, FunctionType):
        yield from _inside_function(value)
    elif isinstance(value, MethodType):
        yield from (("", value.__self__), (value.__name__, value.__func__))
    elif isinstance(value, partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, (staticmethod, classmethod, CACHED)):
        yield "", value.__wrapped__
    elif isinstance(value, property):
        yield "", value.fget
    elif isinstance(value, type):
        if not is_of_a_library(value) and is_own_file(value.__module__):
            yield from vars(value).items()
            yield from (("", base) for base in value.__bases__)
    elif not isinstance(value, (ModuleType, *_WHOLE_RUN)):
        yield from (attributes_of(value) or {}).items()
        yield "", users_class(type(value))


def _inside_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yields what a function has closed over, its default arguments, and the global objects that stand in its code by name; of
    a package's function no other functions and classes: they would lead through the whole package.
    """
    if is_of_a_library(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from (("default", item) for item in defaults)
    yield from function.__dict__.items()
    names, own = {*_names(function.__code__)}, is_own_file(function.__module__)
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        parts: Mapping[str, object] = {name: value}
        if isinstance(value, ModuleType):
            is_users = own and type(value) is ModuleType and value.__name__ in sys.modules and is_own_file(value.__name__)
            parts = {f"{name}.{part}": vars(value)[part] for part in names & vars(value).keys()} if is_users else {}
        yield from ((part, item) for part, item in parts.items() if own or not isinstance(item, (FunctionType, type)))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
