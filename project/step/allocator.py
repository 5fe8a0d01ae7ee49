"""Records what the allocator of a GPU does, for https://pytorch.org/memory_viz. torch documents these private names."""

from pathlib import Path

import torch

_MOST = 100_000  # of its doings


def start_recording() -> None:
    """Starts to record each request to the allocator, with the place in the code that made it."""
    torch.cuda.memory._record_memory_history(max_entries=_MOST)


def save_recording(file: Path) -> None:
    """Writes what the allocator holds and what was recorded, and stops recording."""
    torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)
