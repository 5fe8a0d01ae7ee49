"""torchrun --nnodes=1:2: an agent goes and its workers with it, the other goes on; it comes back, and they are two again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import environment, free_port
from tests.survive.test_resume import FIT, curves, fit

# Restarts with the agents' shared store hang or fail; agents that are gone must be noticed within seconds.
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
LONG = (*FIT, "--trainer.max_epochs=12", "--trainer.callbacks=" + json.dumps(
    [{"class_path": "tests.probes.Ledger", "init_args": {"pause": 0.05}}]
))  # fmt: skip


def agent(folder: Path, port: int, store: bool) -> subprocess.Popen[bytes]:
    """`store`: the agents meet at this one's store, and can't do without it."""
    conf = f"is_host={store:d},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5"),
            *("--rdzv-id=elastic", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={conf}"),
            *("--monitor-interval=0.2", "-m", "project", "--", *LONG),
        ],
        cwd=folder,
        env=environment(**ELASTIC),
        stdout=(folder / "output.txt").open("ab"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for(folder: Path, text: str, times: int, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while (folder / "output.txt").read_text().count(text) < times:
        assert time.monotonic() < end, f"no {text!r} ({times}): " + (folder / "output.txt").read_text()[-3000:]
        time.sleep(0.1)


def test_an_agent_goes_and_comes_back(tmp_path):
    port = free_port()
    agents = [agent(tmp_path, port, store=True), agent(tmp_path, port, store=False)]
    try:
        wait_for(tmp_path, "2 hosts x 1 process x micro-batch 8 x accumulation 2 = global batch 32", 1)
        wait_for(tmp_path, "epoch 0  step 5", 1)
        os.killpg(agents[1].pid, signal.SIGKILL)  # the second host, with all that ran on it
        wait_for(tmp_path, "1 host x 1 process x micro-batch 8 x accumulation 4 = global batch 32", 1)
        wait_for(tmp_path, "Goes on from", 1)
        agents[1] = agent(tmp_path, port, store=False)
        wait_for(tmp_path, "2 hosts x 1 process x micro-batch 8 x accumulation 2 = global batch 32", 2)
        assert [one.wait(120) for one in agents] == [0, 0], (tmp_path / "output.txt").read_text()
    finally:
        for one in agents:
            try:
                os.killpg(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    whole = tmp_path / "whole"
    whole.mkdir()
    assert fit(whole, "--trainer.max_epochs=12").returncode == 0
    ours, theirs = curves(tmp_path), curves(whole)
    assert [step for step, _ in ours["train/loss"]] == [step for step, _ in theirs["train/loss"]]
    worst = max(abs(a[1] - b[1]) for a, b in zip(ours["train/loss"], theirs["train/loss"], strict=True))
    assert worst < 1e-5
