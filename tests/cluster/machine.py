"""What the tests of real hosts and of a real Slurm need of the machine; where it is missing, they are skipped, and say why.

With CLUSTER_TESTS=required in the environment, as in .ci/run, what is missing is a failure.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

LONG = 400
"""Seconds after which a host counts as stuck; six processes that start on a busy machine take a hundred."""


def missing(reason: str, tests: str = "CLUSTER_TESTS") -> None:
    if os.environ.get(tests) == "required":
        pytest.fail(f"{tests}=required, and {reason}", pytrace=False)
    pytest.skip(reason)


def need(packages: str, *programs: str) -> None:
    """Skips where this is no root, or one of the programs is not there."""
    if os.geteuid() != 0:
        missing("this test needs root")
    if "/usr/sbin" not in os.environ["PATH"].split(":"):
        os.environ["PATH"] += ":/usr/sbin:/sbin"
    lacking = [program for program in programs if shutil.which(program) is None]
    if lacking:
        missing(f"{', '.join(lacking)} not found (apt-get install {packages})")


def end(pids: Callable[[], Iterable[int]], seconds: float = 10) -> None:
    """Kills processes by id, and those that they start meanwhile, until there are none."""
    deadline = time.monotonic() + seconds
    while living := list(pids()):
        assert time.monotonic() < deadline, f"can't end {living}"
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """A process's children, and theirs."""
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += [int(child) for child in task.read_text().split()]
    return [process for child in children for process in (child, *descendants(child))]


def wait_until(true: Callable[[], object], seconds: float, what: str | Callable[[], str], every: float = 0.05) -> None:
    """Waits for something to become true; `what` says what did not, if it does not. It is asked `every` so many seconds."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what() if callable(what) else what}")
        time.sleep(every)


def command(*words: str, **kwargs: object) -> str:
    """What a program prints; its error, if it fails, is the test's."""
    done = subprocess.run(words, capture_output=True, text=True, **kwargs)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}{done.stdout}"
    return str(done.stdout)
