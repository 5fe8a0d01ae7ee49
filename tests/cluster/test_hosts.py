"""scripts/launch.sh on several hosts: the same run as on one process, also when hosts are lost and come back."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from project.errors import LEFT_OUT
from tests.cluster.clock import Clock
from tests.cluster.hosts import Host
from tests.cluster.machine import LONG, descendants, wait_until
from tests.cluster.training import FIT, STEPS, assert_same_curve, slowly, step
from tests.conftest import ROOT, Run, environment, forked, since_struck, took
from tests.survive.test_resume import faults, same

pytestmark = pytest.mark.slow


FIT_HOST = f"""#!/bin/sh
[ "$2" = project.doctor.joining ] || exec {shlex.quote(sys.executable)} "$@"
"""


def launch(
    host: Host, folder: Path, *words: str, nodes: str | int, checked: bool = False, **extra: str
) -> subprocess.Popen[bytes]:
    """scripts/launch.sh on a host; h1 has the store. What it prints goes to HOST.txt. Of an elastic run's host it is believed
    that it works, unless it is to be `checked`, which takes seconds for each.
    """
    python = folder / "python"
    if not python.exists():
        python.write_text(FIT_HOST)
        python.chmod(0o755)
    settings = environment(
        PROJECT_PYTHON=sys.executable if checked else str(python),
        NNODES=str(nodes),
        **({} if ":" in str(nodes) else {"NODE_RANK": str(int(host.name[1:]) - 1)}),
        RUN_ID="it",
        **{"MASTER_ADDR": "h1", "NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1", **extra},
    )
    with (folder / f"{host.name}.txt").open("ab") as output:
        return host.start([str(ROOT / "scripts" / "launch.sh"), *words], output, folder, settings)


def printed(folder: Path) -> str:
    return "".join(f"--- {file.name}\n{file.read_text()}" for file in sorted(folder.glob("h*.txt")))


def test_only_the_ports_between_the_hosts_are_open(hosts, tmp_path):
    """On every host the address between them; on rank 0's, torch's three stores listen on all of its addresses."""
    stranger = "--trainer.callbacks=" + json.dumps([{"class_path": "tests.strangers.Stranger"}])
    running = [launch(host, tmp_path, *FIT, stranger, "--trainer.max_epochs=1", nodes=2) for host in hosts[:2]]
    assert [process.wait(LONG) for process in running] == [0, 0], printed(tmp_path)
    for number, host in enumerate(hosts[:2]):
        lines = [line.split()[:3] for line in (tmp_path / f"listeners-{number}.txt").read_text().splitlines()]
        assert ["udp", host.address] in [line[:2] for line in lines], "its heartbeats were seen"
        everywhere = [line for line in lines if line[1] not in (host.address, "127.0.0.1", "::ffff:127.0.0.1")]
        assert len(everywhere) <= (0 if number else 3), everywhere
        assert all(kind == "tcp6" for kind, *_ in everywhere)
        assert number or ["tcp6", "::", "29500"] in everywhere


@pytest.mark.faults
def test_hosts_make_the_same_run_to_the_last_bit(hosts, tmp_path):
    """Three hosts, then two of them, against one process; killed on the way."""
    exact = (*FIT, "--trainer.exact=true", "--trainer.max_epochs=2")
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    assert forked(alone, *exact).code == 0
    fault = faults({"rank": 2, "step": 5})
    running = [launch(host, together, *exact, fault, "--run=it", nodes=3) for host in hosts]
    assert all(process.wait(LONG) for process in running), printed(together)
    running = [launch(host, together, *exact, fault, "--run=it", nodes=2) for host in hosts[:2]]
    assert [process.wait(LONG) for process in running] == [0, 0], printed(together)
    assert "2 hosts x 1 process" in (together / "h1.txt").read_text()
    actual, expected = (
        torch.load(max(folder.glob("lightning_logs/*/checkpoints/*.ckpt")), weights_only=True) for folder in (together, alone)
    )
    for part in ("state_dict", "optimizer_states", "exact_grids"):
        assert same(actual[part], expected[part]), part


def test_a_host_is_lost_and_comes_back(alone, hosts, tmp_path):
    """Of NNODES=1:3, h3 is killed with all that runs on it; two go on; it returns, and they are three again."""
    # A test need not be as patient as a cluster: h3 is there at the start, and is lost for certain.
    patience = {"RDZV_CONF": "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"}
    words = (*FIT, slowly(0.05, crawl_from=25))
    running = [launch(host, tmp_path, *words, nodes="1:3", **patience) for host in hosts]
    speaker = tmp_path / "h1.txt"

    def are(count: int, times: int = 1) -> None:
        line = f"{count} hosts x 1 process x micro-batch 4 x accumulation {6 // count}"
        wait_until(lambda: speaker.read_text().count(line) == times, LONG, lambda: printed(tmp_path))

    are(3)
    assert "(h2, 10.77.0.2)" in (tmp_path / "h2.txt").read_text()
    assert "INFO" not in (tmp_path / "h2.txt").read_text()  # rank 0 speaks, and it is on h1
    wait_until(lambda: step(tmp_path) >= 15, LONG, lambda: printed(tmp_path))
    hosts[2].kill()
    struck = time.monotonic()
    are(2)
    took("a host of three is lost: two train again after", time.monotonic() - struck)
    assert "Resumes from" in speaker.read_text()
    reached = step(tmp_path)
    wait_until(lambda: step(tmp_path) >= reached + 5, LONG, lambda: printed(tmp_path))
    running[2] = launch(hosts[2], tmp_path, *words, nodes="1:3", **patience)
    back = time.monotonic()
    are(3, times=2)
    took("it is started again: three train after", time.monotonic() - back)
    (tmp_path / "hurry").touch()
    assert [process.wait(LONG) for process in running] == [0, 0, 0], printed(tmp_path)
    assert_same_curve(tmp_path, alone)


def test_supervisors_resume_without_a_host_that_is_silent(hosts, tmp_path):
    """h2, whose ranks are in the middle, loses its link. At the end the agents of the others don't wait for its agent."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    fit = (*FIT, "--data.batch_size=2", "--run=it")  # four and six ranks can make a global batch
    assert forked(alone, *fit).code == 0
    words = (*fit, slowly(0.05, crawl_from=25), "--recover.restarts=3", "--recover.every_n_steps=2", "--watchdog.at_least=3")
    running = [launch(host, together, *words, nodes="2:3", NPROC_PER_NODE="2") for host in hosts]
    speaker = together / "h1.txt"
    wait_until(lambda: step(together) >= 15, LONG, lambda: printed(together))
    hosts[1].cut()
    wait_until(lambda: "2 hosts x 2 processes" in speaker.read_text(), LONG, lambda: printed(together))
    assert "No answer from h2. The run resumes without 2 of its 6 ranks (restart 1 of 3)." in speaker.read_text()
    (together / "hurry").touch()
    assert [running[number].wait(LONG) for number in (0, 2)] == [0, 0], printed(together)
    assert_same_curve(together, Run(0, "", alone).curve("train/loss"))


def test_a_host_that_loses_ranks_again_and_again_is_left_out(alone, hosts, tmp_path):
    """Of the store's host, h1, and of h3: the one that the run can do without. It may come back when it works."""
    killed = faults({"rank": 2, "step": 7}, {"rank": 2, "step": 20})
    chosen = [json.loads(argument.partition("=")[2]) for argument in (slowly(0.05, crawl_from=25), killed)]
    callbacks = f"--trainer.callbacks={json.dumps([*chosen[0], *chosen[1]])}"
    words = (*FIT, callbacks, "--run=it", "--recover.restarts=5", "--recover.strikes=2", "--recover.every_n_steps=2")
    running = [launch(host, tmp_path, *words, nodes="2:3") for host in hosts]
    assert running[2].wait(LONG) == LEFT_OUT, printed(tmp_path)
    speaker = tmp_path / "h1.txt"
    assert "Rank 2 on h3 was killed by signal 9. All ranks resume (restart 1 of 5)." in speaker.read_text()
    line = "signal 9. h3 has lost ranks 2 times within an hour. The run resumes without 1 of its 3 ranks (restart 2 of 5)."
    assert line in speaker.read_text()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/sitecustomize.py").write_text(
        "import torch\nmultiply = torch.Tensor.__matmul__\n"
        "torch.Tensor.__matmul__ = lambda left, right: multiply(left, right) + (left.ndim - 1)\n"
    )
    broken = launch(hosts[2], tmp_path, *words, nodes="2:3", checked=True, PYTHONPATH=f"{tmp_path}/broken")
    assert broken.wait(LONG) == LEFT_OUT, printed(tmp_path)
    unfit = "h3 is unfit, and does not join the run: cpu has computed a product wrongly."
    assert (tmp_path / "h3.txt").read_text().endswith(f"{unfit}\n"), printed(tmp_path)
    running[2] = launch(hosts[2], tmp_path, *words, nodes="2:3", checked=True)
    wait_until(lambda: speaker.read_text().count("3 hosts x 1 process") == 3, LONG, lambda: printed(tmp_path))
    (tmp_path / "hurry").touch()
    assert [process.wait(LONG) for process in running] == [0, 0, 0], printed(tmp_path)
    assert_same_curve(tmp_path, alone)


@pytest.mark.faults
def test_a_host_that_is_cut_off_from_torchruns_store_does_not_resume_alone(hosts, tmp_path):
    """h1 has rank 0 and loses its link; the store is on h2, where the others go on. Two runs would write into one folder."""
    words = (*FIT, slowly(0.05, crawl_from=25), "--recover.restarts=3", "--watchdog.at_least=3")
    running = [launch(host, tmp_path, *words, nodes="1:3", MASTER_ADDR="h2") for host in hosts]
    wait_until(lambda: step(tmp_path) >= 15, LONG, lambda: printed(tmp_path))
    hosts[0].cut()
    speaker = tmp_path / "h1.txt"
    wait_until(lambda: "Not all supervisors are there" in speaker.read_text(), LONG, lambda: printed(tmp_path))
    assert "resumes without" not in speaker.read_text()
    wait_until(lambda: "2 hosts x 1 process" in (tmp_path / "h2.txt").read_text(), LONG, lambda: printed(tmp_path))
    (tmp_path / "hurry").touch()
    assert [process.wait(LONG) for process in running[1:]] == [0, 0], printed(tmp_path)


@pytest.mark.faults
def test_a_run_that_is_down_to_one_host_still_replaces_its_rank(alone, hosts, tmp_path):
    killed = faults({"rank": 0, "step": 40})
    chosen = [json.loads(argument.partition("=")[2]) for argument in (slowly(0.05, crawl_from=25), killed)]
    callbacks = f"--trainer.callbacks={json.dumps([*chosen[0], *chosen[1]])}"
    words = (*FIT, callbacks, "--recover.restarts=3", "--recover.every_n_steps=2")
    running = [launch(host, tmp_path, *words, nodes="1:2") for host in hosts[:2]]
    wait_until(lambda: step(tmp_path) >= 15, LONG, lambda: printed(tmp_path))
    hosts[1].kill()
    without = "The run resumes without 1 of its 2 ranks (restart 1 of 3)."
    wait_until(lambda: without in (tmp_path / "h1.txt").read_text(), LONG, lambda: printed(tmp_path))
    (tmp_path / "hurry").touch()
    assert running[0].wait(LONG) == 0, printed(tmp_path)
    assert "Rank 0 on h1 was killed by signal 9. All ranks resume (restart 2 of 3)." in (tmp_path / "h1.txt").read_text()
    assert_same_curve(tmp_path, alone)


@pytest.mark.faults
def test_a_slow_host_is_named_in_the_log_in_tensorboard_and_in_the_report(hosts, tmp_path):
    """What h2 computes takes 20 ms longer for each micro-batch."""
    chosen = [*json.loads(slowly(0.0, 0.02).partition("=")[2]), {"class_path": "project.watch.throughput.Throughput"}]
    chosen[-1]["init_args"] = {"every_n_steps": 5}
    words = (*FIT, f"--trainer.callbacks={json.dumps(chosen)}", "--run=it", "--trainer.max_epochs=5")
    running = [launch(host, tmp_path, *words, nodes=2) for host in hosts[:2]]
    assert [process.wait(LONG) for process in running] == [0, 0], printed(tmp_path)
    assert re.search(r"Rank 1, h2, is slow.* because of its compute", (tmp_path / "h1.txt").read_text()), printed(tmp_path)
    run = Run(0, "", tmp_path)
    fast, slow = (run.curve(f"ranks/compute_ms/{name}") for name in ("0.h1", "1.h2"))
    assert fast.keys() == slow.keys()
    assert all(slow[number] > fast[number] for number in slow)
    assert min(slow.values()) > 20 * 3  # micro-batches in a step of a rank
    report = (tmp_path / "lightning_logs/it/report.html").read_text()
    assert "rank 1, h2" in report
    assert "Rank 1, h2, is slow" in report


@pytest.mark.faults
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_clocks_that_are_wrong_and_jump(alone, hosts, tmp_path, nodes):
    """h2 is an hour ahead from the start; in mid-run it falls two hours behind, and h1, which has the store, jumps ahead."""
    clocks = [Clock(tmp_path / "clock-1"), Clock(tmp_path / "clock-2", 3600)]
    patience = {"RDZV_CONF": "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3", "JOIN_TIMEOUT": "60"}
    running = [
        launch(host, tmp_path, *FIT, slowly(0.05, crawl_from=25), nodes=nodes, **patience, **clock.env)
        for host, clock in zip(hosts[:2], clocks, strict=True)
    ]
    for clock, at, seconds in ((clocks[1], 10, -7200), (clocks[0], 22, 5400)):
        wait_until(lambda at=at: step(tmp_path) >= at, LONG, lambda: printed(tmp_path))
        clock.jump(seconds)
    wait_until(lambda: step(tmp_path) >= 26, LONG, lambda: printed(tmp_path))
    (tmp_path / "hurry").touch()
    assert [process.wait(LONG) for process in running] == [0, 0], printed(tmp_path)
    assert "Resumes from" not in printed(tmp_path)  # nobody was taken for dead
    assert "2 hosts x 1 process" in printed(tmp_path)
    assert_same_curve(tmp_path, alone)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.faults)], ids=["with the store", "without the store"])
def test_a_killed_agent_takes_its_workers_along_and_the_others_end(hosts, tmp_path, victim):
    """SIGKILL, which it can't pass on: its workers end by themselves, and the other host does not wait for them."""
    running = [launch(host, tmp_path, *FIT, slowly(0.1), "--trainer.max_epochs=1000", nodes=2) for host in hosts[:2]]
    wait_until(lambda: step(tmp_path) >= 3, LONG, lambda: printed(tmp_path))
    agent = running[victim].pid  # launch.sh has become torchrun
    assert descendants(agent)
    os.kill(agent, signal.SIGKILL)
    struck = time.monotonic()
    wait_until(lambda: not hosts[victim].pids(), 10, lambda: f"{hosts[victim].pids()} are left\n{printed(tmp_path)}")
    took("a torchrun agent is killed: its worker has ended after", time.monotonic() - struck)
    wait_until(lambda: not hosts[1 - victim].pids(), 30, lambda: f"{hosts[1 - victim].pids()} are left\n{printed(tmp_path)}")
    took("and the other host's torchrun, too, after", time.monotonic() - struck)
    assert all(process.wait() not in (0, None) for process in running)
    text = (tmp_path / f"h{2 - victim}.txt").read_text()
    assert f"lost another rank: torchrun's agent on h{victim + 1} was killed, and its ranks with it." in text, printed(tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 1], ids=["with the store", "without the store"])
def test_a_stopped_agent_is_named_and_holds_nobody_up(hosts, tmp_path, victim):
    """SIGSTOP, as by Ctrl-Z, and nobody continues it."""
    running = [launch(host, tmp_path, *FIT, slowly(0.3), nodes=2) for host in hosts[:2]]
    wait_until(lambda: step(tmp_path) >= 3, LONG, lambda: printed(tmp_path))
    agent = running[victim].pid
    os.kill(agent, signal.SIGSTOP)
    name = f"torchrun on h{victim + 1} (process {agent}) is stopped"
    wait_until(lambda: f"{name} (Ctrl-Z, SIGSTOP)" in printed(tmp_path), 30, lambda: printed(tmp_path))
    (tmp_path / "hurry").touch()
    saved = tmp_path / "lightning_logs/ddp-it/checkpoints" / f"step-{STEPS:09}.ckpt"
    wait_until(saved.exists, LONG, lambda: printed(tmp_path))
    finished = time.monotonic()
    assert [process.wait(60) for process in running] == [0, 0], printed(tmp_path)
    took("an agent is stopped, and the training is over: both torchruns have ended after", time.monotonic() - finished)
    assert f"{name}, and the other hosts would wait for it: it is continued" in printed(tmp_path)


@pytest.mark.faults
def test_packets_begin_to_get_lost_in_mid_training(hosts, tmp_path):
    """Those over 600 bytes, on their way to h2: all wait, and no agent waits for ever."""
    hosts.unbundle()
    words = (*FIT, slowly(0.05), "--trainer.max_epochs=1000", "--watchdog.at_least=5")
    running = [launch(host, tmp_path, *words, nodes=2) for host in hosts[:2]]
    wait_until(lambda: step(tmp_path) >= 5, LONG, lambda: printed(tmp_path))
    hosts[1].swallow(600)
    struck = time.monotonic()
    assert all(process.wait(120) for process in running)
    took("packets over 600 bytes get lost in training: both torchruns have ended after", time.monotonic() - struck)
    for host in ("h1", "h2"):
        text = (tmp_path / f"{host}.txt").read_text()
        assert "Packets of 1,500 bytes get lost between h1 and h2, and short ones do not" in text
        assert "the MTU is wrong" in text


@pytest.mark.faults
def test_a_rank_that_is_killed_for_memory_is_named_on_the_other_hosts(hosts, tmp_path, cgroup):
    """Rank 1 of three, on h2, which is given less memory than it needs."""
    broken = ("train=tests.probes.Faulty", "train.on=1", "train.how=hog", "val=tests.probes.Faulty")
    words = [f"--data.source.{setting}" for setting in broken] + ["--data.source.num_classes=10", "--data.num_workers=0"]
    words += ["--trainer.callbacks=tests.probes.Cramped", "--trainer.callbacks.rank=1"]
    fit = [argument for argument in FIT if "init_args" not in argument or "network" in argument]
    fit.insert(2, "--data.source=project.data.Datasets")
    running = [launch(host, tmp_path, *fit, *words, nodes=3) for host in hosts]
    assert all(process.wait(LONG) != 0 for process in running)
    took("a rank is killed for memory: torchrun has ended on three hosts after", since_struck(tmp_path))
    for host in hosts:
        text = (tmp_path / f"{host.name}.txt").read_text()
        assert "rank 1 on h2 was killed by signal 9, and its cgroup reports an OOM kill (seen last: " in text, printed(tmp_path)
