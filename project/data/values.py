"""Computes digests of Python values, without a copy and without code of the user: equal values have equal ones, whether an
array, a tensor or a list holds them."""

import io
import itertools
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Reversible, Sequence, Set, Sized
from functools import lru_cache, partial
from hashlib import sha256
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType
from typing import Protocol, TypeVar

import numpy as np
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.quasirandom import SobolEngine
from torchmetrics import Metric

_LARGEST = 1 << 24  # bytes of a value that is looked at
_MOST = 64  # items of a list that are looked at, at each of its ends
_NAMES = 1024  # a mapping of more is data, and not a state with names
_DEEPEST = 6
_VALUES = 20_000  # that are looked at behind one attribute
_IN_ALL = 200_000  # by one `Digests`: some tenths of a second
_BYTES = 2048  # take as long as a value
_LIBRARIES = frozenset(
    ("torch", "lightning", "pytorch_lightning", "lightning_utilities", "torchmetrics", "project", "numpy", "rich", "tqdm")
)
_OF_NUMPY = (torch.float16, torch.float32, torch.float64)
Digest = bytes | None
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
CACHED = type(lru_cache(len))
"""What functools.lru_cache makes of a function."""
_DRAWING = re.compile("rand|normal|uniform|choice|shuffl|permut|bernoulli|multinomial|poisson|dropout")


def is_of_a_library(kind: type | FunctionType) -> bool:
    """Returns whether a class or a function is Python's, torch's, Lightning's or this project's: such are not examined.

    A class that a library has made of a user's, as `fully_shard` and `parametrize` do, is the user's.
    """
    if isinstance(kind, type):
        return is_in_a_library(str(users_class(kind).__module__))
    return is_in_a_library(str(kind.__module__))


def users_class(kind: type) -> type:
    """Returns the user's layer of which a library has made this class of layers, or the library's layer of which torch has made
    a sharded one; of any other class, the class itself.
    """
    if not issubclass(kind, nn.Module):
        return kind
    own = kind.__mro__[kind.__mro__.index(FSDPModule) + 1] if issubclass(kind, FSDPModule) else kind
    return next((base for base in kind.__mro__ if not is_in_a_library(str(base.__module__))), own)


def is_in_a_library(module: str) -> bool:
    """Returns whether a module is Python's, torch's, Lightning's or this project's."""
    root = module.partition(".")[0]
    return root in _LIBRARIES or (root in sys.stdlib_module_names and root != "__main__")


def is_own_file(module: str) -> bool:
    """Returns whether a module is a file of the user's, and no installed package; also what is typed into a notebook."""
    file = getattr(sys.modules.get(module), "__file__", None)
    installed = file is None or "site-packages" in file or "dist-packages" in file
    return module == "__main__" or not (installed or is_in_a_library(module))


class Digests:
    """Computes digests of values, down to the attributes of the user's own objects, but for the objects in `apart`."""

    def __init__(self, apart: Iterable[object] = ()) -> None:
        self._apart = {id(thing) for thing in apart}
        self._left, self._in_all = 0, _IN_ALL

    def of(self, value: object) -> Digest:
        """Returns a digest; None where it can't be known whether the value has changed."""
        self._left = most = min(_VALUES, self._in_all)
        try:
            digest = self._digest(value, _DEEPEST)
        except Exception:  # a thread of the user's changes it at this moment, or its own state_dict or __len__ fails
            digest = None
        self._in_all -= min(most, most - self._left)
        return digest

    def within(self, value: object) -> set[bytes] | None:
        """Returns the digests of a value, and of all in it that has a name, or a place in a short list; None if that is too
        much."""
        self._in_all = _IN_ALL
        digests = {*self._within(value)}
        return digests if self._in_all > 0 else None

    def _within(self, value: object) -> Iterator[bytes]:
        if (digest := self.of(value)) is not None:
            yield digest
        inner: Iterable[object] = ()
        if isinstance(value, Mapping) and len(value) <= _NAMES:
            inner = value.values()
        elif isinstance(value, (list, tuple)) and len(value) <= 2 * _MOST:
            inner = value
        for item in inner if self._in_all > 0 else ():
            yield from self._within(item)

    def _digest(self, value: object, deep: int) -> Digest:
        self._left -= 1
        if id(value) in self._apart:
            return b"apart"
        if deep < 0 or self._left < 0:
            return None
        if isinstance(value, (Tensor, np.ndarray)):
            return self._of_numbers(value, deep)
        if isinstance(value, (str, bytes, np.datetime64, np.timedelta64)) or value is None:
            return sha256(repr(value).encode()).digest()
        if isinstance(value, (bool, int, float, np.integer, np.floating)):
            exact = isinstance(value, int) and abs(value) >= 1 << 53  # a float could not hold it
            return sha256(repr(value if exact else float(value)).encode()).digest()
        if isinstance(value, GENERATORS):
            return self._digest(_state(value), deep + 2)
        if isinstance(value, LightningOptimizer):
            return self._digest(value.optimizer, deep)
        if isinstance(value, nn.Module):
            state, counted = value.state_dict(), _states_of_metrics(value)
            return self._digest({**state, **counted} if counted and isinstance(state, dict) else state, deep)
        if isinstance(value, Set):
            parts = sorted(self._digest(item, deep - 1) or b"" for item in islice(value, _MOST))
            return _joined([self._digest(len(value), deep), *parts])
        if isinstance(value, Mapping):
            ends = ends_of(value.items()) if isinstance(value, dict) else ends_of([*value.items()])
            return self._joined_ends(len(value), [part for name, item in ends for part in (str(name), item)], deep)
        if isinstance(value, Sequence):
            return self._joined_ends(len(value), ends_of(value), deep)
        return self._of_object(value, deep)

    def _of_numbers(self, value: Tensor | np.ndarray, deep: int) -> Digest:
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, nn.Parameter):  # a shard, say, of which each rank has its own
                return None
            odd = value.is_quantized or value.is_meta or value.is_nested
            if odd or not self._has_time_for(value.numel() * value.element_size()):
                return None
            value = value.detach().cpu()
            if value.layout != torch.strided:
                value = value.to_dense()
            if value.is_floating_point() and value.dtype not in _OF_NUMPY:
                value = value.float()
            value = value.resolve_conj().resolve_neg().numpy()
        elif value.dtype == object or not self._has_time_for(value.nbytes):
            return None
        if value.size < _MOST and value.dtype.kind in "biuf":
            return self._digest(value.tolist(), deep)
        return sha256(value.tobytes()).digest()

    def _has_time_for(self, size: int) -> bool:
        if size <= _LARGEST:
            self._left -= size // _BYTES
        return size <= _LARGEST and self._left >= 0

    def _joined_ends(self, length: int, ends: Sequence[object], deep: int) -> Digest:
        return _joined([self._digest(length, deep), *(self._digest(item, deep - 1) for item in ends)])

    def _of_object(self, value: object, deep: int) -> Digest:
        if isinstance(value, itertools.count):
            return repr(value).encode()
        if isinstance(value, SynchronizedBase):  # multiprocessing.Value and Array, shared with loader processes
            return sha256(bytes(value.get_obj())).digest()
        if isinstance(value, MethodType):
            return self._digest(value.__self__, deep - 1)
        if isinstance(value, partial):
            return self._digest((value.func, value.args, value.keywords), deep - 1)
        if isinstance(value, FunctionType):
            return self._of_function(value, deep)
        if isinstance(value, BuiltinFunctionType):
            names = (getattr(value, name, "") for name in ("__module__", "__qualname__", "__name__"))
            return ".".join(map(str, names)).encode()  # a library's own kind of function may have some of them only
        if isinstance(value, CACHED):  # one that draws is not what it was once it keeps more
            draws = _draws(getattr(value.__wrapped__, "__code__", None))
            return self._digest(value.cache_info().currsize, deep) if draws else None
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            known = {name: item for name, item in frame.f_locals.items() if not isinstance(item, Iterator)} if frame else {}
            return self._digest((frame.f_lasti if frame else "ended", known), deep)
        if isinstance(value, SobolEngine):
            return self._digest(value.num_generated, deep)
        if (state := _state_by_torch(value)) is not None:
            return self._digest(state, deep)
        kept = attributes_of(value)
        if isinstance(value, type) or is_of_a_library(type(value)) or kept is None:
            # Where an iterator stands nobody can ask it. A file is one, too.
            return os.urandom(8) if isinstance(value, Iterator) and not isinstance(value, io.IOBase) else None
        parts = [(name, self._digest(item, deep - 1)) for name, item in [*kept.items()]]
        return _joined([part for name, digest in parts if digest is not None for part in (name.encode(), digest)])

    def _of_function(self, value: FunctionType, deep: int) -> Digest:
        """Returns a function's digest: it changes with its closure, and with its default arguments."""
        name = f"{value.__module__}.{value.__qualname__}".encode()
        if is_of_a_library(value):
            return name
        cells = []
        for cell in value.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # nothing is in it yet
                continue
        own = [kept for kept in (value.__kwdefaults__, value.__dict__) if kept]
        digests = [self._digest(item, deep - 1) for item in (*cells, *(value.__defaults__ or ()), *own)]
        return _joined([name, value.__code__.co_code, *(digest for digest in digests if digest is not None)])


def attributes_of(value: object) -> dict[str, object] | None:
    """Returns an object's attributes, also those that have slots; None where it has none of its own."""
    slots = {
        f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for kind in type(value).__mro__
        if isinstance(names := vars(kind).get("__slots__"), (tuple, list))
        for name in names
    }
    kept = getattr(value, "__dict__", None)
    if not slots and not isinstance(kept, dict):
        return None
    own = {name: item for name, item in [*kept.items()] if not str(name).startswith("__pl_")} if isinstance(kept, dict) else {}
    return {name: getattr(value, name) for name in sorted(slots - own.keys()) if hasattr(value, name)} | own


def _state_by_torch(value: object) -> object:
    """Returns the state of an optimiser or a schedule as torch's own code has it; None where there is code of others in it."""
    method = getattr(type(value), "state_dict", None)
    is_torchs = str(getattr(method, "__module__", "")).startswith("torch.optim.")
    if not isinstance(value, (Optimizer, LRScheduler)) or not is_torchs:
        return None
    hooks = [kept for name, kept in vars(value).items() if "state_dict" in name and kept]
    try:
        return None if hooks else value.state_dict()
    except Exception:  # one that was not made by its own __init__, say
        return None


def _states_of_metrics(module: nn.Module) -> dict[str, object]:
    """Returns the states of the metrics in a module by the names that a state_dict would give them: most are in none."""
    parts = [(path, part) for path, part in module.named_modules() if isinstance(part, Metric)]
    return {f"{path}{'.' if path else ''}{name}": state for path, part in parts for name, state in part.metric_state.items()}


def _draws(code: CodeType | None) -> bool:
    """Returns whether a function seems to draw random numbers, by the names in it."""
    inner = () if code is None else (part for part in code.co_consts if isinstance(part, CodeType))
    return code is not None and (any(map(_DRAWING.search, code.co_names)) or any(map(_draws, inner)))


class Attributes:
    """Tells which attributes of an object have changed since the first look."""

    def __init__(self) -> None:
        self._first: dict[str, bytes] = {}

    def moved(self, thing: object) -> str:
        """Returns the names of attributes, and of methods with a cache, that have changed; '' where none has."""
        cached = {
            name: value for kind in type(thing).__mro__ for name, value in vars(kind).items() if isinstance(value, CACHED)
        }
        digests, kept = Digests(), {**cached, **getattr(thing, "__dict__", {})}
        now = {name: digest for name, value in kept.items() if (digest := digests.of(value)) is not None}
        self._first = self._first or now
        return ", ".join(f"{type(thing).__name__}.{name}" for name, digest in now.items() if self._first.get(name) != digest)


def _state(generator: torch.Generator | random.Random | np.random.Generator | np.random.RandomState) -> object:
    """Returns a generator's state, as a user would save it."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


class _Ended(Sized, Reversible[T_co], Protocol[T_co]):
    """A list, a tuple, a deque, or what a dict gives of its items."""


def ends_of(items: _Ended[T]) -> list[T]:
    """Returns the items of a sequence or a dict; of a long one, those at its ends."""
    ends = [*islice(items, 2 * _MOST)]
    if len(items) > len(ends):  # a deque has no slices
        ends[_MOST:] = islice(reversed(items), _MOST)
    return ends


def _joined(digests: Sequence[Digest]) -> Digest:
    return None if None in digests else sha256(b"".join(part for part in digests if part)).digest()
