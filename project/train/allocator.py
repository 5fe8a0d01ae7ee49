"""Records what the allocator of a GPU does, for https://pytorch.org/memory_viz. torch documents these private names."""

from pathlib import Path

import torch

_MOST = 100_000  # of its doings


def start_recording() -> None:
    """Has the allocator note each request from now on, and where in the code it was made."""
    torch.cuda.memory._record_memory_history(max_entries=_MOST)


def save_recording(file: Path) -> None:
    """Writes what the allocator holds, and what it has noted; it notes no more."""
    torch.cuda.memory._dump_snapshot(str(file))
    torch.cuda.memory._record_memory_history(enabled=None)
