"""python -m project prove: the promise holds for a module that keeps it, and the culprit is named for one that does not."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from project.proof.plan import alone, shortened
from tests.cluster.machine import wait_until
from tests.conftest import Cli, Run, fork


@pytest.fixture
def prove(quick: Cli, tmp_path: Path) -> Any:
    """prove("Counts", "--only=step") proves a module of tests.promises."""
    (tmp_path / "temporary").mkdir()

    def run(module: str, *words: str, **data: Any) -> Run:
        environment = {"TMPDIR": str(tmp_path / "temporary"), "PYTHONHASHSEED": "random"}
        return quick(*_words(tmp_path, module, data), *words, program="project.__main__:main", **environment)

    return run


def _words(folder: Path, module: str, data: dict[str, Any]) -> list[str]:
    config = {
        "model": {"class_path": f"tests.promises.{module}"},
        "data": {"class_path": "tests.promises.Points", "init_args": data},
        "trainer": {"max_epochs": 5},
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(config))
    return ["prove", "--config", "mine.yaml"]


@pytest.mark.slow
def test_the_promise_holds(prove, tmp_path):
    run = prove("Kept", "--json=proof.json", "--trainer.exact=true", "--trainer.global_batch_size=24")
    assert run.code == 0, run.output
    report = json.loads((tmp_path / "proof.json").read_text())
    assert report["holds"]
    assert [row["result"] for row in report["trials"]] == ["the same"] * 10
    counts = report["trials"][0]["compared"]
    # Of the last step of each epoch there is a half.
    assert (counts["steps"], counts["samples"], counts["checkpoints"], counts["weights"]) == (8, 2 * (72 + 13), 8, 4)
    assert counts["logged values"] > 20
    assert counts["validation samples"] == 4 * 20
    assert not any((tmp_path / "temporary").iterdir())  # and no run was touched
    assert not (tmp_path / "lightning_logs").exists()


def test_a_module_that_fails_is_shown_with_its_error(prove):
    run = prove("Fails", "--only=again")
    assert run.code == 2, run.output
    assert 'raise KeyError("labels")' in run.output
    assert "The same command goes on" not in run.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "trial", "data", "line"),
    [
        ("Counts", "step", {}, "Counts.counter: 18, and 0"),
        pytest.param("Draws", "epoch", {}, "Draws.noise: torch.Generator", marks=pytest.mark.slow),
        ("Kept", "step", {"draws": True}, "HINT: Noise.generator is a generator of its own"),
        pytest.param("Kept", "twice", {"hashes": True}, "look at the dataset, collate_fn", marks=pytest.mark.slow),
        ("Counts", "ranks-2", {}, "HINT: what counts a rank's own micro-batches"),
        ("Counts", "rank", {}, "All modules gave the same in micro-batch 0: it is what"),
        ("Moves", "ranks-2", {}, "in the buffers: mean, its "),
    ],
)
def test_the_culprit_is_named(prove, module, trial, data, line):
    run = prove(module, f"--only={trial}", **data)
    assert run.code == 1, run.output
    assert line in run.output, run.output
    assert "The promise does NOT hold" in run.output


def test_threads_that_a_yaml_names_are_kept():
    assert "--trainer.threads=1" in alone([], {})
    assert not [argument for argument in alone([], {"trainer.threads": 2}) if "threads" in argument]


def test_trials_on_more_gpus_than_there_are_are_left_out():
    facts = {"micro_batch": 8, "samples": 512, "ends": True, "automatic": True, "validates": True, "gpus": 2}
    plan = shortened([], facts, {"trainer": {"precision": "32-true"}, "data": {"batch_size": 8, "num_workers": 0}})
    skipped = {trial.name: trial.skipped for trial in plan.trials if trial.skipped}
    assert skipped == {"ranks-3": "needs 3 GPUs", "resized": "needs 3 GPUs"}


def test_a_global_batch_of_manual_optimisation_is_made_smaller_too():
    """That of docs/howto/gan.md: 64, on one rank and on more."""
    facts = {"micro_batch": 64, "samples": 6400, "ends": True, "automatic": False, "validates": True, "gpus": None}
    data = {"class_path": "gan.Circle", "init_args": {"batch_size": 64}}
    plan = shortened([], facts, {"trainer": {"global_batch_size": 64}, "data": data})
    assert {"--data.init_args.batch_size=60", "--trainer.global_batch_size=60"} <= {*plan.words}
    assert "--data.init_args.batch_size=20" in plan.on[3]


def test_a_wrong_configuration(prove, quick, tmp_path):
    run = prove("Kept", "--trainer.exact=true")
    assert run.code == 2, run.output
    assert "needs trainer.global_batch_size" in run.output, run.output
    assert not any((tmp_path / "temporary").iterdir())
    assert quick("prove", program="project.__main__:main").code == 2


def test_ctrl_c_leaves_nothing(tmp_path):
    (tmp_path / "temporary").mkdir()
    words, output = _words(tmp_path, "Kept", {}), tmp_path / "output.txt"
    process = fork("project.__main__:main", tmp_path, *words, output=output, TMPDIR=str(tmp_path / "temporary"))
    wait_until(lambda: any((tmp_path / "temporary").glob("*/first/record-0.jsonl")), 60, "the first trial has not begun")
    (trials,) = (tmp_path / "temporary").iterdir()
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130, output.read_text()
    assert not trials.exists()
