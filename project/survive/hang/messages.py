"""Declares what the watchdogs of the ranks send each other, as JSON: each datagram is authenticated before it is parsed."""

from typing import TypedDict

from typing_extensions import Required


class FlightMessage(TypedDict):
    """A `Flight`, as it is sent."""

    number: int
    stage: int
    name: str
    ranks: list[int]


class HeartbeatMessage(TypedDict):
    """A `Heartbeat`, as it is sent."""

    at: tuple[int, int, int]
    phase: str
    step: int
    epoch: int
    since: float
    idle: float
    allowed: float
    allowed_own_work: float
    collective: bool
    flights: dict[str, FlightMessage]


class RankAtFaultMessage(TypedDict):
    """A `RankAtFault`, as it is sent."""

    rank: int
    host: str
    beat: HeartbeatMessage
    silent_for: float | None
    place: str
    collectives: str
    stacks: str


class VerdictMessage(TypedDict):
    """A `Verdict`, as it is sent."""

    guilty: list[RankAtFaultMessage]
    waiting: str
    network: str


class Message(TypedDict, total=False):
    """A message from one rank to another; its kind decides what else is in it."""

    kind: Required[str]
    rank: int
    beat: HeartbeatMessage
    asking: bool
    guilty: RankAtFaultMessage
    verdict: VerdictMessage
    size: int
    text: str
    where: str
    traceback: str
