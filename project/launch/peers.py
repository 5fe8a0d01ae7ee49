"""The supervisors of a run's other ranks: a supervisor that loses a rank notifies the first, which has all restart theirs.

Where an engine starts each rank by itself (torchrun, srun), each has a supervisor of its own. The first rank's listens; on
loopback, where the run is on one host. The ranks, once they are connected, tell their supervisors where, and a secret that
signs what these say to each other: nothing is parsed that is not signed.
"""

import resource
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress

from project.survive.hang.warden import SEAL, Opener, sealer

_LENGTH = struct.Struct(">I")
_LONGEST = 1 << 14  # bytes of a message
_STRANGERS = 8  # connections that have not yet sent a signed message
_PATIENCE = 10.0  # seconds to connect or to send

Message = dict[str, object]


class Peer:
    """Represents a connection to another supervisor."""

    def __init__(self, connection: socket.socket, secret: str) -> None:
        connection.settimeout(_PATIENCE)
        self.connection, self.has_joined = connection, False
        self._seal, self._opener, self._unread = sealer(secret), Opener(secret), b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message: object) -> None:
        """Sends a message; one to a supervisor that has ended is dropped."""
        data = self._seal(message)
        with suppress(OSError):
            self.connection.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> list[Message] | None:
        """Returns the messages that have arrived; None where the other one has ended, or is no supervisor of this run."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            return None
        self._unread += data
        messages = []
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            if not SEAL < length <= _LONGEST:
                return None
            if len(self._unread) < _LENGTH.size + length:
                break
            message = self._opener.open(self._unread[_LENGTH.size : _LENGTH.size + length])
            self._unread = self._unread[_LENGTH.size + length :]
            if message is None:
                return None
            messages.append(message)
            self.has_joined = True
        return messages if data else None


class Peers:
    """Holds the connections to the other supervisors: of the first one, to all; of another one, to the first."""

    def __init__(self, listens: bool, several_hosts: bool) -> None:
        self._listener = socket.create_server(("" if several_hosts else "127.0.0.1", 0), backlog=1024) if listens else None
        if listens:  # a connection for each rank
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._secret = ""
        self._expected = 0
        self.connected: list[Peer] = []

    @property
    def port(self) -> int:
        """Returns the port of the first supervisor; 0 for the others."""
        return int(self._listener.getsockname()[1]) if self._listener else 0

    @property
    def complete(self) -> bool:
        """Returns whether all supervisors that this one deals with are connected."""
        return 0 < self._expected <= sum(peer.has_joined for peer in self.connected)

    def inputs(self) -> list[socket.socket | Peer]:
        """Returns what to wait for."""
        return [*([self._listener] if self._listener and self._secret else []), *self.connected]

    def connect(self, address: str, port: int, secret: str, others: int) -> None:
        """Connects to the first supervisor, or lets the `others` connect to this one. Does nothing the second time."""
        if self._secret:
            return
        self._secret = secret
        if self._listener is not None:
            self._expected = others
            return
        self._expected = 1
        with suppress(OSError):
            self.connected.append(Peer(socket.create_connection((address, port), _PATIENCE), secret))
            self.connected[0].has_joined = True
            self.connected[0].send(joined=True)

    def messages(self, ready: list[object]) -> Iterator[Mapping[str, object]]:
        """Yields what has arrived, and forgets supervisors that have ended: `complete` tells that one is missing."""
        if self._listener in ready and self._listener is not None:
            with suppress(OSError):
                connection = self._listener.accept()[0]
                if len(self.connected) < self._expected + _STRANGERS:
                    self.connected.append(Peer(connection, self._secret))
                else:
                    connection.close()
        for peer in [peer for peer in self.connected if peer in ready]:
            messages = peer.receive()
            yield from messages or ()
            if messages is None:
                self.connected.remove(peer)
                peer.connection.close()

    def send(self, **message: object) -> None:
        """Sends a message to all that are connected."""
        for peer in self.connected:
            if peer.has_joined:
                peer.send(**message)
