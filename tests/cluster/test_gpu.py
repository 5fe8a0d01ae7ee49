"""What NVML says of a GPU, where there is none, and what is made of what it would say."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from project.cluster.gpu import Memory, NoLibrary, Nvml, health


class Known(Nvml):
    """Has the answers; what is not among them is not supported, which raises NVML's own error."""

    def __init__(self, **answers: Any) -> None:
        def refuse(*args: Any) -> None:
            raise ArithmeticError

        functions = {name: lambda *args, value=value: value for name, value in answers.items()}
        self._nvml = SimpleNamespace(NVMLError=ArithmeticError, nvmlDeviceGetTemperature=refuse, **functions)
        self._handle = None


def test_without_the_library_it_is_said_what_is_missing() -> None:
    with pytest.raises(NoLibrary, match=r"nvidia-ml-py is not installed|NVML Shared Library Not Found"):
        Nvml(torch.device("cuda"))


def test_a_gpu_with_errors_is_unfit_and_one_that_is_hot_is_slow() -> None:
    report = health(
        Known(
            nvmlDeviceGetTotalEccErrors=3,
            nvmlDeviceGetRemappedRows=(0, 1, 1, 0),
            nvmlDeviceGetCurrentClocksThrottleReasons=0x24,
            nvmlDeviceGetNvLinkState=1,
            nvmlDeviceGetPowerUsage=651_000,
        )
    )
    assert report.unfit == ["3 uncorrected ECC errors", "rows of its memory wait to be exchanged at a reset"]
    assert report.slow == ["too hot"]
    assert report.figures["power"] == 651
    assert report.figures["NVLinks"] == "18 of 18"
    assert "temperature" not in report.figures
    silent = health(Known())
    assert (silent.figures, silent.unfit, silent.slow) == ({}, [], [])


def test_who_holds_the_rest_of_a_gpu_is_named() -> None:
    gib = 1 << 30
    assert str(Memory(79 * gib + 1, 80 * gib, {})) == ""
    text = "30.0 GiB of 80.0 GiB are held by others (process 7: 29.5 GiB, process 8)"
    assert str(Memory(50 * gib, 80 * gib, {7: 59 * gib // 2, 8: None})) == text
