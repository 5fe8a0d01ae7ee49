"""The scripts: launch.sh checks what it is given; a wheel brings the configs along."""

import os
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT, environment


def launch(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "launch.sh"), *words],
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("extra", "cause"),
    [
        ({"NNODES": "two"}, "NNODES must be a number"),
        ({"NNODES": "2"}, "NODE_RANK is not set"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not set"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "the last of NNODES=2 nodes is 1"),
        ({"MASTER_PORT": "70000"}, "is no port"),
        ({}, "what to run?"),
    ],
)
def test_launch_checks_its_environment(extra, cause):
    done = launch(*(["fit"] if extra else []), **extra)
    assert done.returncode == 2
    assert cause in done.stderr


@pytest.mark.skipif(not os.access(ROOT / ".venv/installed-test", os.R_OK), reason="not run from scripts/test")
def test_launch_runs_torchrun_and_shows_what_it_took(tmp_path):
    done = subprocess.run(
        [str(ROOT / "scripts" / "launch.sh"), "fit", "--config", "configs/ddp.yaml", "--trainer.max_epochs", "x"],
        env=environment(NPROC_PER_NODE="2"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "processes a node   2" in done.stdout
    assert "OMP_NUM_THREADS" not in done.stderr
    assert done.stderr.count('"trainer.max_epochs"') == 1
    assert done.returncode == 1


def test_a_wheel_has_the_configs(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "project/configs/ddp.yaml" in names
    assert "project/cli.py" in names
    assert not any(name.startswith(("tests", "lightning_logs")) for name in names)

    # Unpacked somewhere else, it finds its configs.
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-m", "project", "fit", "--config", "configs/vit.yaml", "--print_config"],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(tmp_path / "site")),
        capture_output=True,
        text=True,
    )
    assert "VisionTransformer" in done.stdout, done.stderr
