"""Reads files of `torch.save` as data: whatever one claims, it runs no code, reads no foreign memory, takes what it has.

torch's `weights_only` makes tensors and plain values. Numpy's arrays and numbers, and paths, are made here by constructors that
check what they are given: numpy's own take any memory address for an object, and any offset for a field.
"""

import pickle
import re
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import numpy as np
import torch

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
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        version, order, base, names, fields, *more = state
        if (base, names, fields) != (None, None, None) or order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("an array of records")
        if version == 4 and self.dtype.kind in "mM" and more[3] is not None:
            unit, number = more[3][1][:2]
            if not _UNIT.fullmatch(unit) or type(number) is not int or not 0 < number < 1 << 31:
                raise pickle.UnpicklingError("an array of times without a unit")
            self.dtype = np.dtype(f"{self.dtype.kind}8[{number}{unit.decode()}]")
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """A numpy.ndarray, of bytes that are there."""

    def __init__(self, *_: object) -> None:
        self.value = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, data = state
        self.value = _array(kind, data, shape, "F" if by_columns else "C")


def _array(kind: _Type, data: bytes, shape: tuple[int, ...], order: Any = "C") -> np.ndarray[Any, Any]:
    if type(kind) is not _Type or type(data) is not bytes or not all(type(size) is int and size >= 0 for size in shape):
        raise pickle.UnpicklingError("an array of something else than bytes")
    if prod(shape) * kind.dtype.itemsize != len(data):
        raise pickle.UnpicklingError(f"an array of {shape} from {len(data)} bytes")
    if not data:
        return np.empty(shape, kind.dtype)
    return np.frombuffer(data, kind.dtype).reshape(shape, order=order).copy(order="K")


def _number(kind: _Type, data: bytes) -> Any:
    return _array(kind, data, (1,))[0]


def _no_bytes() -> bytes:
    """Returns the bytes of an array without elements."""
    return b""


_CONSTRUCTORS: list[Any] = [
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


def finished(value: Any, depth: int = 0) -> Any:
    """Returns the same value with numpy's own arrays and types in it."""
    if depth > _DEPTH:
        raise pickle.UnpicklingError("it is nested too deeply")
    if type(value) is _Array:
        return value.value
    if type(value) is _Type:
        return value.dtype
    if isinstance(value, torch.Tensor):
        _check_size(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            if (made := finished(item, depth + 1)) is not item:
                value[key] = made  # type: ignore[index]
        return value
    if isinstance(value, list):
        value[:] = [finished(item, depth + 1) for item in value]
        return value
    if isinstance(value, tuple):
        made = tuple(finished(item, depth + 1) for item in value)
        if all(new is old for new, old in zip(made, value, strict=True)):
            return value
        return made if type(value) is tuple else type(value)(*made)
    return value


def _check_size(tensor: torch.Tensor) -> None:
    """Refuses a tensor far larger than its file: a row that stands for 10^12, by a stride of 0, takes its room when copied."""
    if tensor.layout == torch.strided and tensor.nbytes > tensor.untyped_storage().nbytes() + _STRETCHED:
        raise pickle.UnpicklingError(f"a tensor of {tuple(tensor.shape)} from {tensor.untyped_storage().nbytes()} bytes")


def load(path: Path, map_location: Any = "cpu", mmap: bool = True) -> Any:
    """Reads a file of `torch.save`: tensors and plain values. `mmap`: a tensor is read when it is used."""
    size = regular_size(path)
    archive = zipfile.is_zipfile(path)
    if archive:
        _check_archive(path, size)
    with plain_values():
        return finished(torch.load(path, map_location=map_location, mmap=mmap and archive, weights_only=True))


def _check_archive(path: Path, size: int) -> None:
    """Refuses an archive that unpacks to more than what is there: torch compresses nothing."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if sum(entry.file_size for entry in entries) > size or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise pickle.UnpicklingError("its archive unpacks to more than it has; torch.save makes no such file")
