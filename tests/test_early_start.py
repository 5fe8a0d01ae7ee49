"""Under plain Python the ranks start at once; a wrong guess of how many there will be does no harm."""

import json
import socket
import subprocess
import sys

import pytest

from project.launch.early_start import ranks
from tests.conftest import PATIENCE, TINY, since_struck

TWO = ("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.max_steps=1", "--trainer.devices=2")


@pytest.mark.parametrize(
    ("devices", "accelerator", "gpus", "count"),
    [
        ("auto", "auto", 0, 1),
        (None, None, 8, 8),
        (-1, "gpu", 4, 4),
        ("2", "cpu", 8, 2),
        (3, "auto", 0, 3),
        ([0, 2], "gpu", 4, 2),
        ("0,1", "gpu", 4, 0),
    ],
)
def test_what_devices_mean(devices, accelerator, gpus, count):
    assert ranks(devices, accelerator, gpus) == count


def test_rank_1_starts_before_rank_0_has_loaded_what_it_needs(cli):
    run = cli(*TWO, "--trainer.callbacks=tests.probes.Born")
    assert run.code == 0, run.output
    rank_0, rank_1 = (json.loads((run.folder / f"born-{rank}.json").read_text()) for rank in range(2))
    loading = rank_0["made"] - rank_0["began"]
    assert rank_1["began"] - rank_0["began"] < loading / 2
    assert "1 host x 2 processes" in run.output


@pytest.mark.faults
def test_a_run_that_is_named_knows_its_ranks_from_its_own_config(cli):
    first = cli(*TWO, "--run=it")
    assert first.code == 0, first.output
    resumed = cli("fit", "--run=it", "--trainer.max_steps=2", "--trainer.callbacks=tests.probes.Born")
    assert resumed.code == 0, resumed.output
    rank_0, rank_1 = (json.loads((resumed.folder / f"born-{rank}.json").read_text()) for rank in range(2))
    assert rank_1["began"] < rank_0["made"]


def test_ranks_that_are_not_needed_end(cli):
    run = cli(*TWO, '--trainer={"devices": 1}')
    assert run.code == 0, run.output
    assert "1 host x 1 process " in run.output


def test_a_mistake_is_told_once(cli):
    run = cli(*TWO, "--modell=3")
    assert run.code == 2
    assert run.output.count("There is no key modell") == 1


@pytest.mark.faults
def test_a_rank_that_ends_takes_a_rank_0_along_that_would_wait_for_ever(cli):
    run = cli(*TWO, "--trainer.callbacks=tests.probes.EndsAlone")
    assert run.code == 1
    assert "after another rank has failed (rank 1 with exit code 3): it is ended." in run.output


def test_a_rank_that_is_killed_before_the_ranks_are_connected_is_named(cli):
    run = cli(*TWO[:-1], "--trainer.devices=3", "--trainer.callbacks=tests.probes.KilledEarly")
    assert run.code == 75
    killed = f"lost another rank: rank 2 on {socket.gethostname()} was killed by signal 9. There is no checkpoint yet"
    assert killed in run.output
    assert since_struck(run.folder) < 15, "rank 0 waits for what never comes"


LOADS = """
import os, sys
import torch
from project.__main__ import load_torchmetrics

class Needy:  # stands for a library that torchmetrics loads, and that needs more than the patch
    def find_spec(self, name, *_):
        if name == "torchmetrics.aggregation":
            exec(needs)

sys.meta_path.insert(0, Needy())
for needs in sys.argv[1:]:
    if not (child := os.fork()):
        load_torchmetrics()
        print(any(name.startswith("scipy.signal.") for name in sys.modules))
        import scipy.signal, torchmetrics
        print(scipy.signal.butter.__name__, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_torchmetrics_is_loaded_without_what_few_need():
    pytest.importorskip("scipy")
    needs = ("from scipy.signal import get_window", "from scipy import signal; signal.sosfilt", "import scipy.signal.windows")
    done = subprocess.run([sys.executable, "-c", LOADS, "pass", *needs], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.split() == ["False", "butter", *["True", "butter"] * 3], done.stderr
