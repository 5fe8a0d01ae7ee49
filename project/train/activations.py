"""What the forward pass of a micro-batch keeps for the backward pass: reckoned on paper, block by block."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from project.train.blocks import Named
from project.train.on_paper import paper

Kept = dict[int, Any]
"""Storages by their identity; held here, so that none is mistaken for one that is gone."""


@dataclass(frozen=True)
class Activations:
    """In bytes."""

    kept: int
    """All that is kept."""
    checkpointed: int
    """Where only what goes into a block is kept, and one block at a time is computed again."""


def activations(
    module: LightningModule, blocks: Named, batch: Any, context: Callable[[], AbstractContextManager[Any]]
) -> Activations:
    """Of `training_step`. What belongs to parameters and buffers is not counted; each storage is counted once.

    `blocks`: of this module. `context`: that of the precision.
    """
    if not module.automatic_optimization:
        raise NotImplementedError("the module takes its steps by itself, which it can't outside of a fit")
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise NotImplementedError("the module takes its batches by itself, which it can't outside of a fit")
    seen = _Seen(module)
    hooks = []
    for name, block in blocks:
        hooks.append(block.register_forward_pre_hook(partial(seen.enters, name), with_kwargs=True))
        hooks.append(block.register_forward_hook(seen.leaves))
    indexed = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    try:
        with paper(), torch.autograd.graph.saved_tensors_hooks(seen.keep, _same), context():
            module.training_step(batch, 0) if indexed else module.training_step(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return seen.counted()


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Seen:
    def __init__(self, module: LightningModule) -> None:
        self._held: Kept = {}
        for one in (*module.parameters(), *module.buffers()):
            self._note(self._held, one)
        self._outside: Kept = {}
        self._inputs: Kept = {}
        self._inside: dict[str, Kept] = {}
        self._at: str | None = None

    def _note(self, kept: Kept, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self._held or kept is self._held:
            kept[id(storage)] = storage

    def enters(self, name: str, block: Any, args: Any, kwargs: Any) -> None:
        self._at = name
        apply_to_collection([args, kwargs], Tensor, partial(self._note, self._inputs))

    def leaves(self, *_: Any) -> None:
        self._at = None

    def keep(self, tensor: Tensor) -> Tensor:
        self._note(self._outside if self._at is None else self._inside.setdefault(self._at, {}), tensor)
        return tensor

    def counted(self) -> Activations:
        everything = {**self._outside}
        for one in self._inside.values():
            everything |= one
        always = {**self._outside, **self._inputs}
        again = [{at: storage for at, storage in one.items() if at not in always} for one in self._inside.values()]
        return Activations(_bytes(everything), _bytes(always) + max(map(_bytes, again), default=0))


def _bytes(kept: Mapping[int, Any]) -> int:
    return sum(storage.nbytes() for storage in kept.values())
