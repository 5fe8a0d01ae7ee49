"""The end of the program: what a user's code leaves to Python's own end is done, though libraries are not taken apart."""

import cProfile
import json
import pstats
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Cli, environment, forked

FIT = ("fit", "--model=tests.watch.test_progress.Named", "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--run=it")
LEFT = """
import atexit, threading
from pathlib import Path
from lightning.pytorch import Callback

class Journal:
    def __init__(self):
        self.itself, self.file = self, Path("of the module").open("w")

JOURNAL = Journal()
JOURNAL.file.write("whole")

class Left(Callback):
    def on_fit_end(self, trainer, pl_module):
        self.trainer, self.file = trainer, Path("of a callback").open("w")
        self.file.write("whole")
        atexit.register(lambda: Path("of an exit handler").write_text("whole"))
        threading.Thread(target=self.follow).start()

    def follow(self):
        threading.main_thread().join()  # which Python's end releases first
        Path("of a thread").write_text("whole")

    def __del__(self):
        Path("of an object").write_text("whole")
"""


def test_nothing_that_a_users_code_leaves_to_the_end_is_lost(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text(LEFT)
    done = cli(*FIT, "--trainer.callbacks+=left.Left")
    assert done.code == 0, done.output
    assert {path.name: path.read_text() for path in tmp_path.glob("of *")} == {
        f"of {name}": "whole" for name in ("the module", "a callback", "an exit handler", "a thread", "an object")
    }


KEEPING = """
import logging, os, tempfile, threading
import project.cli.main
from lightning.pytorch import Callback

class Keeping(Callback, logging.Handler):
    def __init__(self, fails: bool = False):
        logging.Handler.__init__(self)
        self.fails, self.reported = fails, threading.Event()
        project.cli.main.PATIENCE = 0.1
        os.chdir(tempfile.mkdtemp(dir="."))  # where the run's folder is not to be

    def on_train_start(self, trainer, pl_module):
        logging.getLogger("project").addHandler(self)
        threading.Thread(target=self.reported.wait, name="mine").start()
        if self.fails:
            raise RuntimeError("as it was to")

    def emit(self, record):
        if "Python waits for the thread mine" in record.getMessage():
            self.reported.set()
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_that_keeps_a_process_is_named_and_keeps_no_exit_code(tmp_path: Path, fails: bool) -> None:
    (tmp_path / "keeping.py").write_text(KEEPING)
    callback = {"class_path": "keeping.Keeping", "init_args": {"fails": fails}}
    run = forked(tmp_path, *FIT, f"--trainer.callbacks+={json.dumps(callback)}", PYTHONPATH=str(tmp_path))
    assert run.code == int(fails), run.output
    assert (tmp_path / "lightning_logs/it/life.jsonl").exists()


@pytest.mark.slow
def test_a_profiler_around_the_program_writes_its_results(tmp_path: Path) -> None:
    command = [sys.executable, "-m", cProfile.__name__, "-o", "profile", "-m", "project", *FIT, "--print_config"]
    subprocess.run(command, cwd=tmp_path, env=environment(PYTHONHASHSEED="0"), check=True, capture_output=True)
    assert pstats.Stats(str(tmp_path / "profile")).total_tt > 0


PRINTING = """
import os
from project.survive.output import ignore_output_errors
ignore_output_errors()
print("a line of", "two words")
os._exit(0)
"""


def test_unbuffered_output_is_written_at_once_and_a_line_as_a_whole() -> None:
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # where each write is a message
    with reader, writer:
        subprocess.run((sys.executable, "-c", PRINTING), env=environment(), stdout=writer, check=True, timeout=300)
        reader.settimeout(0)
        assert reader.recv(100) == b"a line of two words\n"


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_run_without_standard_streams_ends_as_any_other(tmp_path: Path, restarts: int) -> None:
    """As a daemon starts it: output and errors are closed, and would be the next files to be opened."""
    fault = {"class_path": "tests.probes.Fault", "init_args": {"rank": 1, "step": 3}}
    words = ("--trainer.devices=2", f"--trainer.callbacks={json.dumps([fault])}", f"--recover.restarts={restarts}")
    words = (sys.executable, "-m", "project", *FIT, "--model=tests.own.Regression", "--data=tests.own.PointsData", *words)
    closed = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    done = subprocess.run((*closed, *words), cwd=tmp_path, env=environment(), timeout=300, check=False)
    assert done.returncode == (0 if restarts else 75)
    assert ("report  " if restarts else "lost another rank") in (tmp_path / "lightning_logs/it/log.txt").read_text()


def test_a_name_that_the_terminal_can_not_show_is_shown_in_escapes(tmp_path: Path) -> None:
    (tmp_path / "lightning_logs/caf\xe9/checkpoints").mkdir(parents=True)
    command = (sys.executable, "-m", "project", "runs")
    done = subprocess.run(command, cwd=tmp_path, env=environment(PYTHONIOENCODING="ascii"), capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"caf\\xe9" in done.stdout
