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
    known: set[int] = set()  # addresses: several tensors may be views of one memory
    lines = [f"rank {trainer.global_rank}, step {trainer.global_step}, {trainer.strategy.root_device}"]
    for name, tensors in kinds.items():
        bytes_ = 0
        for tensor in tensors:
            if (at := _address(tensor)) and at not in known:
                known.add(at)
                bytes_ += tensor.untyped_storage().nbytes()
        lines.append(f"{_mb(bytes_)}  {name}")
    lines += _others(known)
    if trainer.strategy.root_device.type == "cuda":
        lines += ["", torch.cuda.memory_summary(abbreviated=True)]
    return lines


def _others(known: set[int]) -> list[str]:
    """Lists the tensors that Python knows; what autograd keeps for the backward pass is not among them."""
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for tensor in gc.get_objects():
        if type(tensor) is not Tensor or not (at := _address(tensor)) or at in known:
            continue
        known.add(at)
        kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
        sizes[kind] += tensor.untyped_storage().nbytes()
        counts[kind] += 1
    lines = [f"{_mb(sum(sizes.values()))}  other tensors that Python knows; the largest kinds:"]
    return lines + [f"{_mb(size)}    {counts[kind]} x {kind}" for kind, size in sizes.most_common(_SHOWN)]


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's memory; 0 where it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or on no device
        return 0


def _mb(bytes_: float) -> str:
    return f"{bytes_ / 1e6:12,.2f} MB"
