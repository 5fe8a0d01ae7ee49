"""The doctor on hosts that are ill: what is wrong is named, with its host, in seconds."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.cluster.clock import Clock
from tests.cluster.machine import LONG, wait_until
from tests.cluster.training import FIT, assert_same_curve
from tests.conftest import TINY, environment, took

pytestmark = pytest.mark.slow

DOCTOR = ("doctor", "--config=configs/ddp.yaml", *TINY, "--data.batch_size=8", "--data.global_batch_size=48", "--run=it")
FAST = "--fast=true"


def start(host, folder, *words, nodes, master="h1", **extra):
    """`python -m project` on a host, as one of so many nodes with one process each."""
    number = int(host.name[1:]) - 1
    settings = environment(
        NODE_RANK=str(number), MASTER_ADDR=master, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", MASTER_PORT="29500"
    )
    program = [sys.executable, "-m", "project", *words, f"--trainer.num_nodes={nodes}", "--trainer.devices=1"]
    with (folder / f"{host.name}.txt").open("wb") as output:
        return host.start(program, output, folder, {**settings, **extra})


def results(running, folder, seconds=LONG):
    codes = [process.wait(seconds) for process in running]
    report = folder / "lightning_logs/it/doctor.json"
    findings = json.loads(report.read_text())["findings"] if report.exists() else []
    return codes, {finding["check"]: finding for finding in findings}


def on(hosts, folder, *words):
    """Starts it on all of these hosts; the exit codes and the doctor's findings."""
    return results([start(host, folder, *words, nodes=len(hosts)) for host in hosts], folder)


def another_torch(folder: Path) -> str:
    """A PYTHONPATH on which torch says that it is 2.0.9."""
    shim = folder / "shim"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text("import torch; torch.__version__ = '2.0.9'")
    return os.pathsep.join([str(shim), environment()["PYTHONPATH"]])


def log(folder: Path, host: str) -> str:
    return (folder / f"{host}.txt").read_text()


def test_other_versions_other_words_and_other_data_are_named(hosts, tmp_path):
    """h2 has another configuration and time; h3 another torch, other images, and another disk for the run's folder."""
    own, clock = tmp_path / "own", Clock(tmp_path / "clock", 3600)
    own.mkdir()
    (tmp_path / "lightning_logs").mkdir()
    for name, count in (("here", 8), ("there", 9)):
        for split in ("train", "val"):
            for label in range(2):
                folder = tmp_path / name / split / str(label)
                folder.mkdir(parents=True)
                for number in range(count):
                    Image.new("RGB", (8, 8), (number, label, 0)).save(folder / f"{number}.png")
    images = tmp_path / "images"
    images.mkdir()
    words = (
        *("doctor", "--config=configs/imagefolder.yaml", "--data.source.init_args.root=images", "--run=it", FAST),
        *("--data.source.init_args.image_size=8", "--model.network=project.model.MiniResNet", "--data.batch_size=2"),
        *("--data.global_batch_size=12", "--trainer.precision=32-true"),
    )
    path = another_torch(tmp_path)
    running = [
        start(hosts[0].seeing(tmp_path / "here", images), tmp_path, *words, nodes=3),
        start(hosts[1].seeing(tmp_path / "here", images), tmp_path, *words, "--trainer.max_epochs=7", nodes=3, **clock.env),
        start(
            hosts[2].seeing(tmp_path / "there", images).seeing(own, tmp_path / "lightning_logs"),
            *(tmp_path, *words), nodes=3, PYTHONPATH=path,
        ),
    ]  # fmt: skip
    codes, findings = results(running, tmp_path)
    assert codes == [1, 1, 1], log(tmp_path, "h1")
    assert "rank 1 on h2: trainer.max_epochs 7, elsewhere" in findings["versions"]["text"]
    assert "rank 2 on h3: torch 2.0.9, elsewhere" in findings["versions"]["text"]
    assert findings["versions"]["where"] == [{"rank": 1, "host": "h2"}, {"rank": 2, "host": "h3"}]
    assert findings["data"]["text"].startswith("rank 2 on h3: data 18 train")
    assert findings["data"]["where"] == [{"rank": 2, "host": "h3"}]
    assert findings["run's folder"]["text"].startswith("rank 2 on h3 can't see what rank 0 on h1 writes to the run's folder")
    assert findings["run's folder"]["where"] == [{"rank": 2, "host": "h3"}]
    assert re.search(r"rank 1 on h2: its clock is \+(3600|3599)\.\d s off", findings["clocks"]["text"])
    assert findings["clocks"]["verdict"] == "warning"
    assert "│ versions" in log(tmp_path, "h1")
    assert log(tmp_path, "h2") == log(tmp_path, "h3") == ""


def test_a_fit_of_ranks_that_differ_does_not_start(hosts, tmp_path):
    """h2 has another configuration, h3 another torch, and another disk for the run's folder."""
    words = ("fit", *DOCTOR[1:])
    (tmp_path / "own").mkdir()
    (tmp_path / "lightning_logs").mkdir()
    apart = hosts[2].seeing(tmp_path / "own", tmp_path / "lightning_logs")
    running = [
        start(hosts[0], tmp_path, *words, nodes=3),
        start(hosts[1], tmp_path, *words, "--trainer.max_epochs=7", nodes=3),
        start(apart, tmp_path, *words, nodes=3, PYTHONPATH=another_torch(tmp_path)),
    ]
    codes, _ = results(running, tmp_path)
    assert codes == [1, 1, 1], log(tmp_path, "h1")
    assert "rank 2 on h3 can't see what rank 0 on h1 writes to the run's folder" in log(tmp_path, "h1")
    assert "trainer.shared_folder=false" in log(tmp_path, "h1")
    assert not list((tmp_path / "lightning_logs/it").glob(".seen*"))
    assert "rank 1 on h2: trainer.max_epochs 7, elsewhere" in log(tmp_path, "h1")
    assert "rank 2 on h3: torch 2.0.9, elsewhere" in log(tmp_path, "h1")
    assert "HINT" in log(tmp_path, "h1")
    assert "global batch" not in log(tmp_path, "h1")
    assert log(tmp_path, "h2") == log(tmp_path, "h3") == ""


@pytest.mark.faults
def test_only_rank_0_has_the_folder(alone, hosts, tmp_path):
    """It is so configured, and the run is stopped: the other host gets the checkpoint to resume from by the network."""
    (tmp_path / "own").mkdir()
    (tmp_path / "lightning_logs").mkdir()
    apart = hosts[1].seeing(tmp_path / "own", tmp_path / "lightning_logs")
    stop = {"class_path": "tests.probes.Fault", "init_args": {"step": 25, "number": int(signal.SIGTERM)}}
    words = (*FIT, "--run=it", "--trainer.shared_folder=false", f"--trainer.callbacks={json.dumps([stop])}")
    for expected in (143, 0):
        assert on([hosts[0], apart], tmp_path, *words)[0] == [expected] * 2, log(tmp_path, "h1") + log(tmp_path, "h2")
    assert "Resumes from" in log(tmp_path, "h1")
    assert not list((tmp_path / "own").rglob("*.ckpt"))
    assert_same_curve(tmp_path, alone)


def test_rank_0_continues_on_another_host_where_the_run_has_a_copy(alone, hosts, tmp_path):
    """h1 is stopped; h2, which has a disk of its own and had no folder of the run, becomes rank 0's host."""
    (tmp_path / "lightning_logs").mkdir()
    (tmp_path / "disk/lightning_logs").mkdir(parents=True)
    apart = hosts[1].seeing(tmp_path / "disk/lightning_logs", tmp_path / "lightning_logs")
    stop = {"class_path": "tests.probes.Fault", "init_args": {"step": 25, "number": int(signal.SIGTERM)}}
    words = (*FIT, "--run=it", "--trainer.shared_folder=false", f"--checkpoints.copy_to={tmp_path / 'store'}")
    words = (*words, f"--trainer.callbacks={json.dumps([stop])}")
    for master, ranks, code in (("h1", ("0", "1"), 143), ("h2", ("1", "0"), 0)):
        places = zip((hosts[0], apart), ranks, strict=True)
        running = [start(host, tmp_path, *words, nodes=2, master=master, NODE_RANK=rank) for host, rank in places]
        assert results(running, tmp_path)[0] == [code] * 2, log(tmp_path, "h1") + log(tmp_path, "h2")
    assert "Brings the run from" in log(tmp_path, "h2")
    assert_same_curve(tmp_path / "disk", alone)


@pytest.mark.faults
@pytest.mark.timed
def test_a_slow_link_and_the_way_around_a_name(hosts, tmp_path):
    """h3's link is shaped; the hosts' own names lead to 127.0.1.1, as Debian has it."""
    hosts[2].slow("100mbit")
    codes, findings = on([host.named_by_debian() for host in hosts], tmp_path, *DOCTOR)
    assert codes == [0, 0, 0], log(tmp_path, "h1")
    assert findings["links"]["verdict"] == "warning"
    assert "h3: every link of this host is slow" in findings["links"]["text"]
    assert findings["links"]["where"] == [{"rank": 2, "host": "h3"}]
    assert "h1 by eth0 (10.77.0.1), though its own name says 127.0.1.1" in findings["network"]["text"]


@pytest.mark.faults
@pytest.mark.timed
def test_a_slow_rank(hosts, tmp_path):
    """h2 gets a fifth of the time."""
    running = [start(host, tmp_path, *DOCTOR, nodes=2) for host in hosts[:2]]
    over = threading.Event()

    def throttle() -> None:
        while not over.is_set() and running[1].poll() is None:
            for number, seconds in ((signal.SIGSTOP, 0.08), (signal.SIGCONT, 0.02)):
                running[1].send_signal(number)
                over.wait(seconds)

    # From the moment on at which the two have met.
    wait_until(lambda: "Run:" in log(tmp_path, "h1"), 60, lambda: log(tmp_path, "h1"))
    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        codes, findings = results(running, tmp_path)
    finally:
        over.set()
        thread.join()
    assert codes == [0, 0], log(tmp_path, "h1")
    assert findings["compute"]["where"] == [{"rank": 1, "host": "h2"}]
    assert "rank 1 on h2: " in findings["compute"]["text"]


@pytest.mark.faults
def test_who_is_missing_and_who_is_cut_off(hosts, tmp_path):
    """h2 never comes; what h3 sends to the master port is dropped."""
    hosts[0].drop(29500)
    waiting = (FAST, "--join_timeout=5")
    running = [start(host, tmp_path, *DOCTOR, *waiting, nodes=3) for host in (hosts[0], hosts[2])]
    codes, findings = results(running, tmp_path)
    assert codes == [1, 1]
    assert "1 of 3 ranks have come to h1:29500, from h1. Missing: rank 1, rank 2." in findings["ranks"]["text"]
    assert "h3 can't reach rank 0 at h1:29500 (10.77.0.1)" in " ".join(log(tmp_path, "h3").split())
    assert "no answer" in log(tmp_path, "h3")


def test_a_firewall_between_two_hosts(hosts, tmp_path):
    """The master port is open, and the ports on which the ranks talk are not."""
    hosts[1].close("1024-65535")
    codes, findings = on(hosts[:2], tmp_path, *DOCTOR, FAST)
    assert codes == [1, 1]
    assert findings["ranks"]["text"] == "h1 can't reach h2 at 10.77.0.2: no answer."


@pytest.mark.faults
@pytest.mark.parametrize(
    ("deaf", "way"),
    [(0, "from h2 don't arrive at h1"), (1, "from h1 don't arrive at h2")],
)
def test_packets_that_are_too_long_for_the_way(hosts, tmp_path, deaf, way):
    """A tunnel with a wrong MTU: the hosts meet, and whatever is long gets lost. Both hosts say so."""
    hosts.unbundle()
    hosts[deaf].swallow(600)
    words = (*DOCTOR, FAST) if deaf == 0 else ("fit", *DOCTOR[1:])
    began = time.monotonic()
    codes, findings = on(hosts[:2], tmp_path, *words)
    took("packets over 600 bytes get lost: both have ended after", time.monotonic() - began)
    assert codes == [1, 1]
    for host in ("h1", "h2"):
        assert f"Packets over 600 bytes {way}" in re.sub(r"[\s│]+", " ", log(tmp_path, host))
        assert "MTU" in log(tmp_path, host)
    assert ("ranks" in findings) == (deaf == 0)


@pytest.mark.faults
def test_packets_that_are_too_long_between_two_others(hosts, tmp_path):
    """Rank 0 hears both of them."""
    hosts.unbundle()
    hosts[2].swallow(1000, hosts[1])
    codes, _ = on(hosts, tmp_path, "fit", *DOCTOR[1:])
    assert codes == [1, 1, 1]
    assert "Packets over 1000 bytes from h2 don't arrive at h3" in log(tmp_path, "h1")


@pytest.mark.faults
def test_a_fit_with_the_wrong_master_address_names_who_is_lost(hosts, tmp_path):
    words = ("fit", *DOCTOR[1:], "--trainer.join_timeout=5")
    running = [start(hosts[0], tmp_path, *words, nodes=2), start(hosts[1], tmp_path, *words, nodes=2, master="10.77.0.3")]
    codes, _ = results(running, tmp_path)
    assert codes == [1, 1]
    assert "Missing: rank 1." in log(tmp_path, "h1")
    assert "h2 can't reach rank 0 at 10.77.0.3:29500" in log(tmp_path, "h2")
    assert "Traceback" not in log(tmp_path, "h1") + log(tmp_path, "h2")


def test_a_disk_that_is_too_small(tmp_path, cli):
    folder = tmp_path / "lightning_logs"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder]).returncode:
        pytest.skip("this test mounts a small disk, which takes root")
    try:
        run = cli("doctor", "--config=configs/ddp.yaml", "--data.source.init_args.train_size=256", FAST, "--run=it")
        _, findings = results([], tmp_path)
    finally:
        subprocess.run(["umount", folder], check=True)
    assert run.code == 1, run.output
    assert findings["limits"]["verdict"] == "bad"
    assert "of disk are left for" in findings["limits"]["text"]


def test_a_damaged_checkpoint_is_found_when_the_hosts_have_met(hosts, tmp_path, quick):
    """Rank 0 of several hosts reads it beside the start: a slow disk must not keep it from the rendezvous."""
    words = ("fit", "--config=configs/ddp.yaml", *TINY, "--data.batch_size=16", "--data.global_batch_size=32", "--run=it")
    words = (*words, "--checkpoints.every_n_steps=2")
    quick(*words, "--trainer.max_steps=4", "--trainer.devices=1")
    newest = sorted((tmp_path / "lightning_logs/it/checkpoints").glob("*.ckpt"))[-1]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    call = (hosts[:2], tmp_path, *words, "--trainer.max_steps=6")
    assert on(*call)[0] == [75, 75], log(tmp_path, "h1")
    assert "another checksum than its manifest says. It is set aside" in log(tmp_path, "h1")
    assert on(*call)[0] == [0, 0], log(tmp_path, "h1")
    assert "step-000000002.ckpt" in log(tmp_path, "h1")
