"""Tests whether one host can reach another, and with packets of any size. Standard library only.

A wrong MTU on the way (a tunnel, a jumbo frame that a switch drops) lets hosts connect and say hello, and swallows what is
longer: whatever is sent then is sent again for a quarter of an hour. TCP can be told to send shorter packets (TCP_MAXSEG), and
so it can be found out which ones arrive.
"""

import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

ATTEMPT = 3.0  # seconds for one try to connect, and for each answer
_LOAD = 1 << 15  # bytes that go to and fro: a few of the largest packets, and no more than what fits into a socket's buffer
_QUICK = 1.5  # seconds for the load where it is known to pass in short packets
_LEAST = 88  # bytes in a packet: Linux sends no fewer
_OPTIONS = 12  # bytes of TCP's timestamps, which it counts neither as header nor as data
_THANKS = b"!"

HINT = (
    "the MTU is wrong somewhere between them: give the interfaces on both hosts, and tunnels or switches in between, the same "
    "one ('ip link show' has it, 'ip link set dev NAME mtu BYTES' sets it), and let ICMP through."
)


class Listener:
    """A server that sends its name to each client, receives the load, and sends as much back; until it is closed."""

    def __init__(self, address: str, name: Callable[[], str]) -> None:
        """Listens on an address of this host; '' is all that it has. `name`: returns the name to send."""
        self._socket, self._name = _listen(address), name
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._open, daemon=True).start()

    def _open(self) -> None:
        with suppress(OSError):  # closed
            while True:
                line, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with suppress(OSError), line:
            line.settimeout(4 * ATTEMPT)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.sendall(f"{self._name()}\n".encode())
            if _take(line) == _LOAD:
                line.sendall(_THANKS)  # in a packet of its own, which is short
                line.sendall(bytes(_LOAD))

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _listen(address: str) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        with suppress(OSError):  # switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=512, dualstack_ipv6=True)
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=512)


def _take(line: socket.socket) -> int:
    """Returns the number of bytes that arrived, the size of the load at most."""
    got = 0
    while got < _LOAD and (part := line.recv(1 << 16)):
        got += len(part)
    return got


@dataclass(frozen=True)
class Probe:
    """The result of a probe of a listener."""

    name: str = ""
    """Who answered."""
    heard: float = 0.0
    """When that arrived, by this host's clock that is never set."""
    error: OSError | None = None
    """Why nobody did."""
    limit: int | None = None
    """Bytes of the longest packet that arrives; None: all do. 0: not even short ones do, once the two are connected."""
    back: bool = False
    """Whether the longer ones get lost on the way back."""


def probe(address: str, port: int) -> Probe:
    """Connects to a listener, and measures which packets pass."""
    try:
        name, heard, arrived, again = _call(address, port, ATTEMPT)
    except OSError as error:
        return Probe(error=error)
    if again:
        return Probe(name, heard)
    with suppress(OSError):  # a packet or two may get lost anywhere: once more, and with more patience
        name, heard, _, again = _call(address, port, 2 * ATTEMPT)
        if again:
            return Probe(name, heard)
    return Probe(name, heard, limit=_limit(address, port), back=arrived)


def probe_any(addresses: Iterable[str], port: int) -> Probe:
    """Returns the first probe of a host's addresses that is answered; none may be, because of a firewall, say."""
    probes = (probe(address, port) for address in addresses)
    return next((answer for answer in probes if answer.error is None), Probe())


def lost(answer: Probe, here: str, other: str) -> str:
    """Returns which packets of a probe from `here` don't arrive, as text."""
    start, end = (other, here) if answer.back else (here, other)
    what = f"Packets over {answer.limit} bytes" if answer.limit else "Even short packets, once the two are connected,"
    return f"{what} from {start} don't arrive at {end}"


def _call(address: str, port: int, seconds: float, size: int | None = None) -> tuple[str, float, bool, bool]:
    """Returns who answers, and when; whether the load arrives, and comes back. `size` limits the packets, in bytes."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as line:
        if size is not None:  # also said to the other side, which then sends no longer ones either
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, size - _headers(address))
        line.settimeout(ATTEMPT)
        line.connect((address, port))
        name = b""
        while not name.endswith(b"\n") and (part := line.recv(1)):
            name += part
        heard = time.monotonic()
        arrived = back = False
        with suppress(TimeoutError):
            line.settimeout(seconds)
            line.sendall(bytes(_LOAD))
            arrived = line.recv(1) == _THANKS
            back = arrived and _take(line) == _LOAD
        return name.decode(errors="replace").strip(), heard, arrived, back


def _headers(address: str) -> int:
    """Returns the bytes of the headers of IP and TCP."""
    return 60 if ":" in address else 40


def _limit(address: str, port: int) -> int:
    """Returns the bytes of the longest packet that passes both ways, where the longest that are sent do not."""

    def passes(size: int) -> bool:
        with suppress(OSError):
            return _call(address, port, _QUICK, size)[3]
        return False

    with socket.create_connection((address, port), ATTEMPT) as line:
        longest = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) + _OPTIONS
    least, fails = _headers(address) + _LEAST, _headers(address) + longest + 1
    if not passes(least):
        return 0
    return least + bisect_left(range(least + 1, fails), True, key=lambda size: not passes(size))
