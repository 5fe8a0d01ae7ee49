"""Resumes bitwise what an earlier version wrote (old/, of commit 8939ed4): on 2 ranks, in the middle of an epoch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import environment

HERE = Path(__file__).parent
WEIGHTS = "c8f1bd9acd2e2427d93513078ca8dfc2c5c0d054d5355f04fd20446bdd2b8f6a"
"""Of the run that was not stopped, by that version; the program's arithmetic is exact, so of any processor."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("written", "ranks", "strategy"),
    [
        ("ddp", 2, "sharded"),
        ("sharded", 2, "ddp"),
    ],
)
def test_a_checkpoint_of_an_earlier_version_is_resumed_bitwise(written, ranks, strategy, tmp_path):
    shutil.copytree(HERE / "old" / written, tmp_path / "checkpoints")
    done = subprocess.run(
        [sys.executable, HERE / "dyadic.py", str(ranks), strategy, tmp_path],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (end,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert end["weights"] == WEIGHTS
    assert end["count"] == 10
