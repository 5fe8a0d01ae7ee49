"""Chooses the precision of a run that has no GPU, and the one that `auto` takes."""

from collections.abc import Mapping

import torch


def on_cpu(accelerator: object) -> bool:
    """Returns whether `trainer.accelerator` means a CPU here."""
    return accelerator == "cpu" or (
        accelerator == "auto" and not torch.cuda.is_available() and not torch.backends.mps.is_available()
    )


def auto_precision() -> str:
    """Returns the precision of `auto`: on GPUs that multiply in bf16 (from compute capability 8.0 on) that, as it needs no
    scaling of the loss.
    """
    return "bf16-mixed" if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0) else "16-mixed"


def _computes_in_bf16(has: Mapping[str, object]) -> bool:
    """Returns whether oneDNN, which torch calls on a CPU with these capabilities, has kernels in bf16 for it."""
    if has.get("architecture") != "x86_64":
        return any("bf16" in name and bool(value) for name, value in has.items())
    avx512 = has.get("avx512_bw") and has.get("avx512_vl") and has.get("avx512_dq")
    return bool(avx512 or has.get("avx_ne_convert"))


def _fast_in_bf16() -> bool:
    """Returns whether this CPU is faster in bf16, by what it has, and not by a measurement: all ranks must find the same.
    Measured: an AMD EPYC with AVX512_BF16 is 2.2 times as fast as in fp32, an Intel Xeon with that and without AMX 0.7
    times.
    """
    has = torch.cpu.get_capabilities()
    if has.get("architecture") != "x86_64":
        return _computes_in_bf16(has)
    return bool(has.get("amx_bf16")) or (bool(has.get("avx512_bf16")) and "Intel" not in str(has.get("cpu_name")))


def cpu_precision(precision: str) -> tuple[str, str | None]:
    """Returns the precision to use where there is no GPU, and why it is another than the one in the configuration."""
    if precision not in ("16-mixed", "16", "bf16-mixed", "bf16", "16-true"):
        return precision, None
    if precision.startswith("bf16") and _computes_in_bf16(torch.cpu.get_capabilities()):
        return precision, None  # asked for by name
    if _fast_in_bf16():
        taken, reason = "bf16-mixed", "there is no GPU, and this CPU computes in bf16"
    else:
        taken, reason = "32-true", "there is no GPU, and this CPU is no faster in bf16"
    return taken, None if taken == precision else reason
