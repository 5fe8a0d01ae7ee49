"""A model that has no room in a host's memory with DDP, and has when it is sharded: two ranks in a real cgroup."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.machine import wait_until
from tests.conftest import PATIENCE, Run, environment

FIT = (
    *("fit", "--data=tests.own.PointsData", "--model=tests.survive.wide.Wide", "--trainer.accelerator=cpu", "--run=it"),
    *("--trainer.devices=2", "--trainer.global_batch_size=4", "--trainer.max_steps=3", "--trainer.limit_val_batches=0"),
    *("--trainer.callbacks=" + json.dumps([{"class_path": "tests.survive.wide.Measured"}]), "--trainer.log_every_n_steps=1"),
)
WEIGHTS = 16 * 2048 * (2048 + 1) * 4
"""Bytes of the network's parameters."""
LIMIT = 3150 << 20
"""Bytes for both ranks."""


class Group:
    """A memory cgroup, which goes after the test, as the link 'cgroup' leads to it."""

    def __init__(self, folder: Path) -> None:
        root = Path("/sys/fs/cgroup/memory")
        self.old = root.is_dir()
        self.place = (root if self.old else root.parent) / f"cramped-test-{folder.name}"
        self.place.mkdir()
        (folder / "cgroup").symlink_to(self.place)

    def limit(self, size: int) -> None:
        (self.place / ("memory.limit_in_bytes" if self.old else "memory.max")).write_text(str(size))

    def run(self, folder: Path, *words: str) -> Run:
        folder.mkdir()
        enter = f'echo $$ > {self.place}/cgroup.procs && exec "$@"'
        done = subprocess.run(
            ["sh", "-c", enter, "sh", sys.executable, "-m", "project", *words],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        left = self.place / "cgroup.procs"  # a warden has the report written
        wait_until(lambda: not left.read_text(), PATIENCE, "its processes have not ended")
        return Run(done.returncode, done.stdout, folder)


def built(folder: Path) -> float:
    """What the network took at most on rank 1 until training began, as a share of its parameters. (Rank 0 has also worked out
    what each rank will hold, and what that imports counts here.)"""
    measured = json.loads((folder / "memory-1.json").read_text())
    return float(measured["built"] / WEIGHTS)


@pytest.mark.faults
@pytest.mark.usefixtures("cgroup")
def test_what_has_no_room_with_ddp_is_trained_sharded(tmp_path):
    group = Group(tmp_path)
    group.limit(LIMIT)
    crowded = group.run(tmp_path / "ddp", *FIT, "--trainer.strategy=ddp")
    assert crowded.code, crowded.output
    assert "was killed by signal 9, and its cgroup reports an OOM kill" in crowded.output, crowded.output
    assert not list(crowded.folder.glob("lightning_logs/it/checkpoints/*.ckpt"))

    sharded = group.run(tmp_path / "sharded", *FIT, "--trainer.strategy=sharded")
    assert sharded.code == 0, sharded.output
    assert " 3 steps, " in sharded.output
    (saved,) = sharded.folder.glob("lightning_logs/it/checkpoints/step-*.ckpt")
    assert saved.is_dir()
    assert built(sharded.folder) < 0.8  # half of it, and a block; whole, it would be 1 before anything is spread
