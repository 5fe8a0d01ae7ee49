"""To look at a step's phases hardly disturbs it: no wait for the device, and a few marks."""

import time
from typing import Any

import pytest
import torch

from project.model import MiniResNet
from project.watch.flops import flops
from scripts.bench.phases import NAMES, LastGradient, Phases


class Counting:
    """Stands in for a GPU's clock: counts what is noted, and waits for the device."""

    def __init__(self) -> None:
        self.noted = self.waits = 0

    def now(self) -> int:
        self.noted += 1
        return self.noted

    def wait(self, moment: int) -> None:
        self.waits += 1

    def seconds(self, start: int, end: int) -> float:
        return float(end - start)


@pytest.fixture
def network() -> Any:
    torch.manual_seed(0)
    return MiniResNet(widths=[4, 8, 16])


def step(network: Any, wait: Any = lambda: None) -> None:
    loss = network(torch.randn(2, 3, 8, 8)).square().mean()
    loss.backward()
    wait()


def test_a_backward_pass_is_marked_a_few_times_and_never_waited_for(network, monkeypatch):
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append("synchronize"))
    learning, clock = LastGradient(), Counting()
    step(network)
    phases = Phases(learning.end(), clock)
    for _ in range(3):
        before = clock.noted
        step(network)
        assert clock.noted - before == 4  # copy, forward, backward, sync: not one for each of 47 parameters
        assert clock.waits == 0
    spent = phases.end()
    assert (clock.waits, waits) == (1, [])
    assert set(spent) == set(NAMES)
    assert all(spent[name] == 3 for name in ("copy", "forward", "backward", "sync"))


def test_the_last_gradient_is_that_of_the_first_layer(network):
    learning = LastGradient()
    torch.nn.ReLU()(torch.zeros(1))  # has nothing to learn: not the network
    assert flops(network, (3, 8, 8)) > 0  # counted on a twin, in a run's first step
    step(network)
    last = learning.end()
    assert last is network.get_parameter(next(name for name, _ in network.named_parameters()))
    before = list(last._post_accumulate_grad_hooks or ())
    assert before == []


def test_phases_last_as_long_as_they_do(network):
    learning = LastGradient()
    step(network)
    phases = Phases(learning.end())
    time.sleep(0.1)
    step(network)
    time.sleep(0.2)
    spent = phases.end()
    assert 0.1 <= spent["copy"] < 0.2 <= spent["logging"]
    assert spent["backward"] > 0
    assert spent["sync"] < spent["backward"]
