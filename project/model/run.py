"""The interface between these modules and the Trainer, beyond what Lightning's has."""

from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor


@runtime_checkable
class Run(Protocol):
    """The interface of this project's Trainer."""

    global_batch: int | None
    """The samples behind one optimiser step, over all ranks, where that is known."""

    @property
    def shared_by(self) -> int:
        """Returns the number of ranks that see the same samples."""

    @property
    def least_seconds(self) -> float:
        """Returns the least seconds that a fit takes; 0 where that is not known."""

    @property
    def skipped(self) -> bool | Tensor:
        """Returns whether this step is skipped, as it is not finite. A tensor on a GPU, where only the device knows."""


class ByItself:
    """The values that a module receives where the Trainer is Lightning's own."""

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
