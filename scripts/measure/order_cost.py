#!/usr/bin/env python
"""What the order of the samples costs: at the start of an epoch, for each batch, and in memory; beside DistributedSampler.

.venv/bin/python scripts/measure/order_cost.py
"""

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.utils.data import DistributedSampler

from project.data.order import MicroBatchSampler, Order, _window

BATCH, BATCHES = 64, 200


def project_epochs(size: int, world_size: int) -> Callable[[int], Iterator[Any]]:
    micro_batches = max(1, min(world_size, size // (2 * BATCH)))
    ranks = world_size if micro_batches == world_size else 1
    order = Order(size, BATCH, micro_batches, seed=0, share=micro_batches // ranks)
    sampler = MicroBatchSampler(order, ranks - 1, ranks)

    def epoch(number: int) -> Iterator[Any]:
        sampler.set_epoch(number)
        return (order.indices(key) for key in sampler)

    return epoch


def stock_epochs(size: int, world_size: int) -> Callable[[int], Iterator[Any]]:
    sampler: DistributedSampler[Any] = DistributedSampler(range(size), num_replicas=world_size, rank=world_size - 1)  # type: ignore[arg-type]

    def epoch(number: int) -> Iterator[Any]:
        sampler.set_epoch(number)
        indices = iter(sampler)
        return ([index for _, index in zip(range(BATCH), indices, strict=False)] for _ in range(BATCHES))

    return epoch


def measure(epoch: Callable[[int], Iterator[Any]]) -> tuple[float, float, float]:
    """Milliseconds to the first batch, microseconds for each of the next, MiB at the peak."""
    starts, batches = [], []
    for number in range(3):
        _window.cache_clear()
        start = time.perf_counter()
        rows = epoch(number)
        next(rows)
        first = time.perf_counter()
        count = sum(1 for _ in zip(range(BATCHES - 1), rows, strict=False))
        starts.append(first - start)
        batches.append((time.perf_counter() - first) / max(1, count))
    _window.cache_clear()
    tracemalloc.start()
    rows = epoch(7)
    for _ in zip(range(10), rows, strict=False):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return 1e3 * statistics.median(starts), 1e6 * statistics.median(batches), peak / 2**20


def main() -> None:
    table = Table(title=f"Batches of {BATCH}, on the last rank", title_justify="left")
    for column in ("samples", "ranks", "order", "first batch, ms", "each batch, us", "memory, MiB"):
        table.add_column(column, justify="left" if column == "order" else "right")
    for size in (10**4, 10**6, 10**9):
        for world_size in (1, 64, 65_536):
            if size < world_size * 2 * BATCH:
                continue
            table.add_row(
                f"{size:,}",
                f"{world_size:,}",
                "ours",
                *(f"{value:,.2f}" for value in measure(project_epochs(size, world_size))),
            )
        if size <= 10**6:
            for world_size in (1, 64):
                figures = measure(stock_epochs(size, world_size))
                table.add_row(f"{size:,}", f"{world_size:,}", "DistributedSampler", *(f"{value:,.2f}" for value in figures))
    figures = measure(stock_epochs(10**7, 1))  # at 10**9 it would take a hundred times this
    table.add_row(f"{10**7:,}", "1", "DistributedSampler", *(f"{value:,.2f}" for value in figures))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
