"""Gradients in 16 bits: nearly the same run, and half the bytes."""

import pytest

from tests.conftest import TINY, forked

FIT = ("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.max_steps=8", "--trainer.limit_val_batches=0", "--run=it")


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_compressed_gradients_make_nearly_the_same_run(tmp_path, form):
    curves = []
    for compression in ("none", form):
        folder = tmp_path / compression
        folder.mkdir()
        run = forked(folder, *FIT, f"--trainer.gradient_compression={compression}", ranks=2)
        assert run.code == 0, run.output
        curves.append(run.curve("train/loss"))
    exact, rounded = curves
    assert rounded == pytest.approx(exact, abs=0.02)
    assert rounded != exact
