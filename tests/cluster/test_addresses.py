"""By which address a host is reached, on hosts, and on one whose own name leads to itself only."""

import dataclasses
import subprocess
import sys

import pytest

from project.cluster.addresses import towards
from tests.conftest import environment

ASK = [sys.executable, "-m", "project.cluster.addresses"]


@pytest.mark.parametrize(
    ("whom", "answer"),
    [("h2", "10.77.0.1 0"), ("10.77.0.2", "10.77.0.1 0"), ("h1", "10.77.0.1 1"), ("127.0.0.1", "127.0.0.1 1")],
)
def test_a_host_knows_its_address(hosts, tmp_path, whom, answer):
    asked = hosts[0].start([*ASK, whom], subprocess.PIPE, tmp_path, environment())
    assert asked.communicate(timeout=30)[0].decode().strip() == answer


def test_debians_127_0_1_1_is_not_given_to_others(hosts, tmp_path):
    trap = tmp_path / "hosts"
    trap.write_text("127.0.0.1 localhost\n127.0.1.1 h1\n10.77.0.2 h2\n")
    host = dataclasses.replace(hosts[0], hosts_file=trap)
    asked = host.start([*ASK, "h1"], subprocess.PIPE, tmp_path, environment())
    assert asked.communicate(timeout=30)[0].decode().strip() == "10.77.0.1 1"


def test_without_another_host_it_is_the_loopback():
    assert towards("localhost") in [("127.0.0.1", True), ("::1", True)]
