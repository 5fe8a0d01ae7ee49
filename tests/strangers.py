"""A stranger on the network of a run: finds where its processes listen, and sends them things."""

import os
import random
import re
import socket
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lightning import Callback

BOMBS = [
    zlib.compress(b"[" * 100_000),
    zlib.compress(bytes(50_000_000)),
    zlib.compress(b'{"secret": "", "kind": "fails", "rank": 1, "text": "x"}'),
    b"",
]


class Listener(NamedTuple):
    kind: str
    address: str
    port: int
    program: str


def listeners(folder: Path) -> set[Listener]:
    """Where the processes that run in a folder listen: TCP, and UDP sockets that are connected to nobody."""
    owners: dict[str, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(process / "cwd") != str(folder):
                continue
            words = (process / "cmdline").read_text().replace("\0", " ")
            for opened in (process / "fd").iterdir():
                with suppress(OSError):
                    if inode := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(opened)):
                        owners[inode[1]] = words
    listening = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in owners and fields[3] == ("0A" if kind.startswith("tcp") else "07"):
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                family = socket.AF_INET6 if kind.endswith("6") else socket.AF_INET
                listening.add(Listener(kind, socket.inet_ntop(family, b"".join(words)), int(port, 16), owners[fields[9]]))
    return listening


def on_loopback(address: str) -> bool:
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


class Stranger(Callback):
    """On the first rank of each host: notes who listens in `listeners-HOST.txt`; on rank 0, before each batch connects so often
    to them in all, sends garbage, and counts connections in `clients.txt`."""

    def __init__(self, sends: int = 0) -> None:
        self.sends, self._clients = sends, 0
        self._listeners: set[Listener] = set()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.local_rank:
            return
        if not self._listeners:
            self._listeners = listeners(Path.cwd())
            Path(f"listeners-{trainer.node_rank}.txt").write_text(
                "\n".join(
                    f"{listener.kind} {listener.address} {listener.port} {listener.program}" for listener in self._listeners
                )
            )
        if trainer.global_rank:
            return
        chance = random.Random(batch_idx)
        streams = sum("tcp" in listener.kind for listener in self._listeners)
        for listener in self._listeners:
            for number in range(-(-self.sends // streams)):
                data = chance.choice([*BOMBS, chance.randbytes(chance.randrange(2_000))])
                loopback = "::1" if ":" in listener.address and not listener.address.startswith("::ffff") else "127.0.0.1"
                family = socket.AF_INET6 if ":" in loopback else socket.AF_INET
                with (
                    suppress(OSError),
                    socket.socket(family, socket.SOCK_DGRAM if "udp" in listener.kind else socket.SOCK_STREAM) as line,
                ):
                    line.settimeout(1)
                    line.connect((loopback, listener.port))
                    line.send(data if number % 10 else BOMBS[0])
                    self._clients += "tcp" in listener.kind
        Path("clients.txt").write_text(str(self._clients))


class Keyed(Callback):
    """Has secrets among its arguments, as a logger may."""

    def __init__(self, api_key: str = "", address: str = "", pad_token: str = "") -> None:
        self.pad_token = pad_token
