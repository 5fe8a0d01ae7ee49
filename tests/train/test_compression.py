"""Gradients in 16 bits: nearly the same run, and half the bytes."""

import pytest

from project.step.compression import supported_compression
from project.step.precision import cpu_precision
from tests.conftest import TINY, forked

FIT = ("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.max_steps=8", "--trainer.limit_val_batches=0", "--run=it")


def test_compressed_gradients_make_nearly_the_same_run(tmp_path):
    curves = []
    for compression in ("none", "bf16"):
        folder = tmp_path / compression
        folder.mkdir()
        run = forked(folder, *FIT, f"--trainer.gradient_compression={compression}", ranks=2)
        assert run.code == 0, run.output
        curves.append(run.curve("train/loss"))
    exact, rounded = curves
    assert rounded == pytest.approx(exact, abs=0.02)
    assert rounded != exact


@pytest.mark.parametrize("precision", ["16-mixed", "auto"])
def test_on_a_cpu_fp16_is_bf16_as_nothing_scales_the_loss(tmp_path, precision):
    run = forked(tmp_path, *FIT, f"--trainer.precision={precision}", "--trainer.gradient_compression=fp16", ranks=2)
    assert run.code == 0, run.output
    assert "trainer.gradient_compression=bf16 instead of fp16: in " in run.output


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_fp16_would_lose_small_gradients_and_is_refused(tmp_path, precision):
    run = forked(tmp_path, *FIT, f"--trainer.precision={precision}", "--trainer.gradient_compression=fp16")
    assert run.code == 2
    taken, _ = cpu_precision(precision)  # which CPUs are faster in 16 bits, differs
    assert f"trainer.gradient_compression=fp16 needs trainer.precision=16-mixed: in {taken} nothing scales" in run.output
    assert "Traceback" not in run.output


def test_with_scaling_it_stays():
    assert supported_compression("fp16", "16-mixed", "16-mixed") == ("fp16", None)
    assert supported_compression("bf16", "32-true", "32-true") == ("bf16", None)
