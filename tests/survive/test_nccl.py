"""What NCCL does to ranks, without a GPU: connections that can't be closed, and a thread that aborts the process."""

import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from project.cluster import connection
from project.survive import failure
from tests.conftest import environment, since_struck, took
from tests.survive.test_failure import SOON, STUCK, deaf

HOST = socket.gethostname()
RANK = "import ctypes, os, signal, sys, threading\nfrom project.survive.exit import forbid_core_dumps\nforbid_core_dumps()\n"


class Group:
    """A group whose abort is noted."""

    def __init__(self) -> None:
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """This process is connected by NCCL, and `destroy_process_group` would wait for ever."""
    connected, never = Group(), threading.Event()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=connected))
    monkeypatch.setattr(dist, "destroy_process_group", never.wait)
    monkeypatch.setattr(connection, "_closing", [])
    monkeypatch.setattr(connection, "FAILED", failed := threading.Event())
    monkeypatch.setattr(failure, "FAILED", failed)
    monkeypatch.setattr(failure, "_FIRST", 0.1)
    monkeypatch.setattr(failure, "_SECOND", 0.1)
    return connected


def test_where_the_run_has_failed_connections_are_aborted_once_and_not_destroyed(group: Group) -> None:
    assert failure.report_error(KeyError("this device is broken"), 1) == 1
    assert group.aborted == 1
    assert not connection.close_connections(0.1)  # the process is to end at once
    assert group.aborted == 1


def test_where_it_has_not_they_are_destroyed(group: Group) -> None:
    assert not connection.close_connections(0.1)
    assert group.aborted == 0


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core dump is not left in the checkout."""
    monkeypatch.chdir(tmp_path)


def ended(program: str, **extra: str) -> int:
    def with_core_dumps() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)

    done = subprocess.run(
        [sys.executable, "-c", RANK + program], env=environment(**extra), preexec_fn=with_core_dumps, timeout=STUCK
    )
    return done.returncode


ABORTS = "threading.Timer(0.5, ctypes.CDLL(None).abort).start(); os.read(os.pipe()[0], 1)"


# With Python's lock held no Python code can run any more, so that a handler of C's aborts.
LOCKED = (
    "ctypes.CDLL(None).alarm(1); ctypes.CDLL(None).signal(14, ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p)); "
    "ctypes.PyDLL(None).pause()"
)
FORKS = "child = os.fork()\nif child: sys.exit(os.WTERMSIG(os.waitpid(child, 0)[1]))\nos.abort()"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (ABORTS, -signal.SIGABRT),
        (LOCKED, -signal.SIGABRT),
        (FORKS, signal.SIGABRT),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    ],
)
def test_a_process_that_crashes_leaves_no_core_dump(tmp_path: Path, program: str, code: int) -> None:
    assert ended(program) == code
    assert not list(tmp_path.iterdir())


def test_who_debugs_keeps_core_dumps(tmp_path: Path) -> None:
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith(("|", "/")):
        pytest.skip("core dumps of this machine do not lie in the working directory")
    assert ended("os.abort()", PYTHONFAULTHANDLER="1") == -signal.SIGABRT
    assert list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "on"),
    [
        pytest.param("python", 0, marks=pytest.mark.faults),
        pytest.param("python", 1, marks=pytest.mark.slow),
        pytest.param("torchrun", 1, marks=pytest.mark.faults),
    ],
)
def test_a_rank_that_aborts_is_named_and_the_others_end_with_75(cli: Any, launcher: str, on: int) -> None:
    launched = {"torchrun": 3} if launcher == "torchrun" else {}
    run = cli(*deaf(rank=on, how="abort"), *([] if launched else ["--trainer.devices=3"]), timeout=STUCK, **launched)
    seconds = since_struck(run.folder)
    took(f"rank {on} of 3 aborts, and the others wait for a device, {launcher}: all have ended after", seconds)
    aborted = f"rank {on} on {HOST} was ended by SIGABRT: NCCL or another library gave up."
    assert aborted in run.output
    assert run.code == (1 if launched else 75 if on else -signal.SIGABRT)  # torchrun's own
    if on == 1:
        assert run.output.count(f"[rank 0, {HOST}] lost another rank: {aborted}") == 1
    if launched:
        assert "exitcode  : 75" in run.output
    assert seconds < SOON
