"""The operations of a step, and what a device could compute in that time."""

import copy
import logging
import re
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from project.typed import TypedTrainer

log = logging.getLogger(__name__)

_COMPUTES_IN = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32, "64": torch.float64}
"""By what `trainer.precision` begins with."""
_PEAKS = {
    r"GB200": (148, 2500, 1250, 80, 40),
    r"B200": (148, 2250, 1125, 75, 37),
    r"B100": (148, 1750, 875, 60, 30),
    r"(H100|H200) NVL": (132, 835, 417.5, 60, 30),
    r"H100 PCIe": (114, 756, 378, 51.2, 25.6),
    r"GH200|H200|H100": (132, 989.4, 494.7, 66.9, 33.5),
    r"A100": (108, 312, 156, 19.5, 9.7),
    r"A30\b": (56, 165, 82, 10.3, 5.2),
    r"A40\b": (84, 149.7, 74.8, 37.4, 0.58),
    r"A10G": (80, 70, 35, 35, 0.5),
    r"A10\b": (72, 125, 62.5, 31.2, 0.49),
    r"L40S": (142, 362, 183, 91.6, 1.4),
    r"L40\b": (142, 181, 90.5, 90.5, 1.4),
    r"L4\b": (58, 121, 60, 30.3, 0.47),
    r"RTX 6000 Ada": (142, 364, 182, 91.1, 1.4),
    r"RTX A6000": (84, 154.8, 77.4, 38.7, 0.6),
    r"RTX 5090": (170, 209.5, 104.8, 104.8, 1.6),
    r"RTX 4090": (128, 165.2, 82.6, 82.6, 1.3),
    r"RTX 4080": (76, 97.5, 48.7, 48.7, 0.76),
    r"RTX 3090": (82, 71, 35.6, 35.6, 0.56),
    r"V100-PCI": (80, 112, 14, 14, 7),
    r"V100": (80, 125, 15.7, 15.7, 7.8),
    r"T4\b": (40, 65, 8.1, 8.1, 0.25),
}
"""The peaks of GPUs, by their makers' data sheets: dense, with sums in fp32. By a regular expression of the name, of which the
first that fits counts: multiprocessors, then TFLOP/s in fp16 (and bf16, where the GPU has that), TF32, fp32 and fp64.
Lightning's table takes an L40S for an L4 and a slice of an H100 for a whole one, and has figures for sparse matrices."""
_NO_BF16 = r"V100|T4\b"


def peak(trainer: Trainer) -> float | None:
    """Returns the floating-point operations a second of a rank's device in this precision, where that is known."""
    computes = _COMPUTES_IN.get(str(trainer.precision).partition("-")[0])
    device = trainer.strategy.root_device
    if computes is None or device.type != "cuda":
        return None
    known = torch.cuda.get_device_properties(device)
    # torch allows TF32 in convolutions unless it is told not to, and in matrix products if it is told to.
    tf32 = torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"
    return peak_of(known.name, known.multi_processor_count, computes, tf32)


def least_seconds(trainer: TypedTrainer, sample_shape: Callable[[], Sequence[int]]) -> float:
    """Returns the least time of a fit: its floating-point operations, at the peak of its devices; 0 if not known."""
    if not (fastest := peak(trainer)):
        return 0.0
    samples = trainer.estimated_stepping_batches * (trainer.global_batch or 0)
    return flops(network_of(trainer.lightning_module), sample_shape()) * samples / (fastest * trainer.world_size)


def network_of(module: nn.Module) -> nn.Module | None:
    """Returns the part of a module that takes the images, by its name."""
    return dict(module.named_modules(remove_duplicate=False)).get("network")


def flops(network: object, shape: Sequence[int]) -> float:
    """Returns the floating-point operations for one image of this shape, forwards and backwards; 0 where they can't be counted.

    They are counted on a twin that has shapes and no values.
    """
    if not isinstance(network, nn.Module):
        return 0.0
    try:
        shapes: dict[int, torch.Tensor] = {}
        for tensor in chain(network.parameters(), network.buffers()):
            like = torch.empty_like(tensor, device="meta")
            shapes[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like
        images = torch.empty(2, *shape, device="meta", dtype=next(network.parameters()).dtype)
        twin = copy.deepcopy(network, shapes)
        # What has no values has no anomalies either.
        unwatched = torch.autograd.set_detect_anomaly(False)
        with unwatched, torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
            twin(images).sum().backward()
    except Exception as error:  # a network may do what can't be done without values
        log.debug("The operations of this network can't be counted: %s", error)
        return 0.0
    return float(counter.get_total_flops() / len(images))


def peak_of(name: str, multiprocessors: int, computes_in: torch.dtype, tf32: bool) -> float | None:
    """Returns the FLOP/s of a GPU of this name; of a slice (MIG), by its share of the multiprocessors. None: not known."""
    peak = next((peak for pattern, peak in _PEAKS.items() if re.search(rf"\b({pattern})", name)), None)
    if peak is None or (computes_in == torch.bfloat16 and re.search(_NO_BF16, name)):
        return None
    whole, half, fast, single, double = peak
    known = {torch.float16: half, torch.bfloat16: half, torch.float32: fast if tf32 else single, torch.float64: double}
    share = multiprocessors / whole if "MIG" in name else 1.0
    return known[computes_in] * 1e12 * share if computes_in in known else None
