"""Sums over the ranks asynchronously: a step waits neither for them nor for the device that computes them."""

import torch
import torch.distributed as dist
from torch import Tensor


class DelayedSums:
    """The sums over the ranks, started by all ranks alike; a reader one step later hardly waits."""

    def __init__(self, sums: Tensor, world_size: int) -> None:
        self._sums = sums.clone()
        self._work: dist.Work | None = None
        self._ready: torch.cuda.Event | None = None
        if world_size > 1:
            self._work = dist.all_reduce(self._sums, async_op=True)
        if self._sums.is_cuda:
            if self._work is not None:
                self._work.wait()  # which has the device wait, not the host
            self._sums = self._sums.to("cpu", non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def read(self) -> list[float]:
        # The host waits here for the ranks or for the device, if it is early.
        if self._ready is not None:
            self._ready.synchronize()
        elif self._work is not None:
            self._work.wait()
        return self._sums.tolist()
