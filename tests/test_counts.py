"""What a user counts in steps and samples means the same on any number of ranks."""

import pytest

from tests.survive.test_resume import FIT, curves


@pytest.mark.parametrize("ranks", [1, 2])
def test_intervals_and_limits_are_in_steps_and_samples(quick, tmp_path, ranks):
    words = ("--trainer.limit_train_batches=6", "--trainer.val_check_interval=4", "--trainer.limit_val_batches=3")
    done = quick(*FIT, *words, "--checkpoints.every_n_steps=5", "--checkpoints.keep_last=99", ranks=ranks)
    assert done.code == 0, done.output
    logged = curves(tmp_path)
    assert [step for step, _ in logged["val/acc"]] == [4, 10, 16]
    assert [step for step, _ in logged["train/acc_epoch"]] == [6, 12, 18]
    assert all(value * 24 == pytest.approx(round(value * 24)) for _, value in logged["val/acc"])  # 3 micro-batches of 8
    kept = [int(path.stem.split("-")[1]) for path in sorted((tmp_path / "lightning_logs/it/checkpoints").glob("*.ckpt"))]
    assert kept == [4, 5, 10, 15, 16, 18]


def test_a_limit_that_leaves_some_ranks_without_a_sample_is_named(quick):
    words = ("--data=tests.own.PointsData", "--data.init_args.batch_size=1", "--trainer.limit_val_batches=1")
    settings = ("--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.limit_train_batches=1")
    done = quick("fit", "--model=tests.own.Regression", *words, *settings, "--trainer.global_batch_size=2", ranks=2)
    assert done.code == 0, done.output
    assert done.output.count("trainer.limit_val_batches=1 leaves 1 sample(s), and each of 2 ranks needs one") == 1
    assert "HINT: limit_val_batches=2 has the same samples" in done.output


def test_plain_accumulation_makes_the_global_batch(quick):
    run = quick(*FIT, "--data.global_batch_size=null", "--trainer.accumulate_grad_batches=3", "--trainer.max_steps=1")
    assert run.code == 0, run.output
    assert "x micro-batch 8 x accumulation 3 = global batch 24" in run.output


def test_drop_leaves_the_tail_out(quick, tmp_path):
    run = quick(*FIT, "--data.tail=drop", "--trainer.max_epochs=2")
    assert run.code == 0, run.output
    assert [step for step, _ in curves(tmp_path)["train/acc_epoch"]] == [7, 14]
