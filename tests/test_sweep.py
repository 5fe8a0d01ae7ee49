"""Trials of a sweep: runs like any other, whatever launches them."""

import re
from pathlib import Path

import pytest

from project.errors import UserError
from project.launch.sweep import read_sweep, with_trial
from tests.conftest import ROOT, TINY

SWEEP = """
samples: 2
keys:
  data.global_batch_size: [16, 32]
  model.optimizer.init_args.lr: {loguniform: [0.01, 0.1]}
  data.flip: {choice: [random, none]}
"""


def sweep(folder: Path, text: str = SWEEP) -> str:
    file = folder / "sweep.yaml"
    file.write_text(text)
    return str(file)


def test_the_trials_are_every_combination_of_the_lists_each_with_draws_of_its_own(tmp_path):
    trials = read_sweep(sweep(tmp_path)).trials
    assert [trial["data.global_batch_size"] for trial in trials] == [16, 32, 16, 32]
    rates = [trial["model.optimizer.init_args.lr"] for trial in trials]
    assert len(set(rates)) == 4
    assert all(0.01 <= rate <= 0.1 for rate in rates)
    assert all(list(trial) == list(trials[0]) for trial in trials)


def test_what_is_drawn_stays_when_keys_and_samples_are_added(tmp_path):
    before = read_sweep(sweep(tmp_path)).trials
    longer = read_sweep(sweep(tmp_path, SWEEP.replace("2\n", "3\n", 1) + "  model.momentum: {uniform: [0, 1]}\n")).trials
    assert [{key: trial[key] for key in before[0]} for trial in longer[:4]] == before
    reseeded = read_sweep(sweep(tmp_path, SWEEP + "seed: 1\n")).trials
    assert reseeded != before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: [", "is not YAML"),
        ("samples: 2", "under 'keys'"),
        (SWEEP + "trials: 3", "a sweep has no trials"),
        ("samples: 0\nkeys: {a: {uniform: [0, 1]}}", "samples is a number from 1 on"),
        ("samples: 2\nkeys: {a: [1, 2]}", "no key is drawn"),
        ("mode: most\nkeys: {a: [1, 2]}", "mode is max or min"),
        ("together: 0\nkeys: {a: [1]}", "together is a number from 1 on"),
        ("stop_early: 3\nkeys: {a: [1]}", "stop_early is true, false"),
        ("stop_early: {factor: 1}\nkeys: {a: [1]}", "stop_early.factor is a number from 2 on"),
        ("keys: {run: [a, b]}", "run can't be tried"),
        ("keys: {a: []}", "a has no values"),
        ("keys: {a: 3}", "a has 3. HINT: a list"),
        ("keys: {a: {normal: [0, 1]}}", "one of uniform, loguniform, randint, choice"),
        ("keys: {a: {uniform: [1, 0]}}", r"uniform takes \[LOW, HIGH\], and not \[1, 0\]"),
        ("keys: {a: {uniform: [0, .inf]}}", "uniform takes"),
        ("keys: {a: {uniform: [0, true]}}", "uniform takes"),
        ("keys: {a: {uniform: [1e-3, 1]}}", "1.0e-3 is a number in YAML, 1e-3 is not"),
        ("keys: {a: {loguniform: [0, 1]}}", "greater than 0"),
        ("keys: {a: {randint: [0, 1.5]}}", "whole numbers"),
        ("keys: {a: {choice: 3}}", "choice takes a list of values, and not 3"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_said(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        read_sweep(sweep(tmp_path, text))


def test_which_trial_is_said_by_a_flag_or_by_the_task_of_a_job_array(tmp_path, monkeypatch):
    file = sweep(tmp_path)
    third = with_trial(["fit", "--config=x.yaml", f"--sweep={file}", "--trial=3", "--run=wide"])
    assert third[:4] == ["fit", "--config=x.yaml", "--run", "wide-3"]
    assert third[4:] == read_sweep(file).words(3)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert with_trial(["fit", "--sweep", file]) == ["fit", *read_sweep(file).words(2)]
    assert with_trial(["fit", "--sweep", file, "--trial", "3"])[1:] == read_sweep(file).words(3)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "5")
    with pytest.raises(UserError, match="the trials 1 to 4, and no 5"):
        with_trial(["fit", "--sweep", file])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "--trial=1"], "no --sweep says of what"),
        (["fit", "--sweep={file}"], "has 4 trials; which one"),
        (["fit", "--sweep={file}", "--trial=first"], "has 4 trials; which one"),
        (["test", "--sweep={file}", "--trial=1"], "--sweep is for fit"),
        (["fit", "--sweep={file}", "--trial=1", "--data.flip", "none"], "data.flip is said twice"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        with_trial([argument.format(file=sweep(tmp_path)) for argument in words])


def test_the_sweep_that_comes_along_is_of_keys_that_there_are(quick, tmp_path):
    words = (*TINY, "--data.batch_size=16", "--trainer.max_steps=2", "--run=it", "--trial=2")
    run = quick("fit", f"--config={ROOT}/configs/ddp.yaml", f"--sweep={ROOT}/configs/sweeps/lr.yaml", *words)
    assert run.code == 0, run.output
    assert [path.name for path in run.runs] == ["it-2"]
    rate = re.search(r"Trial: --run it-2 --data.global_batch_size=128 --model.optimizer.init_args.lr=([\d.]+)", run.output)
    assert rate is not None, run.output
    assert f"lr: {rate[1]}\n" in (run.runs[0] / "config.yaml").read_text()
