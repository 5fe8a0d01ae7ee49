"""Real hosts and a real Slurm, on one machine: started once, and left as they were found after each test."""

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Hosts


@pytest.fixture(scope="session")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(3, tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture
def hosts(three_hosts: Hosts) -> Iterator[Hosts]:
    """h1, h2 and h3; nothing of this test runs on them afterwards."""
    yield three_hosts
    three_hosts.kill()
