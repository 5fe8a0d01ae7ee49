"""The supervisors of a run's other ranks: a supervisor that loses a rank notifies the first, which has all restart theirs.

Where an engine starts each rank by itself (torchrun, srun), each has a supervisor of its own. The first rank's listens; on
loopback, where the run is on one host. The ranks, once they are connected, tell their supervisors where, and a secret that
signs what these say to each other: nothing is parsed that is not signed. When a rank is lost, the first supervisor calls the
roll: a host that was cut off keeps its connection, and answers nothing.
"""

import base64
import os
import resource
import socket
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import wait

from project.cluster.signed import Message, Opener, sealer
from project.cluster.slurm import slurm_node
from project.launch.nodes import HERE, STORE

_LONGEST = 1 << 14  # bytes of a message
_STRANGERS = 8  # connections that have not yet sent a signed message
_PATIENCE = 10.0  # seconds to connect or to send
_KEEP_ALIVE = 60  # seconds of silence after which the kernel asks whether the other end is there


class Peer:
    """Represents a connection to another supervisor."""

    def __init__(self, connection: socket.socket, secret: str, opener: Opener) -> None:
        connection.settimeout(_PATIENCE)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # or a firewall forgets it within hours of silence
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE)
        self.connection, self.rank = connection, -1
        self._seal, self._opener, self._unread = sealer(secret), opener, b""

    def send(self, **message: object) -> None:
        """Sends a message; one to a supervisor that has ended is dropped."""
        with suppress(OSError):
            self.connection.sendall(base64.b64encode(self._seal(message)) + b"\n")

    def receive(self) -> list[Message] | None:
        """Returns the messages that have arrived; None where the other one has ended, or is no supervisor of this run."""
        messages = []
        try:
            data = self.connection.recv(1 << 16)
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                if (message := self._opener.open(base64.b64decode(line))) is None:
                    return None
                if "host" in message:  # the first one
                    self.rank = message["rank"]
                messages.append(message)
        except (OSError, ValueError):
            return None
        return messages if data and len(self._unread) <= _LONGEST else None


class Peers:
    """Holds the connections to the other supervisors: of the first one, to all; of another one, to the first."""

    def __init__(self, listens: bool, several_hosts: bool) -> None:
        self._listener = socket.create_server(("" if several_hosts else "127.0.0.1", 0), backlog=1024) if listens else None
        self.port: int = self._listener.getsockname()[1] if self._listener else 0
        if listens:  # a connection for each rank
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._secret = ""
        self._expected = 0
        self.joined: dict[int, Message] = {}
        """What each other rank's supervisor has said first: `host`, Slurm's `node`, and whether it is `needed`, as torchrun's
        agents meet there.
        """
        self.is_any_done = False
        """Says that another supervisor has ended by itself: its rank has come to an end, good or bad."""
        self.connected: list[Peer] = []

    @property
    def is_alone(self) -> bool:
        """Returns whether the supervisors that this one was connected to have ended."""
        return self._expected > 0 and not self.connected

    @property
    def hosts(self) -> dict[int, str]:
        """Returns the host of each other rank, of the first supervisor; {} until all have joined it."""
        known = {rank: first["host"] for rank, first in self.joined.items()}
        return known if len(known) == self._expected else {}

    def call_roll(self, attempt: int, seconds: float) -> tuple[set[int], list[tuple[str, str]]]:
        """Asks the other supervisors for an answer. Returns the ranks of those that give none in time, and the losses of killed
        ranks that arrive meanwhile, with the rank's host. With no seconds, whoever is connected counts as present.
        """
        missing, reports, until = {*self.joined}, [], time.monotonic() + seconds
        self.send(roll=attempt)
        while missing & {peer.rank for peer in self.connected} and (left := until - time.monotonic()) > 0:
            for message in self.messages(wait(self.inputs(), left)):
                if message.get("roll") == attempt:
                    missing.discard(message["rank"])
                elif message.get("attempt") == attempt and message.get("where"):
                    reports.append((message["lost"], message["where"]))
        if not seconds:
            missing -= {peer.rank for peer in self.connected}
        return missing, reports

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Gives the ranks that are left their new numbers, and disconnects all other supervisors."""
        for peer in self.connected:
            if peer.rank not in numbers:
                peer.connection.close()
        self.connected = [peer for peer in self.connected if peer.rank in numbers]
        for peer in self.connected:
            peer.rank = numbers[peer.rank]
        self.joined = {numbers[rank]: first for rank, first in self.joined.items() if rank in numbers}
        if self._listener is not None:
            self._expected = len(self.joined)

    def inputs(self) -> list[socket.socket]:
        """Returns what to wait for."""
        return [*([self._listener] if self._listener and self._secret else []), *(peer.connection for peer in self.connected)]

    def connect(self, address: str, port: int, secret: str, others: int, rank: int, host: str) -> None:
        """Connects to the first supervisor, as that of a rank on a host, or lets the `others` connect to this one. Does nothing
        the second time.
        """
        if self._secret:
            return
        self._secret, self._opener = secret, Opener(secret)
        if self._listener is not None:
            self._expected = others
            return
        self._expected = 1
        with suppress(OSError):
            self.connected.append(Peer(socket.create_connection((address, port), _PATIENCE), secret, self._opener))
            self.connected[0].rank = 0
            self.connected[0].send(rank=rank, host=host, needed=os.environ.get(STORE) == HERE, node=slurm_node())

    def messages(self, ready: Container[object]) -> Iterator[Message]:
        """Yields what has arrived, {"gone": rank} for each supervisor that is gone before it said that it is done."""
        if self._listener in ready and self._listener is not None:
            with suppress(OSError):
                connection = self._listener.accept()[0]
                if len(self.connected) < self._expected + _STRANGERS:
                    self.connected.append(Peer(connection, self._secret, self._opener))
                else:
                    connection.close()
        for peer in [peer for peer in self.connected if peer.connection in ready]:
            messages = peer.receive()
            for message in messages or ():
                if "host" in message:
                    self.joined[peer.rank] = message
                self.is_any_done |= "done" in message
                yield message
            if messages is None:
                self.connected.remove(peer)
                peer.connection.close()
                if peer.rank >= 0 and not self.is_any_done:
                    yield {"gone": peer.rank}

    def send(self, **message: object) -> None:
        """Sends a message to all that are connected."""
        for peer in self.connected:
            if peer.rank >= 0:
                peer.send(**message)
