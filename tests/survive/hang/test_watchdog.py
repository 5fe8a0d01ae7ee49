"""Ranks that stop, wait for ever or are cut off: the run ends within its deadline, and says which rank and where."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from project.cluster.processes import start_time
from project.errors import TRY_AGAIN
from project.survive.hang import stacks, warden
from project.watch.history import read_history
from tests.cluster.machine import descendants, wait_until
from tests.conftest import environment, since_struck, took
from tests.survive.test_failure import BROKEN
from tests.survive.test_resume import FIT

pytestmark = pytest.mark.slow

HOST = socket.gethostname()
DEADLINE = 5.0


@dataclass
class Ended:
    """A run that has ended: how, what it said, how long that took from the fault on, and who is left."""

    code: int
    output: str
    folder: Path
    seconds: float
    left: list[int]

    def file(self, rank: int) -> str:
        return (self.folder / f"lightning_logs/hang/hang-rank{rank}.txt").read_text()


def members(folder: Path) -> list[int]:
    """The living processes of a run: torchrun puts each in a session of its own, but they share a working directory."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            directory, state = os.readlink(process / "cwd"), (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if directory == str(folder) and state not in "ZX":
            pids.append(int(process.name))
    return pids


def run(folder: Path, *words: str, torchrun: bool = False, watch: Any = None, ranks: int = 2) -> Ended:
    """`watch(process)` is called when the training has begun."""
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if torchrun else []
    words = (*words, f"--trainer.devices={ranks}", "--run=hang")
    output = folder / "output.txt"
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "project", *(["--"] if torchrun else []), *words],
        cwd=folder, env=environment(), stdout=output.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 240
        while "global batch" not in output.read_text() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        began = time.monotonic()
        if watch:
            watch(process)
        code = process.wait(180)
        seconds = since_struck(folder) if (folder / "struck").exists() else time.monotonic() - began
        end = time.monotonic() + 30  # what a rank has started may notice a moment later that it is gone; a report is written
        while (left := members(folder)) and time.monotonic() < end:
            time.sleep(0.05)
        return Ended(code, output.read_text(), folder, seconds, left)
    finally:
        for pid in members(folder):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def stuck(*extra_callbacks: dict[str, Any], **how: Any) -> tuple[str, ...]:
    callbacks = [{"class_path": "tests.probes.Stuck", "init_args": how}, *extra_callbacks]
    return (*FIT, f"--watchdog.at_least={DEADLINE}", "--trainer.callbacks=" + json.dumps(callbacks))


def wardens(pid: int) -> list[int]:
    return [child for child in descendants(pid) if warden.__name__ in Path(f"/proc/{child}/cmdline").read_text()]


def pause_rank_1(process: "subprocess.Popen[bytes]") -> None:
    """Stops it for half the deadline, in the middle of the training; nobody has anything to say, though all are watched."""
    child, *_ = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    wait_until(lambda: len(wardens(process.pid)) == 2, 60, "a warden beside each rank")
    os.kill(int(child), signal.SIGSTOP)
    time.sleep(DEADLINE / 2)  # this is what is tested
    os.kill(int(child), signal.SIGCONT)
    Path(f"/proc/{process.pid}/cwd/hurry").touch()


CRAWLS = {"class_path": "tests.probes.Ledger", "init_args": {"pause": 0.5}}
"""Until it is told to hurry: wardens start late, and the run must not be over before they are there."""


LOADER = (
    *(
        "--data.source.train.init_args.on=1",
        "--data.source.train.init_args.how=wait",
        "--data.source.train.init_args.at=253",
        "--data.num_workers=1",
    ),
    f"--watchdog.at_least={DEADLINE}",
)
RUNS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "stopped": (stuck(signal=int(signal.SIGSTOP)), {}),
    "stopped rank 0": (stuck(rank=0, signal=int(signal.SIGSTOP)), {"torchrun": True}),
    "loader": ((*BROKEN, *LOADER), {}),
    "collective": (stuck(where="collective", step=4), {"torchrun": True}),
    "validation": (stuck(where="validation", step=5), {}),
    "backward": ((*stuck(where="backward", step=4), "--data.global_batch_size=24", "--data.batch_size=8"), {"ranks": 3}),
    "paused": (stuck(CRAWLS, step=-1), {"watch": pause_rank_1}),
}


RARE = ("stopped rank 0", "collective", "validation")
"""Left to --faults: the others hang in the same ways."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """Starts all of them, two at a time: they wait most of their time."""
    folder = tmp_path_factory.mktemp("hangs")
    pool = ThreadPoolExecutor(2)
    chosen = {name: run for name, run in RUNS.items() if name not in RARE or request.config.getoption("--faults")}
    yield {name: pool.submit(run, folder / name, *words, **how) for name, (words, how) in chosen.items()}
    pool.shutdown(cancel_futures=True)


Runs = dict[str, "Future[Ended]"]


def assert_named(ended: Ended, rank: int, phase: str, function: str, code: int = TRY_AGAIN) -> None:
    """One message that names the rank, its host, since when, the phase and the function; the ranks' files; nobody left."""
    assert ended.code == code, ended.output
    assert ended.output.count("The run hangs: ") == 1
    (message,) = re.findall(r"ERROR .*The run hangs: .*(?:\n.*)*?exit code 75", ended.output)
    assert f"The run hangs: rank {rank} on {HOST} " in message
    assert phase in message
    assert function in message
    for number in range(2):
        text = ended.file(number)
        assert f"rank {rank} on {HOST} " in text
        assert "File " in text
    assert function in ended.file(rank)
    took(f"{ended.folder.name}: all have ended after", ended.seconds)
    assert ended.seconds < DEADLINE + 15
    assert ended.left == []


def test_a_rank_that_is_stopped(runs: Runs) -> None:
    ended = runs["stopped"].result()
    assert_named(ended, 1, "is silent for", "in sit_and_wait")
    assert "Waiting for it: rank 0" in ended.output
    folder = ended.folder / "lightning_logs/hang"
    (life,) = read_history(folder, "hang").lives
    assert life.state == "failed"
    assert (life.why or "").startswith(f"The run hangs: rank 1 on {HOST} is silent for ")
    assert json.loads((folder / "life.jsonl").read_text().splitlines()[-1])["kind"] == "hang"
    assert "The run hangs: rank 1" in (folder / "report.html").read_text()


@pytest.mark.faults
def test_rank_0_is_stopped_under_torchrun(runs: Runs) -> None:
    assert_named(runs["stopped rank 0"].result(), 0, "is silent for", "in sit_and_wait", code=1)


def test_a_loader_that_waits_for_ever(runs: Runs) -> None:
    ended = runs["loader"].result()
    assert_named(ended, 1, "data", "in __getitem__")
    assert "Loader process" in ended.output


@pytest.mark.faults
def test_a_collective_that_the_others_do_not_take_part_in(runs: Runs) -> None:
    ended = runs["collective"].result()
    assert_named(ended, 1, "Its collectives under way: ", "in barrier", code=1)
    assert "gloo:barrier" in ended.output


@pytest.mark.faults
def test_a_validation_that_hangs(runs: Runs) -> None:
    assert_named(runs["validation"].result(), 1, "validation, after step 5", "in sit_and_wait")


def test_a_rank_within_the_pass_in_which_the_others_wait_for_it(runs: Runs) -> None:
    """All main threads are in the backward pass, and no frame tells them apart: torch's flight recorder does."""
    ended = runs["backward"].result()
    assert_named(ended, 1, "backward and gradient sync, after step 4", "in sit_and_wait")
    assert "ranks wait for each other" not in ended.output
    assert f"Waiting for it: rank 0 on {HOST} and 1 more in: backward and gradient sync" in ended.output


def test_a_rank_that_is_stopped_for_a_while(runs: Runs) -> None:
    ended = runs["paused"].result()
    assert ended.code == 0, ended.output
    assert "The run hangs" not in ended.output
    assert not list(ended.folder.glob("lightning_logs/*/hang-*"))
    assert ended.seconds > DEADLINE / 2


def test_a_warden_ends_a_rank_that_can_not_end_itself(tmp_path: Path) -> None:
    """No thread of Python's can run: its lock is held."""
    rank = subprocess.Popen(
        [sys.executable, "-c", "import ctypes, os; from project.survive.hang.stacks import open_dump\n"
         "file, path = open_dump()\nprint(path, flush=True)\n"
         "def sit_and_wait():\n while True: ctypes.PyDLL(None).pause()\nsit_and_wait()"],
        env=environment(), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert rank.stdout is not None
    facts = [str(rank.pid), start_time(rank.pid), rank.stdout.readline().strip(), "rank 3 on h2", "0"]
    with subprocess.Popen([*warden.COMMAND, *facts], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as beside:
        assert beside.stdin is not None
        beside.stdin.write(json.dumps({"file": str(tmp_path / "hang.txt"), "allowed": 1}).encode() + b"\n")
        beside.stdin.flush()
        assert rank.wait(20) == -signal.SIGKILL
        assert beside.stderr is not None
        assert b"rank 3 on h2 shows no sign of life" in beside.stderr.read()
    assert "in sit_and_wait" in (tmp_path / "hang.txt").read_text()


class TwoHosts:
    """h1 and h2: network namespaces with a hostname and a hosts file of their own, joined by a bridge."""

    def __init__(self, folder: Path) -> None:
        self.prefix, self.hosts_file = f"pw{os.getpid()}-", folder / "hosts"
        self.hosts_file.write_text("127.0.0.1 localhost\n10.77.0.1 h1\n10.77.0.2 h2\n")

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def __enter__(self) -> "TwoHosts":
        switch = f"{self.prefix}sw"
        self.ip("netns", "add", switch)
        self.ip("-n", switch, "link", "add", "br0", "type", "bridge")
        self.ip("-n", switch, "link", "set", "br0", "up")
        for i in (1, 2):
            host = f"{self.prefix}h{i}"
            self.ip("netns", "add", host)
            self.ip("-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{i}", "netns", switch)
            self.ip("-n", switch, "link", "set", f"p{i}", "master", "br0", "up")
            self.ip("-n", host, "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                self.ip("-n", host, "link", "set", link, "up")
        return self

    def start(self, i: int, words: list[str], folder: Path) -> "subprocess.Popen[bytes]":
        become = f'hostname h{i}; mount --bind {self.hosts_file} /etc/hosts; exec "$@"'
        enter = ["nsenter", f"--net=/run/netns/{self.prefix}h{i}", "unshare", "--mount", "--uts", "sh", "-c", become, "sh"]
        output = (folder / f"output-{i}.txt").open("w")
        env = environment(GLOO_SOCKET_IFNAME="eth0", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        return subprocess.Popen([*enter, *words], cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT)

    def cut(self, i: int) -> None:
        self.ip("-n", f"{self.prefix}sw", "link", "set", f"p{i}", "down")

    def __exit__(self, *_: object) -> None:
        for name in ("h1", "h2", "sw"):
            pids = subprocess.run(["ip", "netns", "pids", self.prefix + name], capture_output=True, text=True).stdout
            for pid in pids.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", self.prefix + name], capture_output=True)


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and iproute2")
def test_a_host_whose_link_is_cut(tmp_path: Path, record_property: Any) -> None:
    """Both sides end, torchrun too, and each names the other."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=hang"]
    words += ["--rdzv-backend=c10d", "--rdzv-endpoint=h1:29400", "-m", "project", "--", *stuck(step=-1), "--run=hang"]
    words += ["--trainer.max_epochs=100000"]
    with TwoHosts(tmp_path) as hosts:
        agents = [hosts.start(i, words, tmp_path) for i in (1, 2)]
        end = time.monotonic() + 240
        while not any("epoch 1" in file.read_text() for file in tmp_path.glob("output-*.txt")):
            assert time.monotonic() < end, [file.read_text() for file in tmp_path.glob("output-*.txt")]
            time.sleep(0.05)
        hosts.cut(2)
        cut = time.monotonic()
        codes, ended = [], []
        for agent in agents:
            codes.append(agent.wait(240))
            ended.append(time.monotonic() - cut)
        end = time.monotonic() + 30
        while members(tmp_path) and time.monotonic() < end:
            time.sleep(0.05)
        assert members(tmp_path) == []
    for name, seconds in zip(("the host that is left", "the one that is cut off"), ended, strict=True):
        took(f"a link is cut: torchrun on {name} has ended after", seconds)
    assert all(codes)
    assert max(ended) < DEADLINE + 35
    outputs = [(tmp_path / f"output-{i}.txt").read_text() for i in (1, 2)]
    assert sorted(re.findall(r"The run hangs: rank \d on (h\d) is silent", "".join(outputs))) == ["h1", "h2"]
    assert "on h2 is silent" in outputs[0]
    assert "on h1 is silent" in outputs[1]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("site-packages/project/checkpoints/callback.py", True),
        ("site-packages/lightning/pytorch/callbacks/model_checkpoint.py", True),
        ("site-packages/torch/distributed/checkpoint/state_dict_saver.py", True),
        ("site-packages/torch/utils/checkpoint.py", False),  # computes activations again
        ("site-packages/torch/nn/modules/linear.py", False),
    ],
)
def test_who_waits_for_a_checkpoint_has_longer(file, expected):
    names: dict[str, Any] = {}
    exec(compile("import sys\ndef frames(): return [sys._getframe()]", file, "exec"), names)
    assert stacks.in_checkpoint(names["frames"]()) is expected
