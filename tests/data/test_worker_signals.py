"""A loader's processes outlive the signals that their rank outlives, and end where it wants them to."""

import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from project.data.dealing import deal
from project.data.order import Order
from project.data.worker_signals import with_signals
from tests.conftest import environment


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(1)


def dealt(persistent):
    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=2, num_workers=2, persistent_workers=persistent)
    return deal(loader, Order(64, 2, 1, None), 0, 1, 0)


def left_alone():
    loader = DataLoader(Endless(), num_workers=2)
    with_signals(loader)
    return loader


@pytest.fixture
def caught():
    """Signals that this process has a handler for, as a rank has."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    "loader", [lambda: dealt(False), lambda: dealt(True), left_alone], ids=["dealt", "persistent", "iterable"]
)
def test_a_signal_to_the_group_does_not_end_them(caught, loader):
    batches = iter(loader())
    before = [next(batches) for _ in range(8)]  # each has begun
    for worker in multiprocessing.active_children():
        for number in caught:
            os.kill(worker.pid, number)
    assert len(before + [next(batches) for _ in range(20)]) == 28


PROGRAM = """
import signal, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from project.data.dealing import deal
from project.data.order import Order
signal.signal(signal.SIGTERM, lambda *_: None)
loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=2, num_workers=2, persistent_workers=True)
loader = deal(loader, Order(64, 2, 1, None), 0, 1, 0)
print(len([*loader]))
"""


def test_they_end_with_the_program_though_its_handlers_are_still_there():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "32\n", "")
