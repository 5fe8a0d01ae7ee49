"""Data modules that deal their samples to the ranks themselves, as ImageData does; any other with these methods may, too."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from project.data.order import Limit


@dataclass(frozen=True)
class Dealing:
    """The run's settings that the loaders of a data module depend on."""

    spare_cores: int = 0
    """Cores that each rank has for loader processes."""
    shared_by: int = 1
    """Neighbouring ranks that see the same samples."""
    exact: bool = False
    """Whether an evaluation's micro-batches are the same on any number of ranks."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """By stage, as they are when its loaders are made: of training in steps, of evaluation in micro-batches over all ranks."""


@runtime_checkable
class SelfDealing(Protocol):
    """A data module that deals its samples to the ranks itself, in this project's order, and knows what they are."""

    def deal(self, dealing: Dealing) -> None:
        """Takes what the loaders depend on; called before each verb."""

    def batch_sizes(self) -> tuple[int, int | None]:
        """Returns the samples of a micro-batch, and of a global batch, where that is set."""

    def loader_processes(self) -> int:
        """Returns the loader processes of each rank."""

    def sample_shape(self) -> tuple[int, ...]:
        """Returns the shape of what the network takes for one sample."""

    def fingerprint(self) -> dict[str, dict[str, int | str]]:
        """Returns, of each split, the number of samples, the bytes of one, and a hash of a few."""

    def description(self) -> dict[str, object]:
        """Returns what the user of an exported network has to know, for export.json: `classes`, their names, and `images`, how
        pixels become its input (`range`, `mean`, `std`, and in words `how`); None for what there is not."""
