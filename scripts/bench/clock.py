"""Moments, and the seconds between them: of this process, or of its GPU, which nobody waits for until the end."""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Notes moments now, and says later how far they are apart."""

    def now(self) -> Any:
        """This moment."""

    def wait(self, moment: Any) -> None:
        """Until it has passed; the seconds between all moments before it are known then."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one moment to another; both have passed."""


class HostClock:
    """Moments of this process."""

    def now(self) -> float:
        return time.perf_counter()

    def wait(self, moment: float) -> None:
        """What is noted has passed."""

    def seconds(self, start: float, end: float) -> float:
        return end - start


class DeviceClock:
    """Moments of this process's GPU: an event is noted among what it has to do, and read when it is through with that."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, moment: torch.cuda.Event) -> None:
        moment.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3


def clock() -> Clock:
    """The GPU's, where there is one."""
    return DeviceClock() if torch.cuda.is_available() else HostClock()
