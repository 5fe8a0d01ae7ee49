"""Tensors of which each rank has a shard: shards of others, norms and overflows of all, and their place in a checkpoint."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from project.errors import UserError
from project.parts import Layout, Stored, changed, mark
from project.typed import StateDict


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard; of a tensor that each rank has whole, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(value: object, like: object) -> object:
    """Returns this rank's shard of a tensor, placed like another one of its shape. Of a whole tensor, nothing is sent."""
    if isinstance(value, DTensor):
        if isinstance(like, DTensor):
            if (value.device_mesh, value.placements) == (like.device_mesh, like.placements):
                return value
            if value.device_mesh == like.device_mesh:
                return value.redistribute(like.device_mesh, like.placements)
        elif not isinstance(like, Tensor):
            return value
        value = value.full_tensor()
    if not isinstance(like, DTensor) or not isinstance(value, Tensor):
        return value
    return placed_like(_slice_of(value, like).to(like.to_local().device, copy=True).contiguous(), like)


def view_of(value: Tensor, like: DTensor) -> DTensor:
    """Returns this rank's shard in the memory of the whole tensor."""
    return placed_like(_slice_of(value, like), like)


def gather(tensor: DTensor, device: torch.device) -> Tensor:
    """Returns all of a tensor, which may lie on the host, gathered on a device. Called by all ranks together."""
    return placed_like(tensor.to_local().to(device), tensor).full_tensor()


def placed_like(shard: Tensor, like: DTensor) -> DTensor:
    """Returns a tensor of which this is the shard of this rank, placed like another one of its shape."""
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _slice_of(value: Tensor, like: DTensor) -> Tensor:
    layout, place = layout_of(like.device_mesh, like.placements)
    return value[layout.box(tuple(value.shape), place).index()]


# Over all ranks ------------------------------------------------------------------------------------------------------


def max_over_ranks(flag: Tensor) -> Tensor:
    """Returns the highest of the ranks' flags, on all of them."""
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return flag


def any_rank(flags: Sequence[bool]) -> list[bool]:
    """Returns which flags are set on any rank. Called by all of them with as many."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    tensor = torch.tensor([*flags], dtype=torch.uint8, device=device)
    return [bool(flag) for flag in (max_over_ranks(tensor) if flags else tensor).tolist()]


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Returns the norm of all tensors together, in which each slice counts once. All ranks call this where they are sharded."""
    tensors = [*tensors]
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return torch.nn.utils.get_total_norm(tensors)
    own = []
    for tensor in tensors:
        counts = dist.get_rank() == 0
        if isinstance(tensor, DTensor):
            layout, place = layout_of(tensor.device_mesh, tensor.placements)
            counts = layout.is_first(place)
        if counts:
            own.append(local(tensor))
    norm = torch.nn.utils.get_total_norm(own) if own else local(tensors[0]).new_zeros(())
    total = norm.to(torch.promote_types(norm.dtype, torch.float32)).square()  # one of 16 bits would overflow
    dist.all_reduce(total)
    return total.sqrt()


class _Scaler(Protocol):
    """A GradScaler, one of whose methods is replaced."""

    _unscale_grads_: Callable[..., dict[torch.device, Tensor]]


def skip_overflow_on_all_ranks(scaler: _Scaler) -> None:
    """Has all ranks skip a step whose gradient overflows on one of them, where parameters are placed in several ways: torch's
    GradScaler asks only the ranks that share the first gradient, and the others would take the step, and another scale.
    """
    if "_unscale_grads_" in vars(scaler):  # since another fit
        return
    unscale = scaler._unscale_grads_

    def unscale_everywhere(*args: object) -> dict[torch.device, Tensor]:
        return {device: max_over_ranks(flag) for device, flag in unscale(*args).items()}

    scaler._unscale_grads_ = unscale_everywhere


# A checkpoint --------------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """A checkpoint with marks in the places of sharded tensors, and the slices that this rank writes: of copies, the first."""

    marked: StateDict
    slices: dict[str, Tensor]


def layout_of(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[Layout, tuple[int, ...]]:
    """Returns which rank has which slice of a tensor that is placed so, and this rank's place."""
    # Cut in two ways along one dimension: first for the ranks of a layer, and that part for the data ranks. But a layout is cut
    # from its first dimension to its last.
    is_reversed = any(getattr(placement, "split_factor", 1) > 1 for placement in placements)
    place = mesh.get_coordinate()
    assert place is not None
    return _layout(mesh, placements, is_reversed), tuple(reversed(place) if is_reversed else place)


@lru_cache
def _layout(mesh: DeviceMesh, placements: tuple[Placement, ...], is_reversed: bool) -> Layout:
    along: list[int | None] = []
    for placement in placements:
        if not placement.is_shard() and not placement.is_replicate() and not hasattr(placement, "split_factor"):
            raise UserError(f"A tensor that is spread as {placement} can't be saved. HINT: Shard and Replicate can.")
        along.append(None if placement.is_replicate() else placement.dim)  # type: ignore[attr-defined]
    ranks = mesh.mesh
    if is_reversed:
        ranks, along = ranks.permute(*reversed(range(ranks.ndim))), along[::-1]
    return Layout(tuple(ranks.flatten().tolist()), tuple(ranks.shape), tuple(along))


def split(checkpoint: StateDict) -> Split:
    """Splits a checkpoint into what all ranks have and this rank's slices. Nothing is copied, and nothing is sent."""
    slices: dict[str, Tensor] = {}

    def take(value: object, name: str) -> object:
        if not isinstance(value, DTensor):
            return value
        layout, place = layout_of(value.device_mesh, value.placements)  # the same object: the file has it once
        shard, box = value.to_local(), layout.box(tuple(value.shape), place)
        if name in slices or box.size != tuple(shard.shape):
            raise UserError(f"{name} of the checkpoint can't be saved in parts: two have this name, or it is spread unevenly.")
        if box.count and layout.is_first(place):
            slices[name] = shard
        return mark(name, value, layout)

    return Split(changed(checkpoint, take), slices)


def read_shard(stored: Stored, mesh: DeviceMesh, like: object = None) -> DTensor:
    """Reads this rank's slice of a tensor that lies in parts, placed like another one, or else as `fully_shard` places it."""
    shape = torch.Size(stored.shape)
    if isinstance(like, DTensor) and like.shape == shape:
        mesh, placements, stride = like.device_mesh, like.placements, like.stride()
    else:
        sharded = any(dimension is not None for dimension in stored.layout.along) and bool(shape)
        placements = tuple(Shard(0) if sharded and name != "copies" else Replicate() for name in mesh.mesh_dim_names or ())
        stride = torch.empty(shape, device="meta").stride()
    layout, place = layout_of(mesh, placements)
    shard = stored.read(layout.box(stored.shape, place))
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)
