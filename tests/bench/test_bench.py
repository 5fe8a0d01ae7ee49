"""The benchmark runs, and compares like with like; the plain loop stands alone."""

import json
import subprocess
import sys

import pytest

from project.bench.bench import PLAIN_LOOP
from project.bench.worker import load
from project.model import MiniResNet
from project.train.precision import cpu_precision
from tests.conftest import environment


def test_the_plain_loop_is_short_and_trains_the_same_network():
    assert len(PLAIN_LOOP.read_text().splitlines()) <= 150
    plain, ours = load(str(PLAIN_LOOP)).MiniResNet(), MiniResNet()
    assert [tuple(one.shape) for one in plain.parameters()] == [tuple(one.shape) for one in ours.parameters()]


def test_the_plain_loop_runs_by_itself(tmp_path):
    command = [sys.executable, str(PLAIN_LOOP), "--epochs=1", "--size=16", "--batch-size=8"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 0: loss ")


@pytest.mark.timed
def test_a_benchmark(cli, tmp_path):
    """The ratios are loose: what they must catch is a lever that is lost."""
    run = cli("bench", "--config=configs/bench.yaml", "--run=it", "--ranks=[1]", "--turns=1", "--steps=1")
    assert run.code == 0, run.output
    assert "times the plain loop" in run.output
    found = json.loads((tmp_path / "lightning_logs/it/bench.json").read_text())
    (training,) = found["training"]
    in_bf16 = cpu_precision("16-mixed")[0] == "bf16-mixed"  # a lever that not every processor has
    assert training["programs"]["ours"]["ratio"][0] > (1.5 if in_bf16 else 0.8)
    assert training["programs"]["ours in fp32"]["ratio"][0] > 0.8
    assert found["loading"]["ratio"][0] > 6
    alone = found["framework"]["us_a_step"]
    assert alone["ours"] < 3 * alone["plain"]
    assert all(one["phases_ms"]["data"] > 0 for one in training["programs"].values())
    assert set(training["programs"]["plain"]["phases_ms"]) == set(training["programs"]["ours"]["phases_ms"])
    assert (tmp_path / "lightning_logs/it/bench.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--model.network.init_args.num_classes=12",), "this config has another network"),
        (("--turns=0",), "at least one turn"),
    ],
)
def test_what_can_not_be_measured(quick, words, cause):
    run = quick("bench", "--config=configs/bench.yaml", *words)
    assert run.code == 1
    assert cause in run.output
    assert "Traceback" not in run.output
