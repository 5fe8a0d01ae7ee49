"""Forks the ranks of a trial from this process, which has loaded all libraries and started no thread."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from project.early_start import free_port
from project.proof import recorder
from project.survive.orphans import end_with_parent

PROGRAM = "project.cli:main"
_LAUNCHER = ("SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "NODE_RANK", "GROUP_", "PL_")
_PATIENCE = 600.0  # seconds that a start may take
_PAUSE = 0.1
_GRACE = 30.0  # seconds that the other ranks have when one has failed
_FORK = multiprocessing.get_context("fork")


def _rank(words: Sequence[str], order: recorder.Order, environment: dict[str, str]) -> None:
    end_with_parent()
    with (order.folder / "output.txt").open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    for name in [name for name in os.environ if name.startswith(_LAUNCHER)]:
        del os.environ[name]
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    recorder.TRIAL = order
    sys.argv = ["project", *words]
    resolve_name(PROGRAM)()


def launch(words: Sequence[str], order: recorder.Order, ranks: int = 1) -> int:
    """Runs `python -m project WORDS` on so many ranks, and returns the exit code: 0, or that of a rank that failed."""
    shared = {"WORLD_SIZE": str(ranks), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environments = [{**shared, "LOCAL_RANK": str(rank)} for rank in range(ranks)] if ranks > 1 else [{}]
    words = (*words, f"--trainer.devices={ranks}")
    processes = [_FORK.Process(target=_rank, args=(words, order, one)) for one in environments]
    for process in processes:
        process.start()
    until = time.monotonic() + _PATIENCE
    while any(process.exitcode is None for process in processes):
        # Not for long: what a rank has left behind (its warden) may hold the sentinel open.
        multiprocessing.connection.wait([one.sentinel for one in processes if one.exitcode is None], _PAUSE)
        if any(process.exitcode for process in processes):
            until = min(until, time.monotonic() + _GRACE)
        if time.monotonic() >= until:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    return next((code for process in processes if (code := process.exitcode)), 0)


def output(folder: Path) -> str:
    """Returns what the ranks of a trial printed."""
    path = folder / "output.txt"
    return path.read_text(errors="replace") if path.is_file() else ""
