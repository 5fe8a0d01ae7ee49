"""Who starts the ranks on GPUs: plain Python, torchrun, and launch.sh on two hosts; each rank stays on its own GPU."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import hosts, three_hosts  # noqa: F401 - fixtures
from tests.cluster.machine import LONG
from tests.cluster.test_hosts import launch, printed
from tests.conftest import PATIENCE, Cli
from tests.conftest import environment as clean
from tests.standin.pool import environment, meeting_place
from tests.standin.test_runs import DDP, fault, final, plugged
from tests.survive.test_resume import same
from tests.train.test_sharded import sharded

pytestmark = pytest.mark.slow

CONTEXTS = {"class_path": "tests.standin.probes.Contexts"}


def contexts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("contexts-*.json"))]


@pytest.mark.parametrize("launcher", [pytest.param("python", marks=pytest.mark.faults), "torchrun"])
def test_a_rank_has_a_context_on_its_own_gpu_only_and_is_named_when_killed(gpu_program: Cli, launcher: str) -> None:
    ranks: dict[str, Any] = {"torchrun": 3} if launcher == "torchrun" else {}
    words = () if launcher == "torchrun" else ("--trainer.devices=3",)
    run = gpu_program(*DDP, *words, plugged(CONTEXTS, fault(rank=1, step=3, how="kill")), gpus=3, **ranks)
    assert run.code == (1 if launcher == "torchrun" else 75), run.output  # torchrun has a code of its own
    assert f"rank 1 on {socket.gethostname()} was killed by signal 9" in run.output
    assert contexts(run.folder) == [{"devices": [rank], "own": rank} for rank in range(3)]


def test_ranks_that_lightning_started_end_with_the_same_code(gpu_program: Cli) -> None:
    """What a word of JSON says of a strategy is not read before libraries are loaded: Lightning starts the ranks."""
    words = (sharded(), "--trainer.devices=2", plugged(fault(rank=1, step=2, how="abort")))
    run = gpu_program(*DDP, *words, gpus=2)
    assert run.code == 75, run.output
    assert "lost another rank: rank 1 on " in run.output


FIRST_TORCH = """
import torch
from project import Trainer
from tests.own import PointsData, Regression

if __name__ == "__main__":
    trainer = Trainer(max_epochs=1, accelerator="gpu", devices=2, global_batch_size=24, default_root_dir="run")
    trainer.fit(Regression(), datamodule=PointsData(size=48))
    kind = type(torch.distributed.group.WORLD._get_backend(torch.device("cuda"))).__name__
    open(f"nccl-{trainer.global_rank}", "w").write(kind)
"""


def test_all_ranks_take_the_same_nccl_where_torch_was_imported_first(tmp_path: Path) -> None:
    (tmp_path / "first_torch.py").write_text(FIRST_TORCH)
    with meeting_place() as place:
        own = clean(**environment(2, place))
        command = [sys.executable, "first_torch.py"]
        done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / f"nccl-{rank}").read_text() for rank in range(2)] == ["ProcessGroupNCCL"] * 2


@pytest.mark.slow
def test_two_hosts_with_two_gpus_each(hosts: Any, gpu: Cli, tmp_path: Path) -> None:  # noqa: F811
    """With `exact`, they have the bits of one GPU."""
    together = tmp_path / "together"
    together.mkdir()
    exact = ("--trainer.precision=32-true", "--trainer.exact=true", "--trainer.max_epochs=1", "--data.global_batch_size=32")
    words = [argument for argument in (*DDP, *exact) if not argument.startswith("--trainer.devices")]
    with meeting_place() as place:
        own = {**environment(2, place), "NPROC_PER_NODE": "2"}
        running = [launch(host, together, *words, plugged(CONTEXTS), nodes=2, **own) for host in hosts[:2]]
        codes = [process.wait(LONG) for process in running]
    assert codes == [0, 0], printed(together)
    assert "2 hosts x 2 processes" in (together / "h1.txt").read_text()
    assert [context["devices"] for context in contexts(together)] == [[0], [1], [0], [1]]
    alone = gpu(*words, plugged())
    assert alone.code == 0, alone.output
    assert same(final(together)["state_dict"], final(tmp_path)["state_dict"])
