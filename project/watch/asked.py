"""The request for a profile: a file in the folder of a run in training. `python -m project profile RUN` puts it there.

Nothing is imported that a login node would have to wait for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from project.errors import UserError
from project.untrusted import parse_json, printable

FILE = "profile.json"
FOLDER = "profiles"
"""The folder, within the run's, of what was recorded."""
MOST = 1_000
"""The most steps of a profile: each takes some MB of memory until all are recorded."""


@dataclass(frozen=True)
class Asked:
    """A request to record: the number of steps, the ranks, and whether to record memory."""

    steps: int = 5
    ranks: Sequence[int] | None = (0,)
    """None: all."""
    memory: bool = False

    def __post_init__(self) -> None:
        if type(self.steps) is not int or not 0 < self.steps <= MOST:
            raise UserError(f"profile.steps is a number from 1 to {MOST}, not {self.steps!r}.")
        if type(self.memory) is not bool:
            raise UserError(f"The profile's memory is true or false, not {self.memory!r}.")
        ranks = (0,) if self.ranks is None else self.ranks
        if not isinstance(ranks, (list, tuple)) or not ranks or any(type(rank) is not int or rank < 0 for rank in ranks):
            raise UserError(f"The profile's ranks are a list of ranks, or null for all, not {self.ranks!r}.")

    @staticmethod
    def of(text: str) -> "Asked":
        """Returns the request that a file holds; an empty file requests what is the default."""
        request = parse_json(text) if text.strip() else {}
        if not isinstance(request, dict) or not request.keys() <= {"steps", "ranks", "memory"}:
            raise UserError(f"It says {printable(text.strip(), 100)}, and what it may say is memory, ranks, steps.")
        return Asked(**request)
