"""Whole runs on the stand-in for a GPU, and what its probes see of them."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY, Cli
from tests.own import write_texts
from tests.standin.test_runs import GPT
from tests.train.test_sharded import sharded

FIT = ["fit", "--config", "configs/ddp.yaml", *TINY, "--trainer.max_epochs=4"]


def probe(name: str, **settings: Any) -> str:
    return "--trainer.callbacks+=" + json.dumps({"class_path": f"tests.standin.probes.{name}", "init_args": settings})


def written(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}-0.json").read_text())


@pytest.mark.slow
def test_a_fit_has_the_losses_of_the_cpu(gpu: Cli, quick: Cli) -> None:
    on_gpu = gpu(*FIT)
    assert on_gpu.code == 0, on_gpu.output
    assert "parameters on cuda" in on_gpu.output
    losses = on_gpu.curve("train/loss")
    (run,) = on_gpu.runs
    run.rename(run.parent.parent / "on_gpu")
    on_cpu = quick(*FIT, "--trainer.accelerator=cpu").curve("train/loss")
    assert losses == pytest.approx(on_cpu, rel=1e-3)
    assert len(losses) == 8


def test_probes_see_launches_contexts_and_the_loss_scale(gpu: Cli, tmp_path: Path) -> None:
    captured = ["--trainer.precision=16-mixed", "--trainer.capture=auto", "--trainer.log_every_n_steps=50"]
    probes = [probe("Cost", first=4, last=8), probe("Contexts"), probe("Scale", initial=2.0**30)]
    run = gpu(*FIT, *captured, *probes, gpus=2)
    assert run.code == 0, run.output
    cost = written(tmp_path, "cost")
    assert cost["launches"] > cost["graphs"] >= 8  # micro-batches a step
    assert written(tmp_path, "contexts") == {"devices": [0], "own": 0}
    assert written(tmp_path, "scale")["1"] == 2.0**29


def test_what_others_hold_of_a_gpu_is_not_counted_on(gpu: Cli, tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    run = gpu(
        *GPT,
        sharded(),
        "--data.init_args.text=texts",
        "--trainer.max_steps=1",
        ranks=2,
        STANDIN_GIB="8",
        STANDIN_OTHERS_GIB="7.5",
    )
    assert run.code == 0, run.output
    assert "fits a device like the one here (512 MiB each; 7.5 GiB of 8.0 GiB are held by others)." in run.output


@pytest.mark.skipif(find_spec("pynvml") is not None, reason="it is there")
def test_the_doctor_says_which_extra_looks_at_gpus(gpu: Cli) -> None:
    run = gpu("doctor", "--config", "configs/ddp.yaml", *TINY, "--fast=true")
    assert run.code == 0, run.output
    assert re.search(r"GPUs +. skipped +. not looked at: .*nvidia-ml-py", run.output)
