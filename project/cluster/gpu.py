"""Reads what is left of a GPU's memory, which processes hold some, and whether NVIDIA's library (NVML) finds the GPU fit."""

import importlib
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

EXTRA = "Install nvidia-ml-py (the extra `gpu`): the doctor then looks at ECC errors, throttling, clocks, power and NVLink."
_CONTEXT = 1 << 30  # bytes that this process may itself hold beside torch's: its context, libraries
_SLOWED = {0x8: "slowed down by its hardware", 0x20: "too hot", 0x40: "far too hot", 0x80: "short of power"}
"""Bits of NVML's reasons for a lower clock that are not usual; a power cap and idleness are."""


class NoLibrary(Exception):
    """Raised where NVML can't be queried; its text names the reason."""


class Nvml:
    """The view that NVML has of a device of torch. A value that a GPU or its driver does not support is None."""

    def __init__(self, device: torch.device) -> None:
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            raise NoLibrary("nvidia-ml-py is not installed") from None
        try:
            self._nvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # CUDA_VISIBLE_DEVICES may have other numbers
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:  # no driver, no permission, a slice of a GPU
            raise NoLibrary(f"NVML: {error}") from None

    def ask(self, name: str, *args: object) -> Any:
        try:
            return getattr(self._nvml, name)(self._handle, *args)
        except (self._nvml.NVMLError, AttributeError):  # an older driver, or an older nvidia-ml-py
            return None

    def watts(self, name: str) -> float | None:
        """Returns a power of which NVML tells the milliwatts."""
        power = self.ask(name)
        return None if power is None else power / 1e3

    def links(self) -> list[int]:
        """Returns the state of each NVLink: 1 is up."""
        return [state for link in range(18) if (state := self.ask("nvmlDeviceGetNvLinkState", link)) is not None]


@dataclass(frozen=True)
class Memory:
    """The memory of a GPU, in bytes: what this process can have, and the total."""

    left: int
    total: int
    holders: dict[int, int | None]
    """Processes that hold some, as far as NVML shows them."""

    def __str__(self) -> str:
        """Returns what other processes hold, as text; '' where that is little."""
        if (taken := self.total - self.left) < _CONTEXT:
            return ""
        sizes = {pid: "" if held is None else f": {held / 2**30:.1f} GiB" for pid, held in self.holders.items()}
        known = ", ".join(f"process {pid}{size}" for pid, size in sizes.items())
        return f"{taken / 2**30:.1f} GiB of {self.total / 2**30:.1f} GiB are held by others{known and f' ({known})'}"


def memory(device: torch.device) -> Memory:
    free, total = torch.cuda.mem_get_info(device)
    left = free + torch.cuda.memory_reserved(device)  # what torch has taken of it already is this process's own
    try:
        running = Nvml(device).ask("nvmlDeviceGetComputeRunningProcesses") if total - left >= _CONTEXT else None
    except NoLibrary:
        running = None
    return Memory(left, total, {process.pid: process.usedGpuMemory for process in running or () if process.pid != os.getpid()})


@dataclass(frozen=True)
class Health:
    """The health of a GPU as NVML reports it: figures, what makes it unfit, and what makes it slower than others."""

    figures: dict[str, float | str]
    unfit: list[str]
    slow: list[str]


def health(nvml: Nvml) -> Health:
    ask = nvml.ask
    errors, rows = ask("nvmlDeviceGetTotalEccErrors", 1, 0), ask("nvmlDeviceGetRemappedRows")  # uncorrected, since the start
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    links = nvml.links()
    figures = {
        "uncorrected ECC errors": errors,
        "temperature": ask("nvmlDeviceGetTemperature", 0),
        "power": nvml.watts("nvmlDeviceGetPowerUsage"),
        "power limit": nvml.watts("nvmlDeviceGetEnforcedPowerLimit"),
        "clock": ask("nvmlDeviceGetClockInfo", 1),  # MHz, of its multiprocessors
        "highest clock": ask("nvmlDeviceGetMaxClockInfo", 1),
        "throttle reasons": reasons,
        "NVLinks": links and f"{sum(links)} of {len(links)}",
    }
    unfit = [f"{errors} uncorrected ECC errors"] if errors else []
    if rows and rows[2]:
        unfit.append("rows of its memory wait to be exchanged at a reset")
    if rows and rows[3]:
        unfit.append("rows of its memory could not be exchanged")
    slow = [text for bit, text in _SLOWED.items() if reasons and reasons & bit]
    if any(links) and not all(links):
        slow.append(f"{links.count(0)} of {len(links)} NVLinks are down")
    return Health({name: value for name, value in figures.items() if value not in (None, [])}, unfit, slow)


class Telemetry(Nvml):
    """Reads the figures of a GPU that a monitoring system follows; those that it does not have are left out."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._events: object = None
        """The events into which the driver puts critical errors from now on; None where it does not."""
        self._xids = Counter[int]()
        with suppress(self._nvml.NVMLError, AttributeError):
            events = self._nvml.nvmlEventSetCreate()
            self._nvml.nvmlDeviceRegisterEvents(self._handle, self._nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def read(self) -> dict[str, float]:
        """Returns the figures by the names of the metrics, in base units."""
        ask, links = self.ask, self.links()
        memory, use = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
        clock = ask("nvmlDeviceGetClockInfo", 1)
        errors = [ask("nvmlDeviceGetNvLinkErrorCounter", link, kind) for link in range(len(links)) for kind in range(3)]
        values = {
            "power_watts": self.watts("nvmlDeviceGetPowerUsage"),
            "power_limit_watts": self.watts("nvmlDeviceGetEnforcedPowerLimit"),
            "clock_hertz": None if clock is None else clock * 1e6,
            "temperature_celsius": ask("nvmlDeviceGetTemperature", 0),
            "use_ratio": None if use is None else use.gpu / 100,
            "memory_used_bytes": None if memory is None else memory.used,
            "throttle_reasons": ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
            "ecc_corrected_errors": ask("nvmlDeviceGetTotalEccErrors", 0, 0),  # since the driver was loaded
            "ecc_uncorrected_errors": ask("nvmlDeviceGetTotalEccErrors", 1, 0),
            "nvlinks_up": float(sum(links)) if links else None,
            "nvlinks": float(len(links)) if links else None,
            "nvlink_errors": sum(known) if (known := [count for count in errors if count is not None]) else None,
        }
        return {name: float(value) for name, value in values.items() if value is not None}

    def xids(self) -> dict[int, int]:
        """Returns how many of each of NVIDIA's errors (Xid) the driver has reported since the run began."""
        with suppress(self._nvml.NVMLError, AttributeError):  # a timeout: there are no more
            for _ in range(1000 if self._events is not None else 0):
                self._xids[int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData)] += 1
        return self._xids
