"""The peaks of GPUs, by their makers' data sheets: dense, with sums in fp32.

Lightning's table takes an L40S for an L4 and a slice of an H100 for a whole one, and has figures for sparse matrices.
"""

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peak:
    """The peak of one kind of GPU: TFLOP/s by what it computes in, and its multiprocessors."""

    name: str
    """A regular expression; the first that fits counts."""
    multiprocessors: int
    half: float
    """fp16, and bf16 where the GPU has that."""
    tf32: float
    single: float
    double: float


_PEAKS = (
    Peak(r"GB200", 148, 2500, 1250, 80, 40),
    Peak(r"B200", 148, 2250, 1125, 75, 37),
    Peak(r"B100", 148, 1750, 875, 60, 30),
    Peak(r"(H100|H200) NVL", 132, 835, 417.5, 60, 30),
    Peak(r"H100 PCIe", 114, 756, 378, 51.2, 25.6),
    Peak(r"GH200|H200|H100", 132, 989.4, 494.7, 66.9, 33.5),
    Peak(r"A100", 108, 312, 156, 19.5, 9.7),
    Peak(r"A30\b", 56, 165, 82, 10.3, 5.2),
    Peak(r"A40\b", 84, 149.7, 74.8, 37.4, 0.58),
    Peak(r"A10G", 80, 70, 35, 35, 0.5),
    Peak(r"A10\b", 72, 125, 62.5, 31.2, 0.49),
    Peak(r"L40S", 142, 362, 183, 91.6, 1.4),
    Peak(r"L40\b", 142, 181, 90.5, 90.5, 1.4),
    Peak(r"L4\b", 58, 121, 60, 30.3, 0.47),
    Peak(r"RTX 6000 Ada", 142, 364, 182, 91.1, 1.4),
    Peak(r"RTX A6000", 84, 154.8, 77.4, 38.7, 0.6),
    Peak(r"RTX 5090", 170, 209.5, 104.8, 104.8, 1.6),
    Peak(r"RTX 4090", 128, 165.2, 82.6, 82.6, 1.3),
    Peak(r"RTX 4080", 76, 97.5, 48.7, 48.7, 0.76),
    Peak(r"RTX 3090", 82, 71, 35.6, 35.6, 0.56),
    Peak(r"V100-PCI", 80, 112, 14, 14, 7),
    Peak(r"V100", 80, 125, 15.7, 15.7, 7.8),
    Peak(r"T4\b", 40, 65, 8.1, 8.1, 0.25),
)
_NO_BF16 = r"V100|T4\b"


def peak_of(name: str, multiprocessors: int, computes_in: torch.dtype, tf32: bool) -> float | None:
    """Returns the FLOP/s of a GPU of this name; of a slice (MIG), by its share of the multiprocessors. None: not known.

    Args:
        name: as torch.cuda.get_device_name reports it.
        multiprocessors: how many there are.
        computes_in: fp16, bf16, fp32 or fp64.
        tf32: fp32 may be multiplied in TF32.
    """
    peak = next((entry for entry in _PEAKS if re.search(rf"\b({entry.name})", name)), None)
    if peak is None or (computes_in == torch.bfloat16 and re.search(_NO_BF16, name)):
        return None
    half = {torch.float16: peak.half, torch.bfloat16: peak.half}
    known = {**half, torch.float32: peak.tf32 if tf32 else peak.single, torch.float64: peak.double}
    if computes_in not in known:
        return None
    share = multiprocessors / peak.multiprocessors if "MIG" in name else 1.0
    return known[computes_in] * 1e12 * share
