"""The content of a rank's memory: parameters, gradients, the optimiser's states, and the largest of the other tensors."""

import gc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from project.train.allocator import save_doings
from project.untrusted import make_folder, replacing, write_text

_SHOWN = 15  # kinds of tensors


def write_held(trainer: Trainer, module: LightningModule, stem: Path) -> Path:
    """Writes STEM.txt, and on a GPU STEM.pickle, for https://pytorch.org/memory_viz."""
    make_folder(stem.parent)
    text = stem.with_name(f"{stem.name}.txt")
    write_text(text, "\n".join([*_held(trainer, module), ""]))
    if trainer.strategy.root_device.type == "cuda":
        with replacing(stem.with_name(f"{stem.name}.pickle")) as file:
            save_doings(file)
    return text


def ran_out(error: BaseException) -> bool:
    """Returns whether an error means that memory ran out."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def _held(trainer: Trainer, module: LightningModule) -> list[str]:
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values() if isinstance(state, dict)]
    kinds: dict[str, Iterable[Tensor]] = {
        "parameters": module.parameters(),
        "gradients": [parameter.grad for parameter in module.parameters() if parameter.grad is not None],
        "buffers": module.buffers(),
        "states of the optimisers": [value for state in states for value in state.values() if isinstance(value, Tensor)],
    }
    known: set[int] = set()
    lines = [f"rank {trainer.global_rank}, step {trainer.global_step}, {trainer.strategy.root_device}"]
    lines += [f"{_mb(sum(_bytes(tensor, known) for tensor in tensors))}  {name}" for name, tensors in kinds.items()]
    # What autograd keeps for the backward pass is not among the tensors that Python knows.
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for tensor in gc.get_objects():
        if type(tensor) is Tensor and (size := _bytes(tensor, known)):
            kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
            sizes[kind] += size
            counts[kind] += 1
    lines.append(f"{_mb(sum(sizes.values()))}  other tensors that Python knows; the largest kinds:")
    lines += [f"{_mb(size)}    {counts[kind]} x {kind}" for kind, size in sizes.most_common(_SHOWN)]
    if trainer.strategy.root_device.type == "cuda":
        lines += ["", torch.cuda.memory_summary(abbreviated=True)]
    return lines


def _bytes(tensor: Tensor, known: set[int]) -> int:
    """Returns the bytes of a tensor's memory; 0 where it has none of its own, or its address is known already."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or on no device
        return 0
    if not address or address in known:
        return 0
    known.add(address)
    return tensor.untyped_storage().nbytes()


def _mb(bytes_: float) -> str:
    return f"{bytes_ / 1e6:12,.2f} MB"
