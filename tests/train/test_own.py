"""Modules and data that are not of this project, or know nothing of it: the same promises."""

import json
import re
import signal
from collections import defaultdict

import pytest
import torch

from project.errors import TRY_AGAIN
from tests.conftest import forked
from tests.own import write_texts
from tests.survive.test_resume import curves, faults, same

OFTEN = ("--run=it", "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1", "--checkpoints.every_n_steps=2")
RUN = ("fit", "--data=tests.own.PointsData", "--trainer.max_epochs=3", *OFTEN)
MODULES = {
    "automatic": (*RUN, "--model=tests.own.Regression", "--trainer.global_batch_size=24"),
    "manual": (*RUN, "--model=tests.own.Duel", "--trainer.strategy=ddp_find_unused_parameters_true"),
    # 6 steps in an epoch
    "gpt": (
        *("fit", "--config=configs/gpt.yaml", *OFTEN, "--trainer.precision=32-true", "--trainer.global_batch_size=12"),
        *("--trainer.max_steps=14", "--trainer.val_check_interval=4", "--data.init_args.text=../texts"),
        *("--data.init_args.held_out=0.2", "--data.init_args.context=32", "--data.init_args.batch_size=2"),
        *("--model.init_args.context=32", "--model.init_args.layers=2", "--model.init_args.heads=2"),
        *("--model.init_args.width=32", "--model.init_args.dropout=0.2", "--model.init_args.warmup_steps=3"),
    ),
}


@pytest.fixture
def folders(tmp_path):
    """Makes folders to run in; the texts lie beside them."""
    write_texts(tmp_path / "texts")

    def made(name):
        (tmp_path / str(name)).mkdir()
        return tmp_path / str(name)

    return made


def newest(folder):
    return torch.load(max((folder / "lightning_logs/it/checkpoints").glob("*.ckpt")), weights_only=True)


def seen(folder):
    """The samples of each step, by what the module saw; no two ranks have the same."""
    steps = defaultdict(set)
    for file in folder.glob("seen-*.txt"):
        for line in file.read_text().splitlines():
            step, *samples = line.split()
            assert not steps[int(step)] & {*samples}
            steps[int(step)] |= {*samples}
    return steps


def assert_same_up_to_rounding(folder, whole, *tags):
    weights, expected = newest(folder)["state_dict"], newest(whole)["state_dict"]
    assert all(torch.allclose(weights[name], expected[name], rtol=0, atol=1e-12) for name in expected)
    logged, reference = curves(folder), curves(whole)
    assert logged.keys() == reference.keys()
    for tag in tags:
        assert [step for step, _ in logged[tag]] == [step for step, _ in reference[tag]], tag
        assert [value for _, value in logged[tag]] == pytest.approx([value for _, value in reference[tag]], rel=1e-5), tag


LOGGED = ("loss_step", "loss_epoch", "step_sum", "step_max", "step_min", "step_end", "number")


def test_the_number_of_ranks_does_not_matter(folders):
    runs, words = {}, [argument.replace("Regression", "Logs") for argument in MODULES["automatic"]]
    for ranks in (1, 3):
        runs[ranks] = folders(ranks)
        done = forked(runs[ranks], *words, ranks=ranks)
        assert done.code == 0, done.output
    samples = seen(runs[1])
    assert [len(samples[step]) for step in sorted(samples)] == [24, 26] * 3
    assert seen(runs[3]) == samples
    assert [value for _, value in curves(runs[1])["number"]] == [0.5, 2.5, 4.5]
    tags = (*LOGGED, "error", "samples", "sum", "largest")
    assert_same_up_to_rounding(runs[3], runs[1], *tags, "val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1")


def test_loaders_that_a_validation_reads_at_once_meet_alike_on_any_number_of_ranks(folders):
    """In all modes, where the micro-batches do not divide among the ranks; and with `exact`."""
    words = ["fit", "--model=tests.own.Paired", "--data=tests.own.PairedData", "--trainer.max_epochs=3", *OFTEN]
    words += ["--trainer.global_batch_size=12", "--trainer.reload_dataloaders_every_n_epochs=1"]
    words += ["--trainer.num_sanity_val_steps=0"]
    values = []
    for ranks, exact in ((1, "false"), (2, "false"), (3, "true")):
        done = forked(folder := folders(ranks), *words, f"--trainer.exact={exact}", ranks=ranks)
        assert done.code == 0, done.output
        values.append([value for _, value in curves(folder)["val_loss"]])
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert values[0] == pytest.approx(values[2], rel=1e-5)
    assert len({*values[0]}) == 3


def test_ranks_that_gather_micro_batches_of_different_sizes_end_with_a_message(folders):
    """Gloo aborts the process."""
    words = [argument for argument in MODULES["automatic"] if "--model=" not in argument]
    run = forked(folders("it"), *words, "--model=tests.own.Contrasts", ranks=3)
    assert run.code == 1, run.output
    assert "self.all_gather in step 2: the ranks have micro-batches of 2 and 3 samples" in run.output
    assert "Traceback" not in run.output


def test_an_interval_beyond_the_epoch_is_told_in_steps(folders):
    run = forked(folders("it"), *MODULES["gpt"], "--trainer.val_check_interval=7")
    assert run.code == 2
    assert "trainer.val_check_interval=7 is more than the 6 steps of an epoch" in run.output


KILLED = [
    # Of one rank, other modules than these are killed in test_resume.py and test_recovery.py; a GPT in test_recovery.py.
    pytest.param(module, step, ranks, marks=() if ranks == 3 and module != "gpt" else pytest.mark.faults)
    for module, step in (("automatic", 3), ("manual", 8), ("gpt", 9))
    for ranks in (1, 2, 3)
]


@pytest.mark.parametrize(("module", "step", "ranks"), KILLED)
def test_a_run_that_was_killed_goes_on(folders, module, step, ranks):
    words = [*MODULES[module]]
    if module == "manual":
        # A module that steps by itself does not accumulate.
        words += [f"--data.init_args.batch_size={24 // ranks}", "--data.init_args.size=60"]
    whole, killed = folders("whole"), folders("killed")
    done = forked(whole, *words, faults(), ranks=ranks)
    assert done.code == 0, done.output
    words.append(f"--checkpoints.every_n_steps={step}")  # where there are two optimisers, the steps of both count
    fault = faults({"rank": ranks - 1, "where": "saved", "step": step, "number": int(signal.SIGKILL)})
    assert forked(killed, *words, fault, ranks=ranks).code != 0
    resumed = forked(killed, *words, fault, ranks=ranks)
    assert resumed.code == 0, resumed.output
    assert re.search(r"Resumes from .*: epoch \d, step [1-9] of it", resumed.output), resumed.output
    assert curves(killed) == curves(whole)  # first, as it names the step
    checkpoint, expected = newest(killed), newest(whole)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "position"):
        assert same(checkpoint[part], expected[part]), part


@pytest.mark.slow
def test_other_numbers_of_ranks_on_the_way(folders):
    """2 -> 1 -> 3, stopped by a signal within an epoch and within a validation."""
    own = [argument.replace("Regression", "Logs") for argument in MODULES["automatic"]]
    words = (*own, "--data.init_args.size=140", "--trainer.val_check_interval=2", "--trainer.devices=1")
    stops = faults(
        {"step": 3, "where": "accumulation", "number": int(signal.SIGTERM)},
        {"step": 10, "where": "validation", "number": int(signal.SIGUSR1)},
    )
    whole, folder = folders("whole"), folders("stopped")
    assert forked(whole, *words, faults()).code == 0
    for ranks, code in ((2, 128 + signal.SIGTERM), (1, 128 + signal.SIGUSR1), (3, 0)):
        done = forked(folder, *words, stops, ranks=ranks)
        assert done.code == code, done.output
    assert_same_up_to_rounding(folder, whole, *LOGGED)


def test_a_gpt_whose_loss_is_not_finite_stops_before_that_step(folders):
    folder = folders("it")
    done = forked(folder, *MODULES["gpt"], "--model.init_args.lr=1e30", "--model.init_args.warmup_steps=0", ranks=2)
    assert done.code == 1, done.output
    assert "The loss of step 2 (epoch 1) is not finite: nan in all its " in done.output
    assert newest(folder)["global_step"] == 1


@pytest.mark.faults
def test_a_gpt_that_hangs_is_ended(folders):
    stuck = json.dumps([{"class_path": "tests.probes.Stuck", "init_args": {"rank": 1, "step": 6}}])
    done = forked(folders("it"), *MODULES["gpt"], f"--trainer.callbacks={stuck}", "--watchdog.at_least=5", ranks=2)
    assert done.code == TRY_AGAIN, done.output
    assert "The run hangs: rank 1 on " in done.output


def test_the_doctor_examines_what_has_no_images(folders):
    done = forked(folders("it"), "doctor", *(argument for argument in MODULES["gpt"][1:] if "run" not in argument))
    assert done.code == 0, done.output
    report = json.loads(next(done.folder.glob("lightning_logs/*.json")).read_text())
    assert {finding["verdict"] for finding in report["findings"]} <= {"good", "warning", "skipped"}, report


@pytest.mark.parametrize("sized", [pytest.param(True, marks=pytest.mark.faults), False])
def test_ranks_whose_evaluations_are_of_different_lengths_do_not_wait_for_each_other(folders, sized):
    words = ("fit", "--data=tests.own.UnevenData", f"--data.sized={sized}", "--model=tests.own.Regression", *OFTEN)
    run = forked(folders("it"), *words, "--trainer.max_epochs=2", "--watchdog.at_least=30", ranks=3)
    assert run.code == 0, run.output
    assert len(curves(run.folder)["val_loss"]) == 2


@pytest.mark.slow
def test_a_rank_that_leaves_a_micro_batch_out_is_refused(folders):
    """The others would wait for it, or the weights would become different ones."""
    words = ("--trainer.max_steps=5", "--trainer.global_batch_size=12", "--model=tests.own.Choosy")
    run = forked(folders("it"), *RUN, *words, "--watchdog.at_least=30", ranks=3)
    assert run.code == 1, run.output
    assert "training_step returned None on rank 1 in step 3, and the other ranks would wait" in run.output
    assert "Traceback" not in run.output


def test_an_evaluation_with_fewer_samples_than_ranks_ends_all_with_one_message(folders):
    words = ("fit", "--data=tests.own.PointsData", "--data.init_args.size=16", "--model=tests.own.Regression")
    run = forked(folders("it"), *words, "--trainer.max_steps=1", ranks=8)
    assert run.code == 2, run.output
    assert "An evaluation of 7 sample(s) has none for some of the 8 ranks." in run.output
    assert "Traceback" not in run.output
    assert "The run hangs" not in run.output
