"""By which address a host is reached, on hosts, and on one whose own name leads to itself only."""

import subprocess
import sys

import pytest

from project.cluster.interfaces import route, towards
from tests.conftest import environment

ASK = [sys.executable, "-m", "project.cluster.interfaces"]


@pytest.mark.parametrize(
    ("whom", "answer"),
    [("h2", "10.77.0.1 0"), ("10.77.0.2", "10.77.0.1 0"), ("h1", "10.77.0.1 1"), ("127.0.0.1", "127.0.0.1 1")],
)
def test_a_host_knows_its_address(hosts, tmp_path, whom, answer):
    process = hosts[0].start([*ASK, whom], subprocess.PIPE, tmp_path, environment())
    assert process.communicate(timeout=30)[0].decode().strip() == answer


def test_debians_127_0_1_1_is_not_given_to_others(hosts, tmp_path):
    host = hosts[0].named_by_debian()
    process = host.start([*ASK, "h1"], subprocess.PIPE, tmp_path, environment())
    assert process.communicate(timeout=30)[0].decode().strip() == "10.77.0.1 1"


def test_without_another_host_it_is_the_loopback():
    assert towards("localhost") in [("127.0.0.1", True), ("::1", True)]


def test_an_interface_that_is_asked_for_must_be_there():
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=nope0, and .* has no interface nope0. It has .*lo"):
        route("127.0.0.1", {"GLOO_SOCKET_IFNAME": "nope0"})
    with pytest.raises(ValueError, match="NCCL_SOCKET_IFNAME"):
        route("127.0.0.1", {"NCCL_SOCKET_IFNAME": "=nope"})
    assert route("127.0.0.1", {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^docker"}).chosen is False
    assert route("127.0.0.1", {}).interface == "lo"
