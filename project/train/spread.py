"""Tensors that are spread over the ranks: this rank's part of them, and what all ranks find in their parts together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from project.errors import UserError
from project.parts import Layout, Stored, changed, mark


def local(tensor: Tensor) -> Tensor:
    """This rank's part; of a tensor that each rank has whole, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(value: Any, like: Any) -> Any:
    """This rank's part of a tensor, spread like another one of its shape. Of a whole tensor, nothing is sent."""
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
    here = _sliced(value, like).to(like.to_local().device, copy=True).contiguous()
    return DTensor.from_local(here, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def whole(tensor: DTensor, device: torch.device) -> Tensor:
    """Returns all of a tensor, which may lie on the host, gathered by way of a device. Called by all ranks together."""
    here, how = tensor.to_local().to(device), (tensor.device_mesh, tensor.placements)
    return DTensor.from_local(here, *how, run_check=False, shape=tensor.shape, stride=tensor.stride()).full_tensor()


def view_of(value: Tensor, like: DTensor) -> DTensor:
    """The same, in the memory of the whole tensor."""
    here = _sliced(value, like)
    return DTensor.from_local(here, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def _sliced(value: Tensor, like: DTensor) -> Tensor:
    layout, place = here_of(like)
    box = layout.box(tuple(value.shape), place)
    return value[tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))]


def parts_like(whole: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Of each whole tensor this rank's part, where the one of that name is spread."""
    return {name: part_of(value, mine.get(name)) for name, value in whole.items()}


def highest(flag: Tensor) -> Tensor:
    """The highest of the ranks' flags, on all of them."""
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return flag


def anywhere(here: Sequence[bool]) -> list[bool]:
    """What holds on any rank. Called by all of them with as many."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    flags = torch.tensor([*here], dtype=torch.uint8, device=device)
    if len(flags):
        highest(flags)
    return [bool(one) for one in flags.tolist()]


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The norm of all of them together. All ranks call this where they are spread."""
    tensors = [*tensors]
    if len({(one.device_mesh, one.placements) for one in tensors if isinstance(one, DTensor)}) > 1:
        return _norm_of_different(tensors)
    found = torch.nn.utils.get_total_norm(tensors)
    return found.full_tensor() if isinstance(found, DTensor) else found


def _norm_of_different(tensors: Sequence[Tensor]) -> Tensor:
    """Of tensors that are spread in several ways, which torch takes no norm of together: each slice counts once."""
    known: dict[Any, bool] = {}
    for one in tensors:
        if isinstance(one, DTensor) and (how := (one.device_mesh, one.placements)) not in known:
            layout, place = here_of(one)
            known[how] = layout.is_first(place)
    first = dist.get_rank() == 0
    own = [local(one) for one in tensors if (known[one.device_mesh, one.placements] if isinstance(one, DTensor) else first)]
    norms = torch.nn.utils.get_total_norm(own) if own else local(tensors[0]).new_zeros(())
    total = norms.square()
    dist.all_reduce(total)
    return total.sqrt()


def clip_parts(parameters: Iterable[Tensor], most: float, norm: Tensor) -> None:
    """As torch's `clip_grads_with_norm_`, which takes no whole norm for gradients that are spread."""
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for one in parameters:
        if one.grad is not None:
            local(one.grad).mul_(factor)


def clip_together(optimizer: Optimizer, most: float) -> None:
    """In the place of Lightning's `clip_grad_by_norm`, where parameters are spread in several ways."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    clip_parts(parameters, most, total_norm([one.grad for one in parameters if one.grad is not None]))


def clip_values(optimizer: Optimizer, most: float) -> None:
    """Clips gradients by value, also in a step that is left out: torch's own fails where no parameter has a gradient."""
    learned = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    if learned:
        torch.nn.utils.clip_grad_value_(learned, most)


def overflow_together(scaler: Any) -> None:
    """Has all ranks skip a step whose gradient overflows on one of them, where parameters are spread in several ways: torch's
    GradScaler asks only the ranks that share the first gradient, and the others would take the step, and another scale."""
    if "_unscale_grads_" in vars(scaler):  # since another fit
        return
    unscale = scaler._unscale_grads_

    def unscale_everywhere(*args: Any) -> dict[torch.device, Tensor]:
        flags: dict[torch.device, Tensor] = unscale(*args)
        return {device: highest(flag) for device, flag in flags.items()}

    scaler._unscale_grads_ = unscale_everywhere


# A checkpoint --------------------------------------------------------------------------------------------------------


@dataclass
class Apart:
    """A checkpoint of which tensors are spread, taken apart: with marks in their places, and this rank's slices."""

    marked: dict[str, Any]
    slices: dict[str, Tensor] = field(default_factory=dict)
    """What this rank has to write: of copies, the first writes."""


def here_of(tensor: DTensor) -> tuple[Layout, tuple[int, ...]]:
    """Which rank has which slice of a tensor, and this rank's place."""
    along: list[int | None] = []
    strided = False
    for placement in tensor.placements:
        # One that is cut in two ways along one dimension: first for the ranks of a layer, and that part for the data ranks.
        strided = strided or getattr(placement, "split_factor", 1) > 1
        if not placement.is_shard() and not placement.is_replicate() and not hasattr(placement, "split_factor"):
            raise UserError(f"A tensor that is spread as {placement} can't be saved. HINT: Shard and Replicate can.")
        along.append(None if placement.is_replicate() else placement.dim)  # type: ignore[attr-defined]
    mesh, place = tensor.device_mesh.mesh, tensor.device_mesh.get_coordinate()
    assert place is not None
    if strided:  # a layout is cut from its first dimension to its last
        mesh, along, place = mesh.permute(*reversed(range(mesh.ndim))), along[::-1], place[::-1]
    return Layout(tuple(mesh.flatten().tolist()), tuple(mesh.shape), tuple(along)), tuple(place)


def taken_apart(checkpoint: dict[str, Any]) -> Apart:
    """Nothing is copied, and nothing is sent."""
    found = Apart(checkpoint)
    known: dict[Any, tuple[Layout, tuple[int, ...]]] = {}  # one for all tensors that are spread alike: the file has it once

    def change(value: Any, name: str) -> Any:
        if not isinstance(value, DTensor):
            return value
        how = (value.device_mesh, value.placements)
        layout, place = known[how] = known.get(how) or here_of(value)
        _keep(found, name, value, layout, place)
        return mark(name, value, layout)

    found.marked = changed(checkpoint, change)
    return found


def _keep(found: Apart, name: str, tensor: DTensor, layout: Layout, place: tuple[int, ...]) -> None:
    here = tensor.to_local()
    box = layout.box(tuple(tensor.shape), place)
    if name in found.slices or box.size != tuple(here.shape):
        raise UserError(f"{name} of the checkpoint can't be saved in parts: two have this name, or it is spread unevenly.")
    if box.count and layout.is_first(place):
        found.slices[name] = here


def part_of_stored(stored: Stored, mesh: DeviceMesh, like: Any = None) -> DTensor:
    """This rank's slice of a tensor that lies in parts, spread like another one, or else over a mesh as `fully_shard` spreads.
    No other is read."""
    if isinstance(like, DTensor) and tuple(like.shape) == stored.shape:
        layout, place = here_of(like)
        read = stored.read(layout.box(stored.shape, place))
        how = like.device_mesh, like.placements
        return DTensor.from_local(read, *how, run_check=False, shape=like.shape, stride=like.stride())
    cut = any(dimension is not None for dimension in stored.layout.along) and bool(stored.shape)
    placements = [Replicate() if not cut or name == "copies" else Shard(0) for name in mesh.mesh_dim_names or ()]
    layout = Layout(
        tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape), tuple(0 if one.is_shard() else None for one in placements)
    )
    at = mesh.get_coordinate()
    assert at is not None
    here = stored.read(layout.box(stored.shape, tuple(at)))
    strides = torch.empty(stored.shape, device="meta").stride()
    return DTensor.from_local(here, mesh, placements, run_check=False, shape=torch.Size(stored.shape), stride=strides)
