"""Runs of the project on the stand-in for a GPU, without the seconds that importing PyTorch takes.

A process under the stand-in has imported all that a run needs, and forks the ranks of each run; it touches no GPU itself.
With TESTS_ON_GPU=1 the same tests run on the GPUs of this machine, without the stand-in; what needs more of them is skipped.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.machine import descendants, end, missing
from tests.standin.build import Unavailable, variables

REAL = os.environ.get("TESTS_ON_GPU") == "1"


def environment(gpus: int, folder: str) -> dict[str, str]:
    """What a program needs to train on the stand-in; its ranks meet in the folder. Skips where the stand-in can't be built."""
    if REAL:
        require(gpus)
        return {}
    try:
        return {**variables(gpus), "STANDIN_NCCL": folder}
    except Unavailable as reason:
        missing(str(reason), "STANDIN_TESTS")
        raise


def require(gpus: int, *settings: str) -> None:
    """Skips a test that this machine has too few GPUs for, or that changes what only the stand-in lets it change."""
    import torch

    if gpus > torch.cuda.device_count():
        pytest.skip(f"needs {gpus} GPUs, and {torch.cuda.device_count()} are here")
    if changed := [name for name in settings if name.startswith("STANDIN_")]:
        pytest.skip(f"sets {changed[0]}, which only the stand-in has")


@contextlib.contextmanager
def meeting_place() -> Iterator[str]:
    """A folder in memory for the files of NCCL, which goes with whatever a killed run left there."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="standin-", dir=memory)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Pool:
    """The process that forks ranks."""

    def __init__(self, clean: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.standin.pool"],
            env={**clean, **environment(1, "")},
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, *words: str, ranks: int = 1, gpus: int | None = None, **job: Any) -> tuple[int, str]:
        """Exit code and output of `python -m project WORDS` in a folder; `job` has what else tests.conftest.forked takes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if REAL:
            require(ranks if gpus is None else max(ranks, gpus), *job)
        with meeting_place() as place:
            own = {"STANDIN_GPUS": str(ranks if gpus is None else gpus), "STANDIN_NCCL": place, "OMP_NUM_THREADS": "1"}
            print(json.dumps([str(folder), words, {"ranks": ranks, **own, **job}]), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        assert line, "the pool has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["code"], answer["output"]

    def close(self) -> None:
        end(lambda: [*descendants(self._process.pid), *([] if self._process.poll() is not None else [self._process.pid])])


def _serve() -> None:
    """Answers each line of the input with one of the output."""
    import torch.utils._sympy.solve  # noqa: F401 - of FSDP's first step

    import tests.preloaded  # noqa: F401
    from tests.conftest import forked

    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")  # which ranks, and what they start, do not have
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    context = multiprocessing.get_context("fork")
    for line in requests:
        folder, words, job = json.loads(line)
        try:
            run = forked(Path(folder), *words, context=context, **job)
            answer = {"code": run.code, "output": run.output}
        except AssertionError as error:
            answer = {"error": str(error)}
            end(lambda: descendants(os.getpid()))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
