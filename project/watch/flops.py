"""The operations of a step, and what a device could compute in that time."""

import copy
import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from project.watch.peaks import peak_of

log = logging.getLogger(__name__)

_COMPUTES_IN = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32, "64": torch.float64}
"""By what `trainer.precision` begins with."""


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


def flops(network: Any, shape: Sequence[int]) -> float:
    """Returns the floating-point operations for one image of this shape, forwards and backwards; 0 where they can't be counted.

    They are counted on a twin that has shapes and no values.
    """
    if not isinstance(network, nn.Module):
        return 0.0
    try:
        shapes: dict[int, Any] = {}
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
