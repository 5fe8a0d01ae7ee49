"""Train any LightningModule on one machine or on many: the same YAML, the same run."""

import os
import sys
from typing import TYPE_CHECKING

# torch reads both when a process makes its first group. torch 2.15 puts another library behind "nccl", whose flight recorder
# does not tell a device that hangs from one that waits for the others. Where there is a group already, that library may be in
# use, and the ranks that this process starts must take the same.
_distributed = sys.modules.get("torch.distributed")
_has_group = _distributed is not None and _distributed.is_available() and _distributed.is_initialized()
os.environ.setdefault("TORCH_DIST_USE_NCCL2", "1" if _has_group else "0")
os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # without it no collective is ever recorded as started

if TYPE_CHECKING:
    from project.sharded.strategy import Sharded as Sharded
    from project.trainer import Trainer as Trainer

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Imports `Trainer` and `Sharded` when they are first used: `import project` loads nothing heavy."""
    if name == "Trainer":
        from project.trainer import Trainer

        return Trainer
    if name == "Sharded":
        from project.sharded.strategy import Sharded

        return Sharded
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
