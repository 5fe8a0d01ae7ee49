"""A user's file that keeps things in every way there is; the module is in another file, which imports this one."""

from itertools import count


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Shared:
    calls = 0


class Kept:
    def __init__(self) -> None:
        self.calls = 0


KEPT = Kept()
NUMBERS = (number for number in range(1_000_000))
STILL = (number for number in range(1_000_000))
NUMBER = 0
_UNUSED = (count(), Kept())


def default(memory: list[int] = [0]) -> None:  # noqa: B006
    memory[0] += 1


def keyword(*, memory: dict[str, int] = {"calls": 0}) -> None:  # noqa: B006
    memory["calls"] += 1


def attribute() -> None:
    attribute.calls = getattr(attribute, "calls", 0) + 1  # type: ignore[attr-defined]


def move() -> None:
    global NUMBER
    NUMBER += 1
    Shared.calls += 1
    KEPT.calls += 1
    next(NUMBERS)
    default()
    keyword()
    attribute()
