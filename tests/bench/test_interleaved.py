"""Programs take turns: each is measured alone, all its ranks together, and a program that ends is reported."""

import sys

import pytest

from scripts.bench.interleaved import Program, interleaved
from tests.conftest import ROOT

RANK = """
import os, time
from scripts.bench.worker import Worker

gate = Worker()
for step in range(100_000):
    with open("order.txt", "a") as file:
        file.write(os.environ["NAME"] + os.environ.get("RANK", "0") + " ")
    time.sleep({pause})
    gate.after_step()
"""


def program(name: str, pause: float, ranks: int = 1, text: str = RANK) -> Program:
    command = (sys.executable, "-c", text.format(pause=pause))
    return Program(name, ranks, (command,) * ranks, {"NAME": name, "PYTHONPATH": str(ROOT)})


@pytest.mark.slow
def test_one_after_the_other_in_each_round(tmp_path):
    measured = interleaved([program("a", 0.0), program("b", 0.1, ranks=2)], tmp_path, turns=2, steps=3)
    order = (tmp_path / "order.txt").read_text().split()
    assert order[:1] == ["a0"]
    assert set(order[1:3]) == {"b0", "b1"}  # one program starts after the other
    rounds = order[3:]
    for _ in range(4):  # the warm-up and two turns; then the phases of each
        assert rounds[:3] == ["a0"] * 3
        assert sorted(rounds[3:9]) == ["b0"] * 3 + ["b1"] * 3
        rounds = rounds[9:]
    assert not rounds
    assert measured["b"].step > measured["a"].step
    assert all(ratio > 1 for ratio in measured["a"].against(measured["b"]))
    assert measured["a"].memory > 2**20
    assert measured["a"].fp32 == {"products": "highest", "tf32 in convolutions": True}  # torch's own defaults


@pytest.mark.faults
def test_a_turn_lasts_long_enough(tmp_path):
    """Five steps of a GPU are over in ten milliseconds: the warm-up finds out how many each program takes."""
    measured = interleaved([program("a", 0.0), program("b", 0.02)], tmp_path, turns=2, steps=2, least_seconds=0.3)
    for result in measured.values():
        assert min(result.seconds) * result.steps > 0.2
    assert measured["b"].steps < 30 < measured["a"].steps
    long = interleaved([program("b", 0.2)], tmp_path, turns=1, steps=2, least_seconds=0.3)
    assert long["b"].steps == 2  # these last long enough as they are


def test_a_program_that_ends_is_shown(tmp_path):
    with pytest.raises(ValueError, match=r"'broken' has ended:\n(.|\n)*ZeroDivisionError(.|\n)*broken.log"):
        interleaved([program("broken", 0, text="1/0")], tmp_path, turns=1, steps=1)
