"""The interface between these modules and the Trainer, beyond what Lightning's has."""

from typing import cast

from torch import Tensor


class Run:
    """Holds what a module reads from this project's Trainer; these values are for where the Trainer is Lightning's own."""

    global_batch: int | None = None
    """The samples behind one optimiser step, over all ranks, where that is known."""
    shared_by = 1
    """The number of ranks that see the same samples."""
    least_seconds = 0.0
    """The least seconds that a fit takes; 0 where that is not known."""
    skipped: bool | Tensor = False
    """Whether this step is skipped, as it is not finite. A tensor on a GPU, where only the device knows."""


def run_of(trainer: object) -> Run:
    return cast(Run, trainer) if hasattr(type(trainer), "least_seconds") else Run()
