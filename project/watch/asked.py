"""The request for a profile: a file in the folder of a run in training. `python -m project profile RUN` puts it there.

Nothing is imported that a login node would have to wait for.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from project.errors import UserError
from project.untrusted import parse_json, printable, write_text

FILE = "profile.json"
FOLDER = "profiles"
"""The folder, within the run's, of what was recorded."""
MOST = 1_000
"""The most steps of a profile: each takes some MB of memory until all are recorded."""


@dataclass(frozen=True)
class Asked:
    """A request: how many steps are recorded, of which ranks, and whether their memory is, too."""

    steps: int = 5
    ranks: Sequence[int] | None = (0,)
    """None: all."""
    memory: bool = False

    def __post_init__(self) -> None:
        if not (_is_number(self.steps) and 0 < self.steps <= MOST):
            raise UserError(f"The profile's steps are a number from 1 to {MOST}, not {self.steps!r}.")
        if not isinstance(self.memory, bool):
            raise UserError(f"The profile's memory is true or false, not {self.memory!r}.")
        known = self.ranks is None or (isinstance(self.ranks, (list, tuple)) and self.ranks)
        if not known or not all(_is_number(rank) and rank >= 0 for rank in self.ranks or ()):
            raise UserError(f"The profile's ranks are a list of ranks, or null for all, not {self.ranks!r}.")

    def put(self, folder: Path) -> None:
        """Writes the request into the run's folder, whole or not at all."""
        write_text(folder / FILE, json.dumps(asdict(self)))

    @staticmethod
    def of(text: str) -> "Asked":
        try:
            request = parse_json(text) if text.strip() else {}
        except ValueError as error:
            raise UserError(f"It is not JSON: {error}.") from error
        names = {field.name for field in fields(Asked)}
        if not isinstance(request, dict) or not names >= request.keys():
            raise UserError(f"It says {printable(text.strip(), 100)}, and what it may say is {', '.join(sorted(names))}.")
        return Asked(**request)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
