"""What this room's modules ask of the Trainer beyond what Lightning's has."""

from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor


@runtime_checkable
class Run(Protocol):
    """This project's Trainer."""

    global_batch: int | None
    """The samples behind one optimiser step, over all ranks, where that is known."""

    @property
    def shared_by(self) -> int:
        """Ranks that see the same samples."""

    @property
    def least_seconds(self) -> float:
        """A fit can't take less; 0 where that is not known."""

    @property
    def skipped(self) -> bool | Tensor:
        """Whether the step at hand is left out, as it is not finite. A tensor on a GPU, where only the device knows."""


class ByItself:
    """What a module is told where the Trainer is Lightning's own."""

    global_batch: int | None = None
    shared_by = 1
    least_seconds = 0.0
    skipped = False


_tells: dict[type, bool] = {}  # to look at a class takes longer than all the rest of a step's hook


def run_of(trainer: Any) -> Run:
    kind = type(trainer)
    if kind not in _tells:
        _tells[kind] = isinstance(trainer, Run)
    return cast(Run, trainer) if _tells[kind] else ByItself()
