"""scripts/gpu_check: what it can't measure is no pass, what breaks in a check doesn't end the table, and its commands work."""

import gzip
import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import PATIENCE, ROOT, environment

MEASURE = ROOT / "scripts/measure"


def check(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(ROOT / "scripts/gpu_check"), *words],
        cwd=folder,
        env=environment(PROJECT_PYTHON=sys.executable, COLUMNS="150"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of scripts/measure, which are programs and no package."""
    monkeypatch.syspath_prepend(str(MEASURE))
    return importlib.import_module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_counts_as_measured(tmp_path):
    done = check(tmp_path)
    assert done.returncode == 3, done.stdout
    assert "No GPU here: nothing was measured" in done.stdout
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if line.startswith("│")]
    states = [state.strip() for name, state, *_ in rows if name.strip()]
    assert len(states) == 17
    assert set(states) == {"not run"}
    assert list(tmp_path.iterdir()) == []  # and no gpu.json
    page = (ROOT / "BENCHMARKS.md").read_text()
    assert "\n".join(line.rstrip() for line in done.stdout.splitlines()) in page
    assert "3: no GPU here" in check(tmp_path, "--help").stdout
    assert check(tmp_path, "--only=nothing").returncode == 2


def test_a_check_that_was_not_run_is_no_pass(load):
    code = load("gpu").exit_code
    assert code({"ok"}, "cuda") == 0
    assert code({"ok", "not run"}, "cuda") == 4
    assert code({"ok", "not run", "bad"}, "cuda") == code({"bad"}, "cpu") == 1
    assert code({"ok"}, "cpu") == 3


STAND_IN = """
import os, subprocess, sys, time
how = sys.argv[1]
print("it says this")
if how == "crashes":
    os.kill(os.getpid(), 11)
if how == "raises":
    raise KeyError("it is broken")
if how == "hangs":
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(sys.argv[2], "w").write(str(child.pid))
    time.sleep(1000)
print('{"state": "ok", "figure": "7", "more": {}}')
"""


def test_what_breaks_in_a_check_is_told_and_the_table_goes_on(load, tmp_path):
    gpu: ModuleType = load("gpu")
    (tmp_path / "stand_in.py").write_text(STAND_IN)

    def run(how: str, limit: float = 60, budget: float = 60) -> Any:
        return gpu.perform(gpu.Check(how, "", 1, limit), str(tmp_path / "child"), min(limit, budget), tmp_path / "stand_in.py")

    assert run("works")["figure"] == "7"
    crashed, raised = run("crashes"), run("raises")
    assert (crashed["state"], raised["state"]) == ("bad", "bad")
    assert "code -11" in crashed["figure"]
    assert "KeyError: 'it is broken'" in raised["figure"]
    hangs = run("hangs", limit=2)
    assert (hangs["state"], hangs["figure"]) == ("bad", "not through after 2 s")
    assert not Path("/proc", (tmp_path / "child").read_text(), "cwd").exists()  # though it has a session of its own
    assert run("hangs", budget=2)["state"] == "not run"  # it might have ended well


def test_two_gpus_and_the_budget_are_reasons_not_to_run(load):
    gpu: ModuleType = load("gpu")
    one, pair = gpu.Check("one", "", 30, 60), gpu.Check("pair", "", 30, 60, gpus=2)
    assert gpu.not_run(one, "cuda", 1, 400) is gpu.not_run(pair, "cuda", 2, 400) is None
    assert gpu.not_run(pair, "cuda", 1, 400) == "needs 2 GPUs"
    assert "20 s of the budget" in gpu.not_run(one, "cuda", 1, 20)
    assert {check.name for check in gpu.CHECKS} == load("gpu_checks").CHECKS.keys()


@pytest.mark.parametrize(
    ("said", "state"),
    [("6 passed in 3 s", "ok"), ("6 skipped in 3 s", "bad"), ("5 passed, 1 skipped in 3 s", "bad"), ("no tests ran", "bad")],
)
def test_gpu_tests_that_are_skipped_are_no_pass(load, monkeypatch, said, state):
    """pytest's exit code is 0 where all are skipped."""
    checks = load("gpu_checks")
    monkeypatch.setattr(checks, "start", lambda *_: checks.Done(0, f"...\n{said}\n", 1.0))
    assert checks.gpu_tests("cuda").state == state


def test_a_fit_in_which_nobody_looked_is_no_pass(load, monkeypatch, tmp_path):
    checks = load("gpu_checks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "start", lambda *_: checks.Done(0, "all is well", 1.0))
    assert checks.fits("cuda", "16-mixed").state == "bad"
    Path("looked.json").write_text(json.dumps({"steps": 30, "device": "cpu"}))
    assert checks.fits("cuda", "16-mixed").state == "bad"  # it ran elsewhere
    Path("looked.json").write_text(json.dumps({"steps": 30, "device": "cuda:0"}))
    assert checks.fits("cuda", "16-mixed").state == "ok"


@pytest.mark.parametrize(
    ("how", "code", "said", "state"),
    [
        ("hang", 75, "The run hangs: rank 1 on {host} has made no progress", "ok"),
        ("hang", 75, "The run hangs: rank 0 on {host} has made no progress; rank 1 on {host} waits", "bad"),
        ("hang", 1, "The run hangs: rank 1 on {host} has made no progress", "bad"),
        ("kill", 1, "rank 1 on {host} was killed by signal 9.", "ok"),
        ("kill", 0, "rank 1 on {host} was killed by signal 9.", "bad"),
        ("abort", 75, "1 host x 2 processes, rank 1 on {host}", "bad"),
    ],
)
def test_a_fault_must_be_told_of_the_right_rank(load, monkeypatch, tmp_path, how, code, said, state):
    checks = load("gpu_checks")
    monkeypatch.chdir(tmp_path)
    Path("struck").write_text(str(time.time()))
    monkeypatch.setattr(checks, "start", lambda *_: checks.Done(code, said.format(host=socket.gethostname()), 1.0))
    assert checks.fault("cuda", how, None if how == "kill" else 75, 60).state == state
    Path("struck").write_text(str(time.time() - 100))
    assert checks.fault("cuda", how, None if how == "kill" else 75, 60).state == "bad"  # too late


def test_whatever_waits_for_a_gpu_is_an_error_from_one_step_to_another(load, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    heard: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", heard.append)
    probe = load("gpu_probes").NoWaits(first=2, last=4)
    module: Any = SimpleNamespace(device=torch.device("cuda", 0))
    for micro_batch in range(10):
        trainer: Any = SimpleNamespace(accumulate_grad_batches=2, global_step=(micro_batch + 1) // 2)
        probe.on_train_batch_end(trainer, module, None, None, micro_batch)
        assert heard == ([] if micro_batch < 3 else ["error"] if micro_batch < 7 else ["error", "default"])
    assert json.loads(Path("looked.json").read_text()) == {"steps": 2, "device": "cuda:0"}


def test_what_only_a_gpu_says(load, monkeypatch, tmp_path):
    """The ways that a CPU doesn't take, with stand-ins for the GPU."""
    checks, speed = load("gpu_checks"), load("gpu_speed")
    monkeypatch.chdir(tmp_path)
    device = SimpleNamespace(name="NVIDIA H100 80GB HBM3", multi_processor_count=132)
    for name, value in {
        "device_count": lambda: 2, "get_device_properties": lambda _: device, "get_device_capability": lambda _: (9, 0),
        "can_device_access_peer": lambda *_: True, "get_device_name": lambda: device.name,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("randn", "eye"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, device, make=make: make(*size))
    monkeypatch.setattr(checks, "start", lambda *_: checks.Done(0, "580.1\n580.1", 1.0))
    found = checks.environment("cuda")
    assert (found.state, found.figure) == ("ok", f"2 x {device.name}, driver 580.1, NCCL {found.more['nccl']}")

    def programs(samples: float) -> Any:
        phases = {"data": 1.0, "forward": 3.0}
        names = {"plain in fp32": 1000.0, "ours": samples}
        return lambda *_: {name: {"samples_per_s": [value], "phases": phases} for name, value in names.items()}

    for samples, against, share in ((4_000, "bad", "bad"), (6_000, "ok", "bad"), (140_000, "ok", "ok")):
        monkeypatch.setattr(speed, "speeds", programs(samples))
        assert speed.against_plain("cuda").state == against
        assert speed.share_of_peak("cuda", "none").state == share
    monkeypatch.setattr(speed, "speeds", programs(137_500))
    assert "137.50 times; plain 1,000 samples/s, 25% of it waiting for data" in speed.against_plain("cuda").figure
    assert "35% (137,500/s)" in speed.share_of_peak("cuda", "none").figure  # the issue's own figure

    folder = tmp_path / "lightning_logs/it/profiles"
    folder.mkdir(parents=True)
    with gzip.open(folder / "a.json.gz", "wt") as file:
        json.dump({"traceEvents": [{"cat": "kernel"}, {"cat": "cpu_op"}]}, file)
    assert checks.profile("cuda").state == "bad"  # no snapshot
    (folder / "a.pickle").write_bytes(pickle.dumps({"segments": [{}, {}]}))
    assert checks.profile("cuda").figure == "1 device events in 3 steps, a memory snapshot of 2 segments"


@pytest.mark.parametrize(("gpus", "code"), [(1, 4), (2, 0)])
def test_the_table_and_the_file_of_a_gpu(load, monkeypatch, tmp_path, capsys, gpus, code):
    gpu: ModuleType = load("gpu")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu", "--budget=10000"])
    monkeypatch.setattr(gpu, "gpus_here", lambda: gpus)
    monkeypatch.setattr(gpu, "perform", lambda *_: {"state": "ok", "figure": "7", "more": {}, "seconds": 1.0})
    assert gpu.main() == code
    told = json.loads(Path("gpu.json").read_text())
    assert (told["on"], told["gpus"], told["exit_code"]) == ("cuda", gpus, code)
    assert {one["state"] for one in told["checks"]} == ({"ok", "not run"} if gpus == 1 else {"ok"})
    assert ("needs 2 GPUs" in capsys.readouterr().out) == (gpus == 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "left_out"),
    [("fit", ["fit in 16-mixed", "fit in bf16-mixed"]), ("killed", []), ("profile", [])],
)
def test_the_commands_of_the_checks_work(tmp_path, only, left_out):
    """On a CPU, where they say nothing about a GPU. All of them take four minutes: scripts/gpu_check --on cpu."""
    done = check(tmp_path, "--on=cpu", f"--only={only}")
    assert done.returncode == 3, done.stdout
    found = json.loads((tmp_path / "gpu-check-on-cpu.json").read_text())
    states = {one["name"]: one["state"] for one in found["checks"]}
    assert [name for name, state in states.items() if state == "not run"] == left_out
    assert set(states.values()) - {"not run"} == {"ok"}
    assert os.listdir(tmp_path) == ["gpu-check-on-cpu.json"]
