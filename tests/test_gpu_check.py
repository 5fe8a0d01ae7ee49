"""scripts/gpu_check without a GPU: it measures nothing, and says so."""

import subprocess
import sys

import pytest
import torch

from tests.conftest import PATIENCE, ROOT, environment


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
    assert list(tmp_path.iterdir()) == []  # and no gpu.json
