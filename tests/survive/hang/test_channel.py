"""Datagrams of strangers: nothing of them is looked at but their seal."""

import json
import random
import socket
import zlib

import pytest

from project.cluster.signed import SEAL
from project.survive.hang.heartbeats import Channel, Member

BOMBS = [
    zlib.compress(b"[" * 100_000),  # ended the watchdog's thread, and with it the rank
    zlib.compress(bytes(50_000_000)),
    zlib.compress(json.dumps({"secret": "", "kind": "fails", "rank": 0, "text": ""}).encode()),
    *(b"", b"\xff" * 65_000, b"{", b"null"),
]


@pytest.fixture
def channels():
    """Of two ranks of one run, and a stranger's socket."""
    pair = [Channel("127.0.0.1") for _ in range(2)]
    members = [Member(rank, "here", "", 1, "", channel.address, "") for rank, channel in enumerate(pair)]
    for channel in pair:
        channel.set_members(members, pair[0].secret)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        yield *pair, stranger
    for channel in pair:
        channel.close()


def heard(channel, seconds=0.3):
    return [message["kind"] for message in channel.receive(seconds)]


def sealed(channel, kind, **content):
    return channel._seal({"kind": kind, **content})


def test_what_is_sealed_arrives_once(channels):
    first, second, stranger = channels
    datagrams = [sealed(first, f"{number}") for number in range(70)]
    for number in (1, 0, 2, 69, 10, 5):  # 5 is older than the last 64
        stranger.sendto(datagrams[number], second.address)
        stranger.sendto(datagrams[number], second.address)
    assert heard(second) == ["1", "0", "2", "69", "10"]


def test_a_stranger_is_not_heard(channels, request):
    """Bombs, what another run has sealed, and real datagrams with one bit or more changed: the next real one arrives."""
    first, second, stranger = channels
    foreign = Channel("127.0.0.1")
    real = sealed(first, "beat", rank=0, text="x" * 200)
    chance = random.Random(0)
    count = 100_000 if request.config.getoption("--faults", default=False) else 5_000
    for number in range(count):
        datagram = bytearray(real)
        for at in chance.sample(range(len(datagram)), chance.choice([1, 1, 2, 50])):
            datagram[at] ^= 1 << chance.randrange(8)
        cut = chance.choice([len(datagram), len(datagram), chance.randrange(len(datagram)), SEAL])
        hostile = [bytes(datagram[:cut]), *BOMBS, sealed(foreign, "fails", rank=0, text="")]
        stranger.sendto(hostile[0] if number % 100 else chance.choice(hostile), second.address)
        if number % 50 == 0:
            second.wake()
            assert heard(second, 5) == []
    foreign.close()
    first.send(1, "beat")
    second.wake()
    assert heard(second, 60) == ["beat"]
