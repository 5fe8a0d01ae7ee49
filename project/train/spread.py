"""Tensors that are spread over the ranks: this rank's part of them, and what all ranks find in their parts together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from project.errors import UserError
from project.parts import Layout, Stored, changed, mark


def local(tensor: Tensor) -> Tensor:
    """This rank's part; of a tensor that each rank has whole, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(value: Any, like: Any) -> Any:
    """This rank's part of a tensor, spread like another one of its shape. Of a whole tensor, nothing is sent."""
    if isinstance(value, DTensor):
        if isinstance(like, DTensor) and (value.device_mesh, value.placements) != (like.device_mesh, like.placements):
            return value.redistribute(like.device_mesh, like.placements)
        return value.full_tensor() if isinstance(like, Tensor) and not isinstance(like, DTensor) else value
    if not isinstance(like, DTensor) or not isinstance(value, Tensor):
        return value
    here = _sliced(value, like).to(like.to_local().device, copy=True).contiguous()
    return DTensor.from_local(here, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def view_of(value: Tensor, like: DTensor) -> DTensor:
    """The same, in the memory of the whole tensor."""
    here = _sliced(value, like)
    return DTensor.from_local(here, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def _sliced(value: Tensor, like: DTensor) -> Tensor:
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    for at, placement in enumerate(like.placements):
        if placement.is_shard():
            along: int = placement.dim  # type: ignore[attr-defined]
            parts, mine = value.chunk(like.device_mesh.size(at), dim=along), coordinate[at]
            value = parts[mine] if mine < len(parts) else value.narrow(along, 0, 0)
    return value


def parts_like(whole: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Of each whole tensor this rank's part, where the one of that name is spread."""
    return {name: part_of(value, mine.get(name)) for name, value in whole.items()}


def highest(flag: Tensor) -> Tensor:
    """The highest of the ranks' flags, on all of them."""
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return flag


def anywhere(here: Sequence[bool]) -> list[bool]:
    """What holds on any rank. Called by all of them with as many."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flags = torch.tensor([*here], dtype=torch.uint8, device=device)
    if len(flags):
        highest(flags)
    return [bool(one) for one in flags.tolist()]


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The norm of all of them together. All ranks call this where they are spread."""
    found = torch.nn.utils.get_total_norm([*tensors])
    return found.full_tensor() if isinstance(found, DTensor) else found


def clip_parts(parameters: Iterable[Tensor], most: float, norm: Tensor) -> None:
    """As torch's `clip_grads_with_norm_`, which takes no whole norm for gradients that are spread."""
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for one in parameters:
        if one.grad is not None:
            local(one.grad).mul_(factor)


# A checkpoint --------------------------------------------------------------------------------------------------------


@dataclass
class Apart:
    """A checkpoint of which tensors are spread, taken apart: with marks in their places, and this rank's slices."""

    marked: dict[str, Any]
    slices: dict[str, Tensor] = field(default_factory=dict)
    """What this rank has to write: of copies, the first writes."""


def layout_of(tensor: DTensor) -> Layout:
    """Which rank has which slice of a tensor."""
    along: list[int | None] = []
    for placement in tensor.placements:
        if not placement.is_shard() and not placement.is_replicate():
            raise UserError(f"A tensor that is spread as {placement} can't be saved. HINT: Shard and Replicate can.")
        along.append(placement.dim if placement.is_shard() else None)  # type: ignore[attr-defined]
    mesh = tensor.device_mesh.mesh
    return Layout(tuple(mesh.flatten().tolist()), tuple(mesh.shape), tuple(along))


def taken_apart(checkpoint: dict[str, Any]) -> Apart:
    """Nothing is copied, and nothing is sent."""
    found = Apart(checkpoint)
    known: dict[Any, Layout] = {}  # one for all tensors that are spread alike: the file has it once

    def change(value: Any, name: str) -> Any:
        if not isinstance(value, DTensor):
            return value
        how = (value.device_mesh, value.placements)
        layout = known[how] = known.get(how) or layout_of(value)
        _keep(found, name, value, layout)
        return mark(name, value, layout)

    found.marked = changed(checkpoint, change)
    return found


def _keep(found: Apart, name: str, tensor: DTensor, layout: Layout) -> None:
    place, here = tensor.device_mesh.get_coordinate(), tensor.to_local()
    if place is None:
        return
    box = layout.box(tuple(tensor.shape), tuple(place))
    if name in found.slices or box.size != tuple(here.shape):
        raise UserError(f"{name} of the checkpoint can't be saved in parts: two have this name, or it is spread unevenly.")
    if box.count and not layout.is_copy(tuple(place)):
        found.slices[name] = here


def part_of_stored(stored: Stored, mesh: DeviceMesh) -> DTensor:
    """This rank's slice of a tensor that lies in parts, spread over a mesh as `fully_shard` spreads: no other is read."""
    cut = any(dimension is not None for dimension in stored.layout.along) and bool(stored.shape)
    placements = [Replicate() if not cut or name == "copies" else Shard(0) for name in mesh.mesh_dim_names or ()]
    layout = Layout(
        tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape), tuple(0 if one.is_shard() else None for one in placements)
    )
    place = mesh.get_coordinate()
    assert place is not None
    here = stored.read(layout.box(stored.shape, tuple(place)))
    strides = torch.empty(stored.shape, device="meta").stride()
    return DTensor.from_local(here, mesh, placements, run_check=False, shape=torch.Size(stored.shape), stride=strides)
