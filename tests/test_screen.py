"""The screen of a user: figures once, no advice about what is over, no folder of what is no run, one rank's lines."""

import inspect
import os
import subprocess
import sys

import lightning.pytorch as pl
import pytest

from project import Trainer
from project.cli import runs
from tests.conftest import Cli, environment

FIT = ("--model=tests.watch.test_progress.Named", "--trainer.accelerator=cpu", "--trainer.max_epochs=1")
PROGRAM = """
import logging
logging.basicConfig(level=logging.INFO)
from project import Trainer
from tests.watch.test_progress import Named

if __name__ == "__main__":
    trainer = Trainer(max_steps=2, accelerator="cpu", devices=2, logger=False, default_root_dir="it", capture="auto")
    logging.getLogger("project.some").warning("warned %d", 7)
    trainer.fit(Named())
"""


def test_a_finished_run_is_quiet_and_its_figures_are_printed_once(quick: Cli) -> None:
    assert quick("fit", *FIT, "--run=it", "--trainer.threads=2").code == 0
    repeated = quick("fit", *FIT, "--run=it", "--trainer.threads=1", "--change=trainer.threads")
    assert repeated.code == 0
    assert "nothing was left to do" in repeated.output
    assert "WARNING" not in repeated.output.replace("WARNING The configuration of the run has changed", ""), repeated.output
    longer = quick("fit", *FIT[:-1], "--trainer.max_epochs=2", "--run=it", "--trainer.threads=1", "--change=trainer.threads")
    assert "with 1 thread(s) for each rank's operations in place of 2" in longer.output, longer.output
    checked = quick("validate", *FIT[:-1], "--run=it")
    assert checked.output.count("recall") - checked.output.count("by recall") == 1, checked.output


def test_a_warning_about_all_ranks_is_printed_once(quick: Cli) -> None:
    words = ("fit", *FIT[:-1], "--run=it", "--change=trainer.threads")
    assert quick(*words, FIT[-1], "--trainer.threads=2", ranks=2).code == 0
    longer = quick(*words, "--trainer.max_epochs=2", "--trainer.threads=1", ranks=2)
    assert longer.code == 0, longer.output
    assert longer.output.count("with 1 thread(s) for each rank's operations in place of 2") == 1, longer.output


def test_the_doctor_leaves_no_run(quick: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    examined = quick("doctor", *FIT, "--fast=true")
    assert examined.code == 0, examined.output
    assert [path.suffix for path in (examined.folder / "lightning_logs").iterdir()] == [".json"]
    monkeypatch.chdir(examined.folder)
    assert runs.main([]) == 1, "no run is listed"


@pytest.mark.slow
def test_of_a_users_program_rank_0_alone_reports(tmp_path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("trainer.capture=auto does nothing") == 1, done.stderr
    assert done.stderr.count(f"WARNING:project.some:[rank 1, {os.uname().nodename}] warned 7") == 1, done.stderr
    assert done.stderr.count("WARNING:project.some:warned 7") == 1, done.stderr


def test_help_names_our_own_arguments() -> None:
    own = inspect.signature(Trainer).parameters.keys() - inspect.signature(pl.Trainer).parameters.keys() - {"kwargs"}
    assert own >= {"exact", "global_batch_size", "threads"}
    assert {name for name in own if f"    {name}: " not in str(Trainer.__doc__)} == set()
    assert "Customize every aspect" not in str(inspect.getdoc(Trainer.__init__)), "Lightning's text"


def test_what_one_rank_refuses_ends_the_program_as_where_all_do(quick: Cli) -> None:
    done = quick("fit", "--model=tests.survive.broken.Refused", *FIT[1:], "--trainer.devices=2", "--run=it")
    assert done.code == 2, done.output
    assert "ERROR   [rank 1, " in done.output
    assert " Run: " not in done.output
    assert not (done.folder / "lightning_logs").exists(), "a run that was refused leaves no folder"
