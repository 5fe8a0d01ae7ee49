"""Measures how fast the ranks communicate: latency and bandwidth, and what a message will cost by them.

All ranks call these together. Times are the slowest rank's.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

_SIZES = tuple(4**power * 1024 for power in range(1, 8))  # bytes: 4 KiB to 16 MiB
_PATIENCE = 1.0  # seconds for one message: what would take longer is not sent
_REPEATS = 5
_PAIR = 1 << 20  # bytes sent to and fro between two hosts
_SLOW = 3.0  # times slower than what good links reach


Group: TypeAlias = dist.ProcessGroup | None
Pair: TypeAlias = tuple[int, int, float]
"""The first ranks of two hosts, and the bytes a second between them."""


def fitted_seconds(times: dict[int, float], size: float) -> float:
    """Returns the time of a message of so many bytes, by measured times: the smallest is all latency, the largest shows the
    bandwidth."""
    latency, large = times[min(times)], max(times)
    return latency + (size / large * max(times[large] - latency, 1e-9) if len(times) > 1 else 0.0)


def now(device: torch.device) -> float:
    """Returns the time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a measurement: the host must wait for the device
    return time.perf_counter()


def slowest(seconds: float, group: Group) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return float(value)


def all_reduce_times(device: torch.device, group: Group, control: Group) -> dict[int, float]:
    """Returns the seconds of an all-reduce over all ranks, by the message's bytes. `control`: a group on the CPU."""
    times: dict[int, float] = {}
    for size in _SIZES:
        if times and max(times.values()) * 4 > _PATIENCE:
            break
        tensor = torch.zeros(size // 4, device=device)
        dist.all_reduce(tensor, group=group)
        taken = []
        for _ in range(_REPEATS):
            dist.barrier(group=control)
            start = now(device)
            dist.all_reduce(tensor, group=group)
            taken.append(now(device) - start)
        times[size] = slowest(sorted(taken)[_REPEATS // 2], control)
    return times


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Returns the bytes a second on the slowest wire of a ring: comparable over numbers of ranks."""
    return 2 * (ranks - 1) / ranks * size / seconds


def rounds(members: Sequence[int], limit: int = 16) -> list[list[tuple[int, int]]]:
    """Returns a tournament: every two meet once, in rounds of pairs that are measured at the same time, `limit` at most."""
    ring: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    made = []
    for _ in range(min(limit, len(ring) - 1)):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        made.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return made


def pair_times(
    rank: int, leaders: Sequence[int], group: Group, exchange: Callable[[list[Pair]], list[list[Pair]]]
) -> dict[tuple[int, int], float]:
    """Returns the bytes a second between the first ranks of every two hosts."""
    message = torch.zeros(_PAIR // 4)
    own = list[Pair]()
    for pairs in rounds(leaders):
        for a, b in pairs:
            if rank in (a, b):
                speed = 2 * _PAIR / _to_and_fro(message, rank, a, b, group)
                if rank == a:  # for b the way back is not over when it has been sent
                    own.append((a, b, speed))
        dist.barrier(group=group)
    return {(a, b): speed for rank_speeds in exchange(own) for a, b, speed in rank_speeds}


def _to_and_fro(message: Tensor, rank: int, a: int, b: int, group: Group) -> float:
    """Returns the best time of a few: it shows what a link can do, not what else the hosts were doing."""
    _bounce(message[:1], rank, a, b, group)  # connects the two
    taken = [_bounce(message, rank, a, b, group)]
    # Both must go on or stop; `a` decides.
    more = torch.tensor([_REPEATS if taken[0] < _PATIENCE / 10 else 0])
    if rank == a:
        dist.send(more, b, group=group)
    else:
        dist.recv(more, a, group=group)
    taken += [_bounce(message, rank, a, b, group) for _ in range(int(more))]
    return min(taken)


def _bounce(message: Tensor, rank: int, a: int, b: int, group: Group) -> float:
    start = time.perf_counter()
    if rank == a:
        dist.send(message, b, group=group)
        dist.recv(message, b, group=group)
    else:
        dist.recv(message, a, group=group)
        dist.send(message, a, group=group)
    return time.perf_counter() - start


def slow_links(speeds: dict[tuple[int, int], float]) -> tuple[list[int], list[tuple[int, int]], float]:
    """Returns hosts (by first rank) whose every link is slow, slow links between the others, and a good link's speed."""
    typical = sorted(speeds.values(), reverse=True)[len(speeds) // 4] if speeds else 0.0
    slow = {pair for pair, speed in speeds.items() if speed * _SLOW < typical}
    members = sorted({rank for pair in speeds for rank in pair})
    bad = [rank for rank in members if all(pair in slow for pair in speeds if rank in pair)]
    return bad, sorted(pair for pair in slow if not set(pair) & set(bad)), typical
