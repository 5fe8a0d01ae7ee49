"""Tensors that are spread over the ranks: this rank's part of them, and what all ranks find in their parts together."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part; of a tensor that each rank has whole, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(value: Any, like: Any) -> Any:
    """This rank's part of a whole tensor, spread like another one of its shape. Nothing is sent."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
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
