"""Many faults in real runs. Two here; all of them, and the report in docs/faults.md, with: scripts/test --faults"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import environment
from tests.survive.test_resume import FIT, assert_same_run

pytestmark = pytest.mark.slow

PASS_ON = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"  # as scripts/launch.sh does
SLOW = {"class_path": "tests.probes.Ledger", "init_args": {"pause": 0.02}}
WORDS = (*FIT, "--trainer.callbacks=" + json.dumps([SLOW]), "--trainer.devices=2")


def start(folder: Path, *words: str, torchrun: bool = False) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", PASS_ON] if torchrun else []
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "project", *(["--"] if torchrun else []), *(words or WORDS)],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ranks(run: subprocess.Popen[str]) -> list[int]:
    """The processes of rank 0 and rank 1 under plain Python, as far as they have been started."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    return [run.pid, *map(int, children)]


def kill(run: subprocess.Popen[str], who: str, number: int) -> None:
    """Signals rank 0, rank 1 or all."""
    if who == "all":
        os.killpg(run.pid, number)
        return
    processes = ranks(run)
    os.kill(processes[min(int(who), len(processes) - 1)], number)


def counted(folder: Path) -> dict[int, list[int]]:
    """The samples of each step, as the last process that took it saw them."""
    steps: dict[int, list[int]] = {}
    for rank in range(2):
        last: dict[int, int] = {}
        lines = [json.loads(line) for line in (folder / f"ledger-{rank}.jsonl").read_text().splitlines() if line.endswith("}")]
        for line in lines:
            last[line["step"]] = line["pid"]
        for line in lines:
            if last[line["step"]] == line["pid"]:
                steps.setdefault(line["step"], []).extend(line["samples"])
    return steps


@pytest.mark.faults
def test_kills_at_random_moments(tmp_path):
    """SIGKILL of rank 0, rank 1 or all, anywhere from the start-up to the end; then the run is the same, to the last bit."""
    kills = 40
    whole = tmp_path / "whole"
    whole.mkdir()
    run = start(whole)
    assert run.wait(120) == 0, run.stdout

    folder = tmp_path / "killed"
    folder.mkdir()
    moment = random.Random(0)
    phases: Counter[str] = Counter()
    starts = 0
    while phases.total() < kills:
        starts += 1
        run = start(folder)
        try:
            time.sleep(
                moment.uniform(1, 14) if starts % 4 else moment.uniform(6, 9)
            )  # the kill is the event; its moment is chance
            alive = run.poll() is None
            if alive:
                kill(run, moment.choice(["0", "1", "all"]), signal.SIGKILL)
            output = run.communicate(timeout=240)[0]
        finally:
            with_group(run)
        if alive:
            phases["start-up" if "global batch" not in output else "training"] += 1
        if "The run is finished" in output or (not alive and run.returncode == 0):
            fresh = tmp_path / f"killed-{starts}"  # it got through: that one is checked, and another begins
            assert_same_run(folder, whole)
            folder = fresh
            folder.mkdir()
    run = start(folder)
    assert run.wait(120) == 0
    assert_same_run(folder, whole)
    expected = counted(whole)
    assert {step: sorted(seen) for step, seen in counted(folder).items()} == {s: sorted(seen) for s, seen in expected.items()}
    print(f"\n{kills} SIGKILLs ({dict(phases)}), {starts} starts: bitwise the same run")


def with_group(run: subprocess.Popen[str]) -> None:
    """Ends what is left of a run's processes."""
    try:
        os.killpg(run.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("who", ["0", "1", "all", "launcher"])
def test_signals_with_ranks_out_of_step(tmp_path, launcher, number, who, request):
    """One rank is half a second slower in each micro-batch; a signal reaches one rank, all, or the launcher."""
    if not request.config.getoption("--faults") and (launcher, who, number) not in QUICK:
        pytest.skip("one of the many: scripts/test --faults")
    slow = {"class_path": "tests.probes.Ledger", "init_args": {"pause": 0.5, "rank": 1}}
    words = (*FIT, "--trainer.callbacks=" + json.dumps([slow]), "--trainer.devices=2")
    run = start(tmp_path, *words, torchrun=launcher == "torchrun")
    began = None
    try:
        assert run.stdout is not None
        for line in run.stdout:
            if "global batch" in line:
                while not (tmp_path / "ledger-1.jsonl").exists():
                    time.sleep(0.05)
                began = time.monotonic()
                workers = ranks(run)[1:] if launcher == "torchrun" else ranks(run)
                if who == "launcher":
                    os.kill(run.pid, number)
                elif who == "all":
                    os.killpg(run.pid, number)
                else:
                    os.kill(workers[int(who)], number)
                break
        output = run.communicate(timeout=240)[0]
    finally:
        with_group(run)
    assert began is not None
    if launcher == "python":
        assert run.returncode == 128 + number, output
    else:
        assert run.returncode != 0, output
    assert "Stopped by" in output, output
    assert list((tmp_path / "lightning_logs/it/checkpoints").glob("*.ckpt"))
    assert time.monotonic() - began < 30


QUICK = [("torchrun", "1", signal.SIGUSR1)]


def test_a_signal_during_the_start_up_is_honoured(tmp_path):
    run = start(tmp_path)
    time.sleep(2)  # PyTorch is being loaded
    os.kill(run.pid, signal.SIGTERM)
    output = run.communicate(timeout=240)[0]
    with_group(run)
    assert run.returncode == 143, output
    assert "epoch 2" not in output
