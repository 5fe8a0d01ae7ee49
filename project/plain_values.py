"""Reads files of `torch.save` as data: whatever one claims, it runs no code, reads no foreign memory, takes what it has.

torch's `weights_only` makes tensors and plain values. Numpy's arrays and numbers, and paths, are made here by constructors that
check what they are given: numpy's own take any memory address for an object, and any offset for a field.
"""

import pickle
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.serialization import MAP_LOCATION

from project.untrusted import regular_size

_CODE = re.compile(r"[biufcSUmM?]\d{0,9}|[?bhilqBHILQefdg]")
_DEPTH = 200  # of lists in lists
_STRETCHED = 1 << 30  # bytes that a tensor may have beyond those of its file
_UNIT = re.compile(rb"[A-Za-z]{1,7}")
_PLACES = ("numpy.core.multiarray", "numpy._core.multiarray")  # numpy 1 and numpy 2


class _Type:
    """A numpy.dtype of numbers, strings or times: no objects, no fields."""

    def __init__(self, code: str, align: bool = False, copy: bool = True) -> None:
        if not isinstance(code, str) or not _CODE.fullmatch(code):
            raise pickle.UnpicklingError(f"an array of {code!r}")
        self.value = np.dtype(code)

    def __setstate__(self, state: Sequence[object]) -> None:
        version, order, base, names, fields, *more = state
        if (base, names, fields) != (None, None, None) or order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("an array of records")
        if version == 4 and self.value.kind in "mM" and more[3] is not None:
            unit, number = cast(Sequence[Sequence[object]], more[3])[1][:2]
            if type(unit) is not bytes or not _UNIT.fullmatch(unit) or type(number) is not int or not 0 < number < 1 << 31:
                raise pickle.UnpicklingError("an array of times without a unit")
            self.value = np.dtype(f"{self.value.kind}8[{number}{unit.decode()}]")
        self.value = self.value.newbyteorder(order)


class _Array:
    """A numpy.ndarray, of bytes that are there."""

    def __init__(self, *_: object) -> None:
        self.value: NDArray[np.generic] = np.empty(0)

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Type, object, bytes]) -> None:  # `_array` checks each
        _, shape, kind, by_columns, data = state
        self.value = _array(kind, data, shape, "F" if by_columns else "C")


def _array(kind: _Type, data: bytes, shape: tuple[int, ...], order: Literal["C", "F"] = "C") -> NDArray[np.generic]:
    if type(kind) is not _Type or type(data) is not bytes or not all(type(size) is int and size >= 0 for size in shape):
        raise pickle.UnpicklingError("an array of something else than bytes")
    if prod(shape) * kind.value.itemsize != len(data):
        raise pickle.UnpicklingError(f"an array of {shape} from {len(data)} bytes")
    if not data:
        return np.empty(shape, kind.value)
    return np.frombuffer(data, kind.value).reshape(shape, order=order).copy(order="K")


def _number(kind: _Type, data: bytes) -> object:
    return _array(kind, data, (1,))[0]


def _no_bytes() -> bytes:
    """Returns the bytes of an array without elements."""
    return b""


_CONSTRUCTORS: list[Callable[..., object] | tuple[Callable[..., object], str]] = [
    (_no_bytes, "builtins.bytes"),
    *((_Type, "numpy.dtype"), (_Array, "numpy.ndarray")),
    *((_Array, f"{place}._reconstruct") for place in _PLACES),
    *((_number, f"{place}.scalar") for place in _PLACES),
    *(PosixPath, PurePosixPath),
]


def plain_values() -> AbstractContextManager[None]:
    """Returns a context in which `torch.load(weights_only=True)` reads numpy's values, which `finished` makes, and paths."""
    context: AbstractContextManager[None] = torch.serialization.safe_globals(_CONSTRUCTORS)
    return context


def finished(value: object, depth: int = 0) -> Any:
    """Returns the same value with numpy's own arrays and types in it.

    Refuses a tensor far larger than its file: a row that stands for 10^12, by a stride of 0, takes its room when copied.
    """
    if depth > _DEPTH:
        raise pickle.UnpicklingError("it is nested too deeply")
    if isinstance(value, (_Array, _Type)):
        return value.value
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        if value.nbytes > (size := value.untyped_storage().nbytes()) + _STRETCHED:
            raise pickle.UnpicklingError(f"a tensor of {tuple(value.shape)} from {size} bytes")
    elif isinstance(value, (Mapping, list)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            if (made := finished(item, depth + 1)) is not item:
                value[key] = made  # type: ignore[index]
    elif isinstance(value, tuple):
        items = tuple(finished(item, depth + 1) for item in value)
        if any(new is not old for new, old in zip(items, value, strict=True)):
            return items if type(value) is tuple else type(value)(*items)
    return value


def load(path: Path, map_location: MAP_LOCATION = "cpu", mmap: bool = True) -> Any:
    """Reads a file of `torch.save`: tensors and plain values. `mmap`: a tensor is read when it is used.

    Refuses an archive that unpacks to more than what is there: torch compresses nothing.
    """
    size = regular_size(path)
    if archived := zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if compressed or sum(entry.file_size for entry in entries) > size:
            raise pickle.UnpicklingError("its archive unpacks to more than it has; torch.save makes no such file")
    with plain_values():
        return finished(torch.load(path, map_location=map_location, mmap=mmap and archived, weights_only=True))
