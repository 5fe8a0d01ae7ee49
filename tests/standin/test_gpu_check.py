"""The commands of scripts/gpu_check, small, on the stand-in for a GPU: all that is cheap, and no speed."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import PATIENCE, ROOT, Cli
from tests.conftest import environment as clean
from tests.standin.pool import environment, meeting_place

pytestmark = pytest.mark.slow

MEASURE = str(ROOT / "scripts/measure")
ON_ONE = """
import sys
import gpu_checks
gpu_checks.SIZE["cuda"] = gpu_checks.SMALL
print(gpu_checks.CHECKS[sys.argv[1]]("cuda"))
"""


def main() -> None:
    """Runs the project where the callbacks of gpu_probes can be imported."""
    from project.cli.main import main as cli

    sys.path.insert(0, MEASURE)
    cli()


@pytest.fixture
def checks(gpu: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """gpu_checks, small, whose programs are forked from the pool on two GPUs."""
    monkeypatch.syspath_prepend(MEASURE)
    monkeypatch.chdir(tmp_path)
    loaded = importlib.import_module("gpu_checks")
    program = loaded.start

    def start(*command: str) -> Any:
        words = command[3:]  # after `python -m project`
        if words[0] == "same":  # which starts without torch, in a moment
            return program(*command)
        run = gpu(*words, ranks=2 if "--trainer.devices=2" in words else 1, gpus=2, program=f"{__name__}:main")
        print(run.output)
        return loaded.Done(run.code, run.output, 0.0)

    monkeypatch.setattr(loaded, "start", start)
    monkeypatch.setattr(loaded, "backend_of_two", lambda _: ("nccl", 2))
    monkeypatch.setitem(loaded.SIZE, "cuda", loaded.SMALL)
    return loaded


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("two ranks", "2 ranks on two GPUs by nccl: no wait in 30 steps on cuda:0"),
        # These ran on a real GPU, or are what test_runs and test_failures do.
        pytest.param("killed and resumed", "", marks=pytest.mark.faults),
        pytest.param("exact on 1 and on 2", "", marks=pytest.mark.faults),
        pytest.param("a rank is killed", "rank 1 named", marks=pytest.mark.faults),
        pytest.param("a device hangs", "rank 1 named, exit code 75", marks=pytest.mark.faults),
        pytest.param("a device hangs, accumulating", "rank 1 named, exit code 75", marks=pytest.mark.faults),
        pytest.param("NCCL gives up", "rank 1 named, exit code 75", marks=pytest.mark.faults),
    ],
)
def test_a_check_is_green_on_two_gpus(checks: ModuleType, name: str, figure: str) -> None:
    result = checks.CHECKS[name]("cuda")
    assert result.state == "ok", result
    assert figure in result.figure


@pytest.fixture
def variables() -> Iterator[dict[str, str]]:
    with meeting_place() as place:
        yield {**clean(), "PROJECT_PYTHON": sys.executable, **environment(2, place)}


def test_the_command_measures_what_a_stand_in_says_of_itself(tmp_path: Path, variables: dict[str, str]) -> None:
    command = [str(ROOT / "scripts/gpu_check"), "--only=environment"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert (written["gpus"], written["exit_code"], written["checks"][0]["state"]) == (2, 0, "ok")


@pytest.mark.faults
@pytest.mark.parametrize(("name", "backend"), [("two ranks", "nccl"), ("a rank is killed", "gloo")])
def test_two_ranks_share_the_only_gpu(tmp_path: Path, variables: dict[str, str], name: str, backend: str) -> None:
    path = f"{variables['PYTHONPATH']}:{MEASURE}"
    chosen = {"GPU_CHECK_BACKEND": "gloo"} if backend == "gloo" else {}
    done = subprocess.run(
        [sys.executable, "-c", ON_ONE, name],
        cwd=tmp_path,
        env={**variables, "STANDIN_GPUS": "1", "PYTHONPATH": path, **chosen},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert "state='ok'" in done.stdout.splitlines()[-1], done.stdout + done.stderr
    if name == "two ranks":
        assert f"2 ranks on one GPU by {backend}" in done.stdout
