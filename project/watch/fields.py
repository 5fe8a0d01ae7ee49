"""Lines of fields that fit a terminal: where there is no room for all, the least important ones are left out."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from rich.cells import cell_len

GAP = "  "


class Importance(IntEnum):
    """The order in which fields are left out: the last one of these first."""

    PROGRESS, FIRST_METRIC, MONITORED, EPOCH, SPEED, METRIC, BEST, BAR, RATE, PHASE = range(10)


class Field(NamedTuple):
    """A field of a line."""

    importance: Importance
    text: str


def fitted(fields: Sequence[Field], width: int) -> str:
    """Returns the most important fields that fit into so many columns, in their order; of equals, the first ones."""
    kept: set[int] = set()
    left = width + len(GAP)
    for index, field in sorted(enumerate(fields), key=lambda entry: (entry[1].importance, entry[0])):
        if (needed := cell_len(field.text) + len(GAP)) <= left:
            kept.add(index)
            left -= needed
    return GAP.join(field.text for index, field in enumerate(fields) if index in kept)
