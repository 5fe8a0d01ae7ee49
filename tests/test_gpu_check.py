"""scripts/gpu_check without a GPU: it measures nothing, and says so; what its exit code means, and what fits into a call."""

import importlib
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from tests.conftest import PATIENCE, ROOT, environment


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/measure/gpu.py, which is a program and no package."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts/measure"))
    return importlib.import_module("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_counts_as_measured(tmp_path):
    done = subprocess.run(
        [str(ROOT / "scripts/gpu_check")],
        cwd=tmp_path,
        env=environment(PROJECT_PYTHON=sys.executable, COLUMNS="150"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 3, done.stdout
    assert "No GPU here: nothing was measured" in done.stdout
    assert "\n".join(line.rstrip() for line in done.stdout.splitlines()) in (ROOT / "BENCHMARKS.md").read_text()
    assert list(tmp_path.iterdir()) == []  # and no gpu.json


@pytest.mark.parametrize(
    ("states", "code"),
    [("ok", 0), ("ok, not run", 4), ("ok, slow", 5), ("slow, not run", 6), ("bad, slow, not run", 1)],
)
def test_a_missed_speed_goal_is_not_taken_for_something_broken(gpu, states, code):
    assert gpu.exit_code(set(states.split(", ")), "cuda") == code
    assert gpu.exit_code({"ok", "not run"}, "cpu") == 3


def test_every_check_of_a_call_fits_into_its_budget(gpu):
    assert sum(check.seconds for check in gpu.chosen("")) <= gpu.BUDGET < 600
    assert {check.name for check in gpu.CHECKS} == importlib.import_module("gpu_checks").CHECKS.keys()
    assert [check.name for check in gpu.chosen("max-autotune")] == ["max-autotune at 1,024"]
