"""Real hosts and a real Slurm, on one machine: started once, and left as they were found after each test."""

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.slurm import Slurm
from tests.cluster.training import FIT
from tests.conftest import forked


@pytest.fixture(scope="session")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(3, tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture
def hosts(three_hosts: Hosts) -> Iterator[Hosts]:
    """h1, h2 and h3; nothing of this test runs on them afterwards."""
    yield three_hosts
    three_hosts.kill()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Four nodes."""
    with Slurm(4, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The loss of tests.cluster.training on one process, by step: what it must be everywhere."""
    run = forked(tmp_path_factory.mktemp("alone"), *FIT)
    assert run.code == 0, run.output
    return run.curve("train/loss")
