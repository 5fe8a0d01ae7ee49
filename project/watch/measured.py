"""The measurements of a rank: the moments of its steps, and of a window of them what is sent to the other ranks."""

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from project.watch.stragglers import Times

Mark = Any  # a moment: seconds, or an event on the device


@dataclass
class StepTimes:
    """The moments of one step."""

    before: Mark = None  # the end of the last step, unless there was a validation in between
    fetches: list[tuple[Mark, Mark]] = field(default_factory=list)  # of each micro-batch
    forwards: list[tuple[Mark, Mark]] = field(default_factory=list)
    backwards: list[tuple[Mark, Mark]] = field(default_factory=list)
    own_work: Mark = None  # the last gradient is there; from here on it is the others' turn
    optimizer: Mark = None  # it begins its step
    end: Mark = None
    samples: int = 0


@dataclass(frozen=True)
class Measured:
    """The measurements of a rank in a window, on the average of its steps."""

    times: Times
    samples: float
    host_memory: float
    """Bytes of the process, now."""
    device_memory: float
    """Bytes, at most since the start; 0 without a GPU."""
    cores: float
    """The cores that the process kept busy."""
    gpu: float
    """The share of time in which the GPU computed anything; NaN where nothing reports it."""

    def row(self) -> Tensor:
        times, *rest = vars(self).values()
        return torch.tensor([*vars(times).values(), *rest], dtype=torch.float64)

    @staticmethod
    def of(row: Tensor) -> "Measured":
        numbers, phases = row.tolist(), len(fields(Times))
        return Measured(Times(*numbers[:phases]), *numbers[phases:])


def host_memory() -> float:
    """Returns the bytes that this process has in the host's memory; its loader processes have their own."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):  # another system
        return 0.0


def gpu_use() -> float:
    """Returns the share of the last moments in which this rank's GPU computed; NaN without nvidia-ml-py (the extra gpu)."""
    try:
        return torch.cuda.utilization() / 100
    except Exception:
        return math.nan
