"""The benchmark runs, and compares like with like; the plain loop stands alone."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from project.errors import UserError
from project.model import MiniResNet
from project.step.precision import cpu_precision
from scripts.bench import bench, report
from scripts.bench.bench import PLAIN_LOOP, Comparison, Measured, compute_alike, peak
from scripts.bench.worker import load
from tests.conftest import environment


def test_the_plain_loop_is_short_and_trains_the_same_network():
    assert len(PLAIN_LOOP.read_text().splitlines()) <= 150
    plain, network = load(str(PLAIN_LOOP)).MiniResNet(), MiniResNet()
    assert [tuple(parameter.shape) for parameter in plain.parameters()] == [
        tuple(parameter.shape) for parameter in network.parameters()
    ]


def test_the_plain_loop_runs_by_itself(tmp_path):
    command = [sys.executable, str(PLAIN_LOOP), "--epochs=1", "--size=16", "--batch-size=8"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 0: loss ")


@pytest.mark.parametrize(
    ("precision", "products", "scales"), [("fp32", "float32", False), ("bf16", "bfloat16", False), ("fp16", "float16", True)]
)
def test_the_plain_loop_computes_in_the_precision_that_it_is_told(monkeypatch, precision, products, scales):
    plain: Any = load(str(PLAIN_LOOP))
    scalers, dtypes, make = [], set(), torch.amp.GradScaler

    def scaler(*args: Any, **kwargs: Any) -> Any:
        scalers.append(make(*args, **kwargs))
        return scalers[-1]

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3 * 32 * 32, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            out = self.layer(images.flatten(1))
            dtypes.add(str(out.dtype))
            return out

    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    words = ["--epochs=1", "--size=8", "--batch-size=4", f"--precision={precision}"]
    plain.train(plain.arguments().parse_args(words), Network())
    assert dtypes == {f"torch.{products}"}
    assert [grad_scaler.is_enabled() for grad_scaler in scalers] == [scales]


class Started(SimpleNamespace):
    """What `training` would have started, and how long each program's step takes."""

    def interleaved(self, programs: Any, folder: Any, turns: int, steps: int, between: Any, least: float) -> Any:
        between()
        self.commands = {program.name: " ".join(program.commands[0]) for program in programs}
        seconds = {"plain in fp32": 6.0, "ours in fp32": 5.0, "plain in bf16": 3.0, "ours": 2.0}
        phases = dict.fromkeys(("data", "copy", "forward", "backward", "sync", "optimiser", "logging"), 0.1)
        return {name: Measured([seconds[name]] * 2, [1.0], phases, 2**30, 7, {"products": "highest"}) for name in self.commands}


def comparison(folder: Any) -> Comparison:
    return Comparison(
        folder / "it.yaml", folder, 64, 1000, workers=lambda _: 0, threads=lambda _: 1, flops=1e9, turns=2, steps=1
    )


def test_like_stands_beside_like(tmp_path, monkeypatch):
    started = Started()
    monkeypatch.setattr(bench, "interleaved", started.interleaved)
    monkeypatch.setattr(bench, "peak", lambda dtype: {torch.float32: 1e12, torch.bfloat16: 2e12}[dtype])
    measured = bench.training(comparison(tmp_path), 1, [torch.float32, torch.bfloat16])
    assert list(started.commands) == ["plain in fp32", "ours in fp32", "plain in bf16", "ours"]
    assert "--precision=fp32" in started.commands["plain in fp32"]
    assert "--trainer.precision=32-true" in started.commands["ours in fp32"]
    assert "--precision=bf16" in started.commands["plain in bf16"]
    assert measured.peaks == {"fp32": 1e12, "bf16": 2e12}
    results = bench.results([measured], bench.Round(1, 2, dict.fromkeys(("plain", "ours"), measured.programs["ours"])), {
        "plain": [1.0, 1.0], "ours": [2.0, 2.0]
    }, comparison(tmp_path))  # fmt: skip
    (training,) = results["training"]
    assert training["programs"]["ours"]["ratio"] == [3.0, 3.0]
    assert training["programs"]["ours"]["ratio_in_bf16"] == [1.5, 1.5]
    assert "ratio_in_bf16" not in training["programs"]["ours in fp32"]

    console = Console(width=140, record=True)
    report.show(results, console)
    text = console.export_text()
    assert "times the plain loop in fp32" in text
    assert "times the plain loop in bf16" in text
    report.draw(results, tmp_path / "it.svg")

    bench.training(comparison(tmp_path), 1, [torch.float32])
    assert list(started.commands) == ["plain in fp32", "ours in fp32", "ours"]  # of which all are in fp32


def test_programs_that_compute_otherwise_in_fp32_are_not_compared():
    tf32, plain = Measured(fp32={"products": "high"}), Measured(fp32={"products": "highest"})
    compute_alike({"a": plain, "b": plain})
    with pytest.raises(UserError, match="compute otherwise in fp32"):
        compute_alike({"a": plain, "b": tf32})


def test_a_matrix_product_on_a_gpu_is_timed_by_events_in_a_row_and_in_tf32_where_convolutions_are(monkeypatch):
    """Each wait and each launch would count for the product otherwise."""
    heard: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None:
            heard.append("record")

        def synchronize(self) -> None:
            heard.append("wait")

        def elapsed_time(self, end: Any) -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: heard.append("wait"))
    monkeypatch.setattr(torch, "randn", lambda *_, device: torch.zeros(2, 2))
    monkeypatch.setattr(torch, "mm", lambda *_: heard.append(torch.get_float32_matmul_precision()))
    assert peak(torch.float32, repeats=2) == pytest.approx(2 * 8192**3 * 10 / 1e-3)
    assert heard == ["record", *["high"] * 10, "record", "wait"] * 3
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.faults
@pytest.mark.timed
def test_a_benchmark(cli, tmp_path):
    """The ratios are loose: what they must catch is a lever that is lost."""
    run = cli("bench", "--config=configs/bench.yaml", "--run=it", "--ranks=[1]", "--turns=1", "--steps=1")
    assert run.code == 0, run.output
    assert "times the plain loop" in run.output
    results = json.loads((tmp_path / "lightning_logs/it/bench.json").read_text())
    (training,) = results["training"]
    in_bf16 = cpu_precision("16-mixed")[0] == "bf16-mixed"  # a lever that not every processor has
    assert training["programs"]["ours"]["ratio"][0] > (1.5 if in_bf16 else 0.8)
    assert training["programs"]["ours in fp32"]["ratio"][0] > 0.8
    assert ("plain in bf16" in training["programs"]) == in_bf16
    assert results["loading"]["ratio"][0] > 6
    alone = results["framework"]["us_a_step"]
    assert alone["ours"] < 3 * alone["plain"]
    assert all(program["phases_ms"][name] > 0 for program in training["programs"].values() for name in ("data", "backward"))
    assert set(training["programs"]["plain in fp32"]["phases_ms"]) == set(training["programs"]["ours"]["phases_ms"])
    assert (tmp_path / "lightning_logs/it/bench.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--model.network.init_args.num_classes=12",), "this config has another network"),
        (("--turns=0",), "at least one turn"),
    ],
)
def test_what_can_not_be_measured(quick, words, cause):
    run = quick("bench", "--config=configs/bench.yaml", *words, program="scripts.bench.verb:main")
    assert run.code == 2
    assert cause in run.output
    assert "Traceback" not in run.output
