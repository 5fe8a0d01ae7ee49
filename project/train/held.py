"""What one rank holds, in bytes: a pure function of a network's shapes and of how the ranks share them.

With `fully_shard` (FSDP2) a rank holds its part of each parameter: the first dimension is cut as `torch.chunk` cuts it, and the
first rank's part, which is counted here, is the largest. What is whole for a while is counted as FSDP2 of torch 2.15 has it
(torch/distributed/fsdp/_fully_shard): while a block computes backwards, the next one is gathered into a buffer, its own
gradients are whole, and those of the block before are still on their way to their ranks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
from torch import nn

from project.train.blocks import Named

Shard = Literal["full", "node", "gradients"]


@dataclass(frozen=True)
class Shape:
    """A parameter."""

    size: tuple[int, ...]
    dtype: torch.dtype
    learns: bool = True

    def part(self, parts: int) -> tuple[int, ...]:
        """Of the first of so many ranks."""
        return (-(-self.size[0] // parts), *self.size[1:]) if self.size else ()

    def held(self, parts: int = 1, dtype: torch.dtype | None = None) -> int:
        """Bytes of such a part."""
        return prod(self.part(parts)) * (dtype or self.dtype).itemsize

    def gathered(self, parts: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of all parts, each as large as the first."""
        return self.held(parts, dtype) * parts


@dataclass(frozen=True)
class Inventory:
    """A network's tensors, each once."""

    root: tuple[Shape, ...]
    """Parameters that are in no block."""
    blocks: Mapping[str, tuple[Shape, ...]]
    buffers: int
    """Their bytes: every rank has them whole."""
    averages: int = 0
    """Copies of parameters and buffers that are averaged (EMA)."""

    @property
    def all(self) -> tuple[Shape, ...]:
        return (*self.root, *(one for block in self.blocks.values() for one in block))


def inventory(network: nn.Module, blocks: Named, averages: int = 0) -> Inventory:
    """`blocks`: as train/blocks.py finds them, none within another."""
    taken: set[int] = set()

    def shapes(module: nn.Module) -> tuple[Shape, ...]:
        new = [one for one in module.parameters() if id(one) not in taken]
        taken.update(id(one) for one in new)
        return tuple(Shape(tuple(one.shape), one.dtype, one.requires_grad) for one in new)

    found = {name: shapes(block) for name, block in blocks}
    return Inventory(shapes(network), found, sum(one.nbytes for one in network.buffers()), averages)


@dataclass(frozen=True)
class Sharing:
    """Who has what."""

    ranks: int = 1
    shard: Shard | None = None
    """As in Sharded; None is DDP: every rank has everything."""
    per_host: int = 8
    """Ranks on a host."""
    shared_by: int = 1
    """Ranks that share layers (tensor_parallel). What this saves is not counted: a layer is as if each of them had it whole."""
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    checkpoint_activations: bool = False
    cpu_offload: bool = False
    accumulation: int = 1
    """Micro-batches of a step."""
    exact: bool = False
    on_gpu: bool = False

    @property
    def spread(self) -> bool:
        """As in Sharded: on one rank, only a type of its own makes parts of a network."""
        return self.shard is not None and bool(self.ranks > 1 or self.param_dtype or self.reduce_dtype)

    @property
    def parts(self) -> int:
        """Into which a tensor is cut."""
        if not self.spread:
            return 1
        ranks = min(self.ranks, self.per_host) if self.shard == "node" else self.ranks
        return max(1, ranks // self.shared_by)


@dataclass(frozen=True)
class Held:
    """By one rank, at most, in bytes; None: not known, and `unknown` says why."""

    parameters: int
    gradients: int
    """Between the backward pass and the optimiser's step."""
    whole_gradients: int
    """Between the micro-batches of a step, which are added up before they are sent; 0 where that is not so."""
    optimizer: int | None
    gathered: int
    """What is whole for a while, and the buffers that it travels in."""
    activations: int | None
    others: int
    """Buffers, and averages of the weights."""
    offloaded: bool = False
    """Parameters, gradients and optimiser lie in the host's memory."""
    unknown: Mapping[str, str] = field(default_factory=dict)

    @property
    def on_host(self) -> int:
        """Of a GPU's host."""
        return self.parameters + self.gradients + (self.optimizer or 0) if self.offloaded else 0

    @property
    def total(self) -> int:
        """On the device, of what is known."""
        stays = 0 if self.offloaded else self.parameters + (self.optimizer or 0)
        gradients = 0 if self.offloaded else self.gradients
        return stays + max(gradients, self.whole_gradients) + self.gathered + (self.activations or 0) + self.others


def held(
    inventory: Inventory,
    sharing: Sharing,
    optimizer: int | None = None,
    activations: int | None = None,
    unknown: Mapping[str, str] | None = None,
) -> Held:
    """`optimizer`: bytes of its state, for parts of this size. `activations`: of one micro-batch."""
    learning = [one for one in inventory.all if one.learns]
    waits = sharing.spread and (sharing.accumulation > 1 or sharing.exact)
    return Held(
        parameters=sum(one.held(sharing.parts) for one in inventory.all),
        gradients=sum(one.held(sharing.parts) for one in learning),
        whole_gradients=sum(one.held(dtype=sharing.reduce_dtype) for one in learning) if waits else 0,
        optimizer=optimizer,
        gathered=_gathered(inventory, sharing, waits) if sharing.spread else _buckets(learning, sharing),
        activations=activations,
        others=inventory.buffers + _averages(inventory, sharing.parts),
        offloaded=sharing.spread and sharing.cpu_offload and sharing.on_gpu,
        unknown=unknown or {},
    )


def _averages(inventory: Inventory, parts: int) -> int:
    one = sum(each.held(parts) for each in inventory.all) + inventory.buffers
    return inventory.averages * one


def _buckets(learning: Iterable[Shape], sharing: Sharing) -> int:
    """DDP sends gradients in buckets: on a GPU they lie in there, on a CPU they are copied (train/strategy.py)."""
    if sharing.ranks == 1 or sharing.on_gpu or sharing.exact:
        return 0
    return sum(one.held() for one in learning)


@dataclass(frozen=True)
class _Whole:
    """A block, or the root."""

    parameters: int
    gradients: int
    sent: int
    """The buffer that gradients are sent from."""


def _whole(shapes: Iterable[Shape], sharing: Sharing, waits: bool) -> _Whole:
    shapes = [*shapes]
    learning = [one for one in shapes if one.learns]
    parts, kind = sharing.parts, sharing.param_dtype
    gathered = sum(one.gathered(parts, kind) for one in shapes)
    gradients = 0 if waits else sum(one.held(dtype=kind) for one in learning)  # else they are counted already
    return _Whole(gathered, gradients, sum(one.gathered(parts, sharing.reduce_dtype) for one in learning))


def _gathered(inventory: Inventory, sharing: Sharing, waits: bool) -> int:
    """The most that is whole at once: at the root's gathering, in a block forwards or backwards, or at the root's end."""
    root = _whole(inventory.root, sharing, waits)
    blocks = [_whole(one, sharing, waits) for one in inventory.blocks.values()]
    largest = max((one.parameters for one in blocks), default=0)
    backward = max((one.gradients for one in blocks), default=0) + max((one.sent for one in blocks), default=0)
    if sharing.shard == "gradients":  # blocks stay, and the buffer of one more is there in the forward pass
        gathered = root.parameters + sum(one.parameters for one in blocks) + max(largest, root.gradients + backward)
    else:
        gathered = root.parameters + 2 * largest + root.gradients + backward
    return max(gathered, 2 * root.parameters, root.gradients + root.sent)


def in_bytes(number: float) -> str:
    """As people read it."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if number >= 10 or unit == "B" else f"{number:.1f} {unit}"
