"""The doctor on one host; tests/cluster/test_unfit.py has it on several that are ill."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from project.cluster.environment import compare, different, differing_keys, named
from project.doctor import training
from tests.conftest import TINY, Run, environment

HEALTHY = ("doctor", "--config", "configs/ddp.yaml", *TINY)


def findings(run):
    (place,) = run.runs  # a run's folder, or a file where the doctor was called for none
    report = json.loads((place if place.is_file() else place / "doctor.json").read_text())
    return {finding["check"]: finding for finding in report["findings"]}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.faults), 2])
def test_a_healthy_cluster(cli, ranks):
    run = cli(*HEALTHY, torchrun=ranks)
    rows = findings(run)
    assert run.code == 0, run.output
    assert {row["verdict"] for row in rows.values()} <= {"good", "warning"}
    checks = {"versions", "hardware", "network", "data", "run's folder", "limits", "clocks", "collectives", "compute"}
    assert set(rows) >= checks | {"memory", "loader"} | ({"links", "gradient sync"} if ranks else set())
    for check in rows:
        assert len(re.findall(rf"│ {check} ", run.output)) == 1  # one table, by one rank
    assert "[rank 1" not in run.output  # the table may name it as slow


def test_a_fast_examination_comes_before_a_fit_and_leaves_no_trace_in_it(quick):
    size = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=4"]
    examined = quick("fit", "--config", "configs/ddp.yaml", *TINY, *size, "--doctor=true")
    assert examined.code == 0, examined.output
    curve = examined.curve("train/loss")
    assert "compute" not in findings(examined)
    examined.runs[0].rename(examined.folder / "first")
    plain = quick("fit", "--config", "configs/ddp.yaml", *TINY, *size)
    assert plain.curve("train/loss") == curve


def test_data_that_is_not_there_is_a_finding_and_the_fit_does_not_start(quick, tmp_path):
    (tmp_path / "images").mkdir()
    run = quick("fit", "--config", "configs/imagefolder.yaml", "--data.source.init_args.root=images", "--doctor=true")
    assert run.code == 1, run.output
    assert findings(run)["data"]["verdict"] == "bad"
    assert "images/train" in findings(run)["data"]["text"]
    assert "Traceback" not in run.output
    assert "step" not in run.output


def test_it_examines_any_module_and_data(quick):
    words = ("doctor", "--data=tests.own.PointsData", "--trainer.global_batch_size=24", "--trainer.accelerator=cpu")
    first = quick(*words, "--model=tests.own.Regression", "--run=automatic")
    rows = findings(first)
    assert rows["data"]["text"].startswith("the same everywhere: 50 train (")
    assert {rows[check]["verdict"] for check in ("compute", "memory", "loader")} == {"good"}, rows
    first.runs[0].rename(first.folder / "first")
    rows = findings(quick(*words[:2], "--model=tests.own.Duel", "--trainer.accelerator=cpu", "--run=manual"))
    assert "takes its steps by itself" in rows["compute"]["text"]
    assert rows["loader"]["verdict"] == "good"


@pytest.mark.parametrize(
    ("size", "cause"), [(25, "can't make a global batch of 25 ("), (600, "50 training sample(s) are too few")]
)
def test_numbers_that_a_fit_refuses_are_bad(quick, size, cause):
    words = ("--model=tests.own.Regression", "--data=tests.own.PointsData", "--trainer.accelerator=cpu")
    words = (*words, "--trainer.max_epochs=1", f"--trainer.global_batch_size={size}")
    assert cause in quick("fit", *words).output
    run = quick("doctor", *words)
    assert run.code == 1, run.output
    assert findings(run)["batches"]["verdict"] == "bad"
    assert cause in findings(run)["batches"]["text"]


def test_a_small_dev_shm_is_found_before_a_loader_needs_it(tmp_path):
    """Nine batches (two for each of four loaders, one in use) of 64 images of 3 x 256 x 256 bytes: with pages, 109 MiB."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    large = ("--data.num_workers=4", "--data.batch_size=64", "--data.source.init_args.image_size=256", "--fast=true")
    program = [sys.executable, "-m", "project", *HEALTHY, *large]
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m none /dev/shm; exec "$@"', "sh"]
    done = subprocess.run([*small, *program], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    row = findings(Run(done.returncode, done.stdout + done.stderr, tmp_path))["limits"]
    assert (done.returncode, row["verdict"]) == (1, "bad"), done.stderr
    assert "64 MiB of /dev/shm, and the loaders' workers take 109 MiB" in row["text"]
    assert "docker run --shm-size" in row["fix"]
    assert "Free disk" not in row["fix"]


def test_a_fit_that_finds_dev_shm_full_says_so_and_does_not_wait(tmp_path):
    """A batch of 24 MiB, and 16 MiB to send it in: Python's queue drops it, and nobody is told."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    words = ("fit", *HEALTHY[1:], "--data.num_workers=1", "--data.batch_size=128", "--data.source.init_args.image_size=256")
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=16m none /dev/shm; exec "$@"', "sh"]
    program = [*small, sys.executable, "-m", "project", *words]
    done = subprocess.run(program, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "was killed by signal 7. HINT: /dev/shm (16 MiB) may be full: give it more (docker run --shm-size" in output
    assert "Traceback" not in output


def test_ranks_are_named_by_host():
    hosts = ["h1", "h1", "h2", "h3", "h3", "h3"]
    assert named([2], hosts) == "rank 2 on h2"
    assert named([0, 1, 3, 4, 5], hosts) == "ranks 0 and 1 on h1, ranks 3, 4 and 5 on h3"


def test_what_most_ranks_have_is_what_is_usual():
    environments = [{"torch": "2.15"}, {"torch": "2.15"}, {"torch": "2.14"}]
    assert different(environments, ["h1", "h2", "h3"], ["torch"]) == {"rank 2 on h3: torch 2.14, elsewhere 2.15": [2]}


def test_a_configuration_that_differs_is_shown_by_key():
    config, changed = {"trainer": {"max_epochs": 3}, "seed": 0}, {"trainer": {"max_epochs": 2}, "seed": 0}
    assert differing_keys([config, changed, config], ["h1", "h2", "h3"]) == {
        "rank 1 on h2: trainer.max_epochs 2, elsewhere 3": [1]
    }


def test_only_what_differs_is_sent_in_full():
    sent = []

    def gather(value):
        sent.append(value)
        return [value, value]

    environments = dict.fromkeys(
        ("Python", "torch", "CUDA", "NCCL", "lightning", "project", "commit", "sources", "image", "configuration"), "same"
    )
    assert compare(environments, {"large": "configuration"}, ["h1", "h2"], gather) == {}
    assert sent == [environments]


def test_memory_that_others_hold_of_a_gpu_does_not_count_as_free(monkeypatch):
    """80 GB, of which others hold 60, and torch 2 that it can use again."""
    monkeypatch.setattr(training, "_peak", lambda run, device: 1e9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (18e9, 80e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2e9)
    this = SimpleNamespace(run=SimpleNamespace(device=torch.device("cuda"), micro_batch=8, compute=None))
    fixed, each, free = training._peaks(this)  # type: ignore[arg-type]
    assert (fixed, each) == (1e9, 0)
    assert free == pytest.approx(0.95 * 20e9)
