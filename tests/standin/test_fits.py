"""Whole runs on the stand-in for a GPU."""

import pytest

from tests.conftest import TINY, Cli

FIT = ["fit", "--config", "configs/ddp.yaml", *TINY, "--trainer.max_epochs=4"]


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
