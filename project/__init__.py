"""Train any LightningModule on one machine or on many: the same YAML, the same run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from project.train.sharded import Sharded as Sharded
    from project.trainer import Trainer as Trainer

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`from project import Trainer, Sharded`; nothing heavy is imported until it is used."""
    if name == "Trainer":
        from project.trainer import Trainer

        return Trainer
    if name == "Sharded":
        from project.train.sharded import Sharded

        return Sharded
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
