"""A checkpoint in parts: a folder in which each rank has written what it held of the tensors that were sharded.

`whole.pt` is a checkpoint as any other, but that a mark stands where a tensor was sharded: its name, shape and type, and which
rank's part has which of its slices. `part-00001-of-00003.pt` holds rank 1's slices by name. Whatever is read is mapped into
memory: who asks for a slice reads that, and no whole tensor is made where nobody asks for one.

A run's states in memory have this form, too (`checkpoints/in_memory.py`): there all tensors lie in parts, those of a part in a
file of bytes, whose memory a later state takes over.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from project.errors import UserError

WHOLE = "whole.pt"
_MARK = "tensor in parts"
_ALIGNED = 64  # bytes
T = TypeVar("T")
Content: TypeAlias = dict[str, Any]
"""The content of a file, or a mark in `whole.pt` (`mark`)."""
Place: TypeAlias = tuple[int, Sequence[int], Sequence[int], str]
"""Where a tensor lies in a file of bytes: its first byte, shape, strides and the name of its type."""


def part_name(rank: int, ranks: int) -> str:
    return f"part-{rank:05d}-of-{ranks:05d}.pt"


def bytes_of(part: Path) -> Path:
    """Returns the file with the bytes of a part's tensors, in memory."""
    return part.with_suffix(".bin")


@dataclass(frozen=True)
class Box:
    """A slice of a tensor: where it begins, and how large it is, by dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def count(self) -> int:
        return prod(self.size)

    def index(self) -> tuple[slice, ...]:
        """Returns the slice as an index into the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    def within(self, other: "Box") -> tuple[slice, ...]:
        """Returns what the two have in common, as an index into the other one, which may be empty."""
        slices = []
        for own, others in zip(self.index(), other.index(), strict=True):
            first, end = max(own.start, others.start), min(own.stop, others.stop)
            slices.append(slice(first - others.start, max(first, end) - others.start))
        return tuple(slices)


@dataclass(frozen=True)
class Layout:
    """The layout of a sharded tensor: over a grid of ranks, cut along one dimension of it for each of the grid's.

    Args:
        ranks: by their place in the grid, the last dimension first.
        grid: how many there are along each of its dimensions.
        along: the dimension of the tensor that is cut along each of the grid's; None: there are copies.
    """

    ranks: tuple[int, ...]
    grid: tuple[int, ...]
    along: tuple[int | None, ...]

    def box(self, shape: tuple[int, ...], place: tuple[int, ...]) -> Box:
        """Returns the slice at a place of the grid, cut as `torch.chunk` cuts."""
        start, size = [0] * len(shape), [*shape]
        for dimension, count, index in zip(self.along, self.grid, place, strict=True):
            if dimension is not None:
                each = -(-size[dimension] // count)
                first = min(index * each, size[dimension])
                start[dimension] += first
                size[dimension] = min(each, size[dimension] - first)
        return Box(tuple(start), tuple(size))

    def is_copy(self, place: tuple[int, ...]) -> bool:
        """Returns whether another place, which comes first, has the same slice."""
        return any(at for at, dimension in zip(place, self.along, strict=True) if dimension is None)

    def is_first(self, place: tuple[int, ...]) -> bool:
        """Returns whether the slice there is written: no other place has the same, nor do other ranks' grids."""
        return 0 in self.ranks and not self.is_copy(place)

    def slices(self, shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
        """Yields each slice once, with the rank that has written it."""
        for rank, place in zip(self.ranks, product(*map(range, self.grid)), strict=True):
            box = self.box(shape, place)
            if box.count and not self.is_copy(place):
                yield rank, box


def mark(name: str, tensor: Tensor, layout: Layout) -> dict[str, object]:
    """Returns what stands in `whole.pt` for a tensor that is sharded."""
    return {_MARK: name, "shape": tuple(tensor.shape), "dtype": tensor.dtype, **vars(layout)}


def changed(value: T, change: Callable[[object, str], object], name: str = "") -> T:
    """Returns the same dicts, lists and tuples, with other values in them: `change` receives each value, and its name."""
    if isinstance(value, Mapping) and _MARK not in value:
        made = cast(MutableMapping[object, object], copy(value))
        for key, item in value.items():
            if (new := changed(item, change, f"{name}/{key}")) is not item:
                made[key] = new
        return cast(T, made)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return cast(T, type(value)(changed(item, change, f"{name}/{at}") for at, item in enumerate(value)))
    return cast(T, change(value, name))


# In memory -----------------------------------------------------------------------------------------------------------


def mark_whole_tensors(checkpoint: dict[str, object], rank: int) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Returns a checkpoint with marks in the places of tensors that are not sharded, and these, which lie in this rank's part.

    A tensor that is in several places is there once.
    """
    names: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    layout = Layout((rank,), (), ())

    def take(value: object, _: str) -> object:
        if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):  # torch.save knows others
            return value
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            return value
        name = names.setdefault(id(value), f"#{len(names)}")
        tensors[name] = value.detach()
        return mark(name, value, layout)

    return changed(checkpoint, take), tensors


def places_of(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Place], int]:
    """Returns where tensors lie in a file of bytes, and how many bytes it has."""
    places: dict[str, Place] = {}
    end = 0
    for name, tensor in tensors.items():
        copy = torch.empty_like(tensor, device="meta")  # whose strides are those that a copy has
        places[name] = end, copy.shape, copy.stride(), str(copy.dtype).removeprefix("torch.")
        end += -(-copy.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED
    return places, end


def reserve(file: Path, size: int) -> Tensor:
    """Returns new memory that a file holds. Raises an OSError where there is not enough: a later write would be a SIGBUS."""
    file.unlink(missing_ok=True)
    try:
        with file.open("xb") as opened:
            os.posix_fallocate(opened.fileno(), 0, max(1, size))
    except OSError:
        file.unlink(missing_ok=True)
        raise
    return torch.from_file(str(file), shared=True, size=max(1, size), dtype=torch.uint8)


def view_at(memory: Tensor, place: Place) -> Tensor:
    """Returns the tensor at a place in these bytes."""
    start, shape, strides, name = place
    dtype: torch.dtype = getattr(torch, name)
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
    if count != prod(shape):
        raise UserError(f"a tensor of {tuple(shape)} from {count} values")
    return memory[start : start + count * dtype.itemsize].view(dtype).as_strided(shape, strides)


def load_part(load: Callable[[Path], object], path: Path) -> object:
    """Reads a part with `load`; of a state in memory, maps the bytes of its tensors."""
    if not bytes_of(path).exists():
        return load(path)
    part = json.loads(path.read_text())
    size = bytes_of(path).stat().st_size
    memory = torch.from_file(str(bytes_of(path)), shared=False, size=size, dtype=torch.uint8)
    return {"name": part["name"], "slices": {name: view_at(memory, place) for name, place in part["places"].items()}}


# Reading -------------------------------------------------------------------------------------------------------------


class Stored:
    """A tensor that lies in parts."""

    def __init__(self, folder: "Parted", entry: Content) -> None:
        self.folder, self.name = folder, str(entry[_MARK])
        self.shape: tuple[int, ...] = tuple(entry["shape"])
        self.dtype: torch.dtype = entry["dtype"]
        self.layout = Layout(entry["ranks"], entry["grid"], entry["along"])

    @property
    def all(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)

    def fill(self, tensor: Tensor, wanted: Box) -> Tensor:
        """Reads a slice into a tensor of its size."""
        filled = 0
        for rank, box in self.layout.slices(self.shape):
            destination = tensor[box.within(wanted)]
            if destination.numel():
                destination.copy_(self.folder.slice_of(rank, self.name, box)[wanted.within(box)])
                filled += destination.numel()
        if filled != wanted.count:
            raise UserError(f"{self.folder.path}: {wanted.count - filled} values of {self.name} are in no part.")
        return tensor

    def read(self, wanted: Box | None = None) -> Tensor:
        """Reads a slice, or all of it."""
        wanted = wanted or self.all
        return self.fill(torch.empty(wanted.size, dtype=self.dtype), wanted)


class Parted:
    """A checkpoint's folder. A part is opened when something of it is needed; `load` reads one, mapped into memory."""

    def __init__(self, path: Path, load: Callable[[Path], object]) -> None:
        self.path, self._load = path, load
        self._parts: dict[int, Mapping[str, Tensor]] = {}
        content = self._open(WHOLE, "the part that every rank reads")
        self.name: str = content["name"]
        self.ranks: int = content["ranks"]
        self._whole: dict[str, object] = content["checkpoint"]

    def checkpoint(self, make: Callable[[Stored], object] = Stored.read) -> dict[str, object]:
        """Returns the whole checkpoint, with what `make` makes of each tensor that is sharded; by default, whole ones."""
        copies: dict[str, Tensor] = {}

        def change(value: object, _: str) -> object:
            if not isinstance(value, Mapping):
                return value
            stored = Stored(self, cast(Content, value))
            if stored.layout.grid:
                return make(stored)
            if stored.name not in copies:
                copies[stored.name] = self.slice_of(stored.layout.ranks[0], stored.name, stored.all).clone()
            return copies[stored.name]

        return changed(self._whole, change)

    def slice_of(self, rank: int, name: str, box: Box) -> Tensor:
        """Returns what a rank has written of a tensor."""
        file = part_name(rank, self.ranks)
        if rank not in self._parts:
            content = self._open(file, f"what rank {rank} held")
            if content["name"] != self.name:
                raise UserError(f"{self.path / file} is a part of another checkpoint.")
            self._parts[rank] = content["slices"]
        part = self._parts[rank].get(name)
        if part is None or tuple(part.shape) != box.size:
            raise UserError(f"{self.path / file}: rank {rank} has not written its slice of {name}.")
        return part

    def _open(self, file: str, what: str) -> Content:
        try:
            return cast(Content, self._load(self.path / file))
        except FileNotFoundError:
            raise UserError(
                f"{self.path / file} is missing: {what}. HINT: take an older checkpoint from the same folder; where the "
                "ranks wrote to disks of their own, bring the parts together."
            ) from None
