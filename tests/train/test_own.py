"""Modules and data that are not of this project: the same promises."""

import re
import signal
from collections import defaultdict

import pytest
import torch

from tests.conftest import forked
from tests.survive.test_resume import curves, faults, same

RUN = (
    *("fit", "--data=tests.own.PointsData", "--trainer.max_epochs=3", "--trainer.accelerator=cpu", "--run=it"),
    "--trainer.log_every_n_steps=1",
)
MODULES = {
    "automatic": ("--model=tests.own.Regression", "--trainer.global_batch_size=24"),
    "manual": ("--model=tests.own.Duel", "--trainer.strategy=ddp_find_unused_parameters_true"),
}


def newest(folder):
    return torch.load(max((folder / "lightning_logs/it/checkpoints").glob("*.ckpt")), weights_only=True)


def seen(folder):
    steps = defaultdict(set)
    for file in folder.glob("seen-*.txt"):
        for line in file.read_text().splitlines():
            step, *samples = line.split()
            assert not steps[int(step)] & {*samples}
            steps[int(step)] |= {*samples}
    return steps


def test_the_number_of_ranks_does_not_matter(tmp_path):
    runs = {}
    for ranks in (1, 2, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        done = forked(folder, *RUN, *MODULES["automatic"], ranks=ranks)
        assert done.code == 0, done.output
        runs[ranks] = seen(folder), newest(folder)["state_dict"], curves(folder)
    samples, weights, curve = runs[1]
    assert len(samples) == 6  # of 24 and 26 samples, in 3 epochs
    assert sorted(map(len, samples.values())) == [24] * 3 + [26] * 3
    for other_samples, other_weights, other_curve in (runs[2], runs[3]):
        assert other_samples == samples
        assert all(torch.allclose(weights[name], other_weights[name], rtol=0, atol=1e-12) for name in weights)
        assert other_curve.keys() == curve.keys()
        for tag in (
            "loss_epoch",
            "error",
            "samples",
            "sum",
            "largest",
            "val_loss/dataloader_idx_0",
            "val_loss/dataloader_idx_1",
        ):
            assert [value for _, value in other_curve[tag]] == pytest.approx([value for _, value in curve[tag]], rel=1e-5), tag


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("module", MODULES)
def test_a_run_that_was_killed_goes_on(quick, tmp_path, module, ranks):
    words = [*RUN, *MODULES[module]]
    if module == "manual":
        words.append(f"--data.init_args.batch_size={24 // ranks}")  # a module that steps by itself does not accumulate
    whole = tmp_path / "whole"
    whole.mkdir()
    done = forked(whole, *words, faults(), ranks=ranks)
    assert done.code == 0, done.output
    saved = 3 if module == "automatic" else 8  # where there are two optimisers, both count
    words.append(f"--checkpoints.every_n_steps={saved}")
    fault = faults({"rank": ranks - 1, "where": "saved", "step": saved, "number": int(signal.SIGKILL)})
    assert quick(*words, fault, ranks=ranks).code != 0
    resumed = quick(*words, fault, ranks=ranks)
    assert resumed.code == 0, resumed.output
    assert re.search(r"Goes on from .*: epoch \d, step [1-9] of it", resumed.output), resumed.output
    ours, theirs = newest(tmp_path), newest(whole)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "position"):
        assert same(ours[part], theirs[part]), part
    assert curves(tmp_path) == curves(whole)
