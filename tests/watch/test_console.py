"""The log: rank 0 speaks, the others only warn and say who they are; a bar only where there is a terminal."""

import logging
import os
import pty
import subprocess
import sys
import warnings

import pytest

from project.watch.console import log_to, name_speaker, open_log
from tests.conftest import TINY, environment


@pytest.fixture
def clean_logging():
    root = logging.getLogger()
    before = root.handlers[:], root.level, logging.getLogRecordFactory(), logging.raiseExceptions
    shown = warnings.showwarning, warnings.formatwarning, warnings.filters[:]
    yield
    root.handlers[:], level, factory, logging.raiseExceptions = before
    root.setLevel(level)
    logging.setLogRecordFactory(factory)
    logging.captureWarnings(False)
    warnings.showwarning, warnings.formatwarning, warnings.filters[:] = shown


@pytest.mark.parametrize(("rank", "expected"), [(0, ["INFO    one", "WARNING two"]), (3, ["WARNING [rank 3, h1] two"])])
def test_who_speaks(clean_logging, capsys, rank, expected):
    open_log(rank, "h1")
    logging.getLogger("project.x").info("one")
    logging.getLogger("project.x").warning("two")
    logging.getLogger("lightning.pytorch").info("Tip: buy something")
    warnings.warn("old", DeprecationWarning, stacklevel=1)
    lines = capsys.readouterr().err.splitlines()
    assert [line[20:] for line in lines] == expected


def test_rank_0_of_many_signs_its_errors(clean_logging, capsys):
    open_log(0, "h1")
    name_speaker(0, "h1", world_size=2)
    logging.getLogger("project").info("fine")
    logging.getLogger("project").error("not fine")
    assert [line[20:] for line in capsys.readouterr().err.splitlines()] == ["INFO    fine", "ERROR   [rank 0, h1] not fine"]


def test_a_file_has_what_was_said_before_it_was_opened(clean_logging, tmp_path):
    open_log(0, "h1")
    logging.getLogger("project").info("early")
    log_to(tmp_path / "log.txt")
    logging.getLogger("project").info("late")
    assert [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["early", "late"]


def test_a_terminal_gets_a_bar(tmp_path):
    outer, inner = pty.openpty()
    words = ["fit", "--config=configs/ddp.yaml", *TINY, "--trainer.max_epochs=3"]
    run = subprocess.Popen(
        [sys.executable, "-m", "project", *words],
        cwd=tmp_path,
        env=environment(TERM="xterm", COLUMNS="120"),
        stdout=inner,
        stderr=inner,
    )
    os.close(inner)
    screen = b""
    while True:
        try:
            data = os.read(outer, 65536)
        except OSError:  # the program has closed its side
            break
        screen += data
    assert run.wait() == 0, screen.decode()
    assert "epoch 3/3" in screen.decode()
    assert "step 6/6" in screen.decode()
    assert "samples/s" in screen.decode()
