"""Who comes, who doesn't, who comes twice: real processes, by the command that scripts/launch.sh runs on every node."""

import itertools
import socket
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from tests.cluster.machine import LONG
from tests.conftest import ROOT, fork

Node = tuple[ForkServerProcess, Path]


@pytest.fixture
def node(tmp_path: Path) -> Callable[..., Node]:
    """Returns what starts a node: node(port, 1, nodes=3)."""
    numbers = itertools.count()

    def start(port: int, rank: int, nodes: int = 2, address: str = "127.0.0.1", processes: int = 1) -> Node:
        words = [f"--node-rank={rank}", f"--nodes={nodes}", f"--address={address}", f"--port={port}"]
        output = tmp_path / f"{next(numbers)}.txt"
        words += [f"--processes={processes}", "--seconds=4"]
        return fork("project.cluster.rendezvous:main", ROOT, *words, output=output), output

    return start


def ends(*nodes: Node) -> list[tuple[int | None, str]]:
    for process, _ in nodes:
        process.join(LONG)
    return [(process.exitcode, output.read_text()) for process, output in nodes]


def test_all_come(node):
    port = find_free_network_port()
    assert ends(node(port, 0), node(port, 1)) == [(0, ""), (0, "")]


def test_who_is_missing_is_named_once(node):
    port = find_free_network_port()
    first, second = ends(node(port, 0, nodes=3), node(port, 1, nodes=3))
    assert first[0] == 1
    assert f"2 of 3 nodes have come to 127.0.0.1:{port}" in first[1]
    assert "Missing: node 2." in first[1]
    assert second == (1, "")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"nodes": 3}, "Node 1 on {host} was told of 3 nodes, and node 0 of 2"),
        ({"processes": 2}, "different numbers of processes ({host}: 1, {host}: 2)"),
    ],
    ids=["another size", "another number of processes"],
)
def test_what_does_not_fit_together_is_said_once(node, changed, words):
    port = find_free_network_port()
    results = ends(node(port, 0), node(port, **{"rank": 1, **changed}))
    outputs = [output for _, output in results if output]
    assert len(outputs) == 1
    assert words.format(host=socket.gethostname()) in outputs[0]
    assert "HINT" in outputs[0]
    assert 1 in [code for code, _ in results]


def test_a_port_that_is_taken(node):
    with socket.create_server(("", 0)) as taken:
        ((code, output),) = ends(node(taken.getsockname()[1], 0))
    assert code == 1
    assert "is in use by another program. HINT" in output


def test_a_number_that_comes_twice(node):
    port = find_free_network_port()
    results = ends(node(port, 0, nodes=3), node(port, 1, nodes=3), node(port, 1, nodes=3))
    assert [code for code, _ in results] == [1, 1, 1]
    assert "Node 1 has come twice" in results[0][1]
    assert results[1][1] == results[2][1] == ""


@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.0.1", "that is {host} itself"), ("no-such-host.invalid", "does not know the host no-such-host.invalid")],
)
def test_who_finds_nobody_says_why(node, address, words):
    ((code, output),) = ends(node(find_free_network_port(), 1, address=address))
    assert code == 1
    assert words.format(host=socket.gethostname()) in output
