"""Sends messages between the watchdogs of a run's ranks: small datagrams beside NCCL and gloo, which are what hangs.

Every rank reports to rank 0 once in a while how far it is. Sending a datagram never waits: not for a stopped process, not for
a host whose link is cut. torch's TCPStore does: some of its calls never end, and it prints C++ stacks when the other side is
gone.
"""

import base64
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from project.cluster.signed import Message, Opener, sealer

_LARGEST = 60_000  # bytes in a datagram
_WAKE = "wake"
_OVERHEAD = 250  # bytes of a packet: its headers, and the rest of the message


@dataclass(frozen=True)
class Member:
    """Describes a rank of the run: its host, its address, and its process (`pid` and `started`, as pids are reused)."""

    rank: int
    host: str
    machine: str
    pid: int
    started: str
    address: tuple[str, int]
    dump: str
    """The file into which the process writes its stacks on a signal; readable on its own host."""


@dataclass(frozen=True)
class Flight:
    """Describes how far a rank is with the collectives of a group: its oldest unfinished one, and the stage of that."""

    number: int
    stage: int
    name: str = ""
    ranks: tuple[int, ...] = ()
    """The group's; of the default group none are listed."""

    ABSENT: ClassVar[int] = 0
    """The rank's host has not asked for it."""
    SCHEDULED: ClassVar[int] = 1
    """It has, and the device has not got to it."""
    STARTED: ClassVar[int] = 2
    """The device is in it, and waits for the others'."""

    @property
    def order(self) -> tuple[int, int]:
        """Returns the key by which ranks are compared: the smaller one is behind."""
        return self.number, self.stage


@dataclass(frozen=True)
class Heartbeat:
    """Describes a rank's progress. `at` grows: its micro-batches, the part of one, and the phases begun in that part."""

    at: tuple[int, int, int]
    phase: str
    step: int
    epoch: int
    since: float
    """Wall-clock time of its last progress."""
    idle: float
    """Seconds without progress."""
    allowed: float
    """Seconds that it may be without progress, if it waits for others."""
    allowed_own_work: float
    """Seconds that it may be without progress, if it does work of its own that may take long, such as writing a checkpoint."""
    collective: bool = False
    """Whether it waits in a collective; looked at only when it waits too long."""
    flights: dict[str, Flight] = field(default_factory=dict)
    """How far its collectives are, by group, as far as that is known; looked at when it waits."""

    @property
    def waits_too_long(self) -> bool:
        """Returns whether the rank is overdue, if it waits for others."""
        return self.idle > self.allowed

    @property
    def collectives(self) -> str:
        """Returns the oldest collective of each group that the rank has begun and not finished, by name, or ''."""
        return ", ".join(flight.name for flight in self.flights.values() if flight.name)

    @property
    def is_stuck(self) -> bool:
        """Returns whether the rank is overdue, whatever it does."""
        return self.idle > self.allowed_own_work


def machine_id() -> str:
    """Returns a name that two processes share if they can signal each other: host, boot, and namespace of process ids."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


class Channel:
    """Sends and receives messages (JSON) among the ranks of this run."""

    def __init__(self, here: str) -> None:
        """Opens a socket. `here`: the address by which the other ranks reach this host."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in here else socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((here, 0))
        self.address: tuple[str, int] = (here, self._socket.getsockname()[1])
        self.members: list[Member] = []
        self.set_members([], secrets.token_hex(32))

    def set_members(self, members: list[Member], secret: str) -> None:
        """Sets all ranks of the run. `secret`: the key of rank 0, with which all datagrams are signed."""
        self.members, self.secret = members, secret
        self._seal, self._opener = sealer(secret), Opener(secret)

    def send(self, to: int, kind: str, **content: object) -> None:
        self._send(self.members[to].address, kind, **content)

    def _send(self, address: tuple[str, int], kind: str, **content: object) -> None:
        with suppress(OSError):  # no route, no buffer, too long: as good as lost on the way
            self._socket.sendto(self._seal({"kind": kind, **content}), tuple(address))

    def send_padded(self, to: int, kind: str, size: int, **content: object) -> None:
        """Sends a message that is padded to a packet of about `size` bytes, to find hosts at which long packets get lost."""
        filling = base64.b85encode(secrets.token_bytes(max(0, min(size, _LARGEST) - _OVERHEAD))).decode()
        self.send(to, kind, size=size, filling=filling, **content)

    def wake(self) -> None:
        """Ends a `receive` that waits in another thread."""
        self._send(self.address, _WAKE)

    def receive(self, seconds: float) -> Iterator[Message]:
        """Yields the messages of this run's ranks that arrive within so many seconds; `wake` ends it early."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                continue
            if (message := self._opener.open(data)) is None:
                continue
            if message["kind"] == _WAKE:
                return
            yield message

    def close(self) -> None:
        self._socket.close()


def heartbeat_from_dict(content: Message) -> Heartbeat:
    """Returns a heartbeat that was sent as `asdict` gives it."""
    flights = {group: Flight(**{**known, "ranks": tuple(known["ranks"])}) for group, known in content["flights"].items()}
    return Heartbeat(**{**content, "at": tuple(content["at"]), "flights": flights})
