"""Signs messages with a secret, and reads signed ones, each once. Standard library only."""

import hmac
import itertools
import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

_LARGEST = 1 << 20  # bytes, when it is unpacked
_HEADER = struct.Struct(">8sQ")
SEAL = 32

Message: TypeAlias = dict[str, Any]
"""What one process of a run sends another as JSON, or a part of it."""


def sealer(secret: str) -> Callable[[Mapping[str, object]], bytes]:
    """Returns a function that makes a datagram of a message: a signature of all that follows, sender, counter, message."""
    sender, counter, key = os.urandom(8), itertools.count(1), bytes.fromhex(secret)

    def seal(message: Mapping[str, object]) -> bytes:
        data = _HEADER.pack(sender, next(counter)) + zlib.compress(json.dumps(message).encode(), 1)
        return hmac.digest(key, data, "sha256") + data

    return seal


class Opener:
    """Reads datagrams that are signed with the secret, each once. Parses nothing before the signature is verified."""

    def __init__(self, secret: str) -> None:
        self._key = bytes.fromhex(secret)
        self._newest: dict[bytes, tuple[int, int]] = {}  # of each sender: its newest counter, and a bit for each before it

    def open(self, datagram: bytes) -> Message | None:
        """Returns the message; None if the signature is wrong, or the datagram has been received before."""
        seal, data = datagram[:SEAL], datagram[SEAL:]
        if len(data) < _HEADER.size or not hmac.compare_digest(seal, hmac.digest(self._key, data, "sha256")):
            return None
        sender, counter = _HEADER.unpack_from(data)
        if not self._is_new(sender, counter):
            return None
        message: Message = json.loads(zlib.decompressobj().decompress(data[_HEADER.size :], _LARGEST))
        return message

    def _is_new(self, sender: bytes, counter: int) -> bool:
        """Returns whether a datagram has not been seen. Datagrams may overtake each other: the last 64 of a sender are
        remembered.
        """
        newest, seen = self._newest.get(sender, (0, 0))
        if counter > newest:
            seen = (seen << (counter - newest) if counter - newest < 64 else 0) & 0xFFFF_FFFF_FFFF_FFFF
            newest = counter
        elif newest - counter >= 64 or seen >> (newest - counter) & 1:
            return False
        self._newest[sender] = newest, seen | 1 << (newest - counter)
        return True
