"""A run that is made longer, or that ran out of time, goes on as if it had been so from the beginning, as far as it can."""

import json

import pytest

from tests.conftest import forked
from tests.survive.test_resume import FIT, assert_same_run, curves, faults

pytestmark = pytest.mark.slow

EPOCH = 8  # steps


def fit(quick, *words: str, ranks: int = 1):
    return quick(*FIT, *words, "--trainer.num_sanity_val_steps=0", ranks=ranks)


@pytest.mark.parametrize(
    "schedule",
    [
        ("--model.lr_scheduler=project.model.WarmupCosine", "--model.lr_scheduler.warmup_steps=2"),
        ("--model.lr_scheduler=torch.optim.lr_scheduler.OneCycleLR", "--model.lr_scheduler.max_lr=0.1"),
    ],
    ids=["our cosine", "OneCycleLR"],
)
def test_the_schedule_of_a_longer_run(quick, tmp_path, schedule):
    """From where it goes on, the learning rate is that of a run which was so long from the start, and not 0."""
    once = "OneCycleLR" in schedule[0]

    def words(epochs: int) -> list[str]:
        total = [f"--model.lr_scheduler.total_steps={epochs * EPOCH}"] * once
        return [*schedule, *total, f"--trainer.max_epochs={epochs}"]

    assert fit(quick, *words(1)).code == 0
    longer = fit(quick, *words(2), *["--change=model.lr_scheduler"] * once, ranks=1 + (not once))
    assert longer.code == 0, longer.output
    assert once or longer.output.count("The schedule is another than the run began with") == 1
    whole = tmp_path / "whole"
    whole.mkdir()
    assert forked(whole, *FIT, *words(2), faults()).code == 0
    rates, expected = dict(curves(tmp_path)["train/lr"]), dict(curves(whole)["train/lr"])
    assert rates.keys() == expected.keys()
    added = range(EPOCH + 1, 2 * EPOCH)  # a step is logged with the rate of the next
    assert [rates[step] for step in added] == pytest.approx([expected[step] for step in added], rel=1e-6)
    assert all(rates[step] > 0 for step in added)


def test_a_schedule_that_is_too_short_is_refused(quick):
    short = ("--model.lr_scheduler=torch.optim.lr_scheduler.OneCycleLR", "--model.lr_scheduler.max_lr=0.1")
    refused = fit(quick, *short, "--model.lr_scheduler.total_steps=8", "--trainer.max_epochs=2")
    assert refused.code == 2
    assert "OneCycleLR has total_steps=8, and moves 16 times in this run" in refused.output
    assert "Traceback" not in refused.output


def test_a_cosine_without_an_end_is_refused(quick):
    refused = fit(quick, "--trainer.max_epochs=-1", "--trainer.max_time=00:01:00:00")
    assert refused.code == 2
    assert "WarmupCosine ends with the run, and nothing says when that is" in refused.output
    assert "Traceback" not in refused.output


def test_out_of_time(quick, tmp_path):
    """It says so, saves, and continues with more of it: the curve is that of a run which had all the time there is."""
    up = "--trainer.callbacks=" + json.dumps([{"class_path": "tests.probes.TimeIsUp", "init_args": {"step": 6}}])
    words = ("--trainer.max_time=00:01:00:00", up)
    stopped = fit(quick, *words)
    assert stopped.code == 0, stopped.output
    assert "Stopped by trainer.max_time after step 7 of 24" in stopped.output
    saved = json.loads((tmp_path / "lightning_logs/it/checkpoints/step-000000007.json").read_text())
    assert saved["finished"] is False
    restarted = fit(quick, *words)
    assert "Stopped by trainer.max_time after step 7 of 24" in restarted.output, "the time is that of all starts together"
    resumed = fit(quick, up, "--trainer.max_time=20000:00:00:00")
    assert resumed.code == 0, resumed.output
    whole = tmp_path / "whole"
    whole.mkdir()
    assert forked(whole, *FIT, faults()).code == 0
    assert_same_run(tmp_path, whole)
