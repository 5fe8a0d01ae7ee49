"""A Ray cluster on hosts of its own: a raylet on each, the head on h1, all with the same token.

with RayHosts(2, folder) as ray:
    driver = ray.start("fit", *words, "--workers=2", cwd=tmp_path)
    ray.lose(1)                              # h2, its raylet and all that runs there
    ray.start_node(1)
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.machine import LONG, missing, wait_until
from tests.conftest import ROOT, environment

ADDRESS = "10.77.0.1:6390"
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_EAGER = """
import sys
from project.__main__ import main
from project.launch.ray import fit
fit._SHRINK, fit._EVERY = 5.0, 3
main()
"""


def need_ray() -> None:
    if find_spec("ray") is None:
        missing('Ray is not installed (pip install "samerun[ray]")')
    if " " in sys.prefix:
        pytest.skip("ray start --head (2.60) does not start from a path with a space")


class Driver:
    """python -m project ray ..., on h1."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process, self._log = process, log

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def code(self, seconds: float = LONG) -> int:
        """Its exit code; waits for it."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still going on: {self.output()}") from None

    def says(self, what: str, seconds: float = LONG, times: int = 1, after: str = "") -> None:
        """Waits for words in its output; `after`: those that were there then don't count."""
        times += after.count(what)
        wait_until(
            lambda: self.output().count(what) >= times or self.process.poll() is not None, seconds, lambda: what + self.output()
        )
        assert self.output().count(what) >= times, self.output()


class RayHosts:
    """h1, h2, ... with so many CPUs each. What needs a shared file system finds it: all hosts share this machine's."""

    def __init__(self, count: int, folder: Path, cpus: int = 2) -> None:
        need_ray()
        self.hosts, self._folder, self._cpus = Hosts(count, folder), folder, cpus
        # What Ray writes on h1. The paths of Unix sockets have a hundred characters.
        self.session = Path(tempfile.mkdtemp(prefix="ray-"))
        (folder / "token").write_text(secrets.token_hex(32))
        (folder / "token").chmod(0o600)
        self.environment = environment(
            RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(folder / "token"), RAY_worker_niceness="0", OMP_NUM_THREADS="1",
            RAY_USAGE_STATS_ENABLED="0", GLOO_SOCKET_IFNAME="eth0", HOME=str(folder),
            PYTHONPATH=f"{ROOT}:{ROOT}/tests/cluster/broken_disk",
        )  # fmt: skip

    def __enter__(self) -> "RayHosts":
        self.hosts.__enter__()
        try:
            self.start_node(0)
            self.joined(0)
            for index in range(1, len(self.hosts)):
                self.start_node(index)
            self.joined(*range(1, len(self.hosts)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.__exit__()
        shutil.rmtree(self.session, ignore_errors=True)

    def _output(self, index: int) -> str:
        return (self._folder / f"raylet-{index}.txt").read_text(errors="replace")

    def start_node(self, index: int) -> None:
        host = self.hosts[index]
        head = ("--head", "--port=6390", "--include-dashboard=false", f"--temp-dir={self.session}")
        place = head if index == 0 else (f"--address={ADDRESS}",)
        words = (*_RAY, "start", *place, f"--node-ip-address={host.address}", f"--num-cpus={self._cpus}", "--block")
        with (self._folder / f"raylet-{index}.txt").open("wb") as output:
            host.start((*words, "--object-store-memory=100000000"), output, self._folder, self.environment)

    def node(self, index: int) -> str:
        """What Ray calls a host: its raylet was told."""
        for pid in self.hosts[index].pids():
            with suppress(OSError):  # it has ended meanwhile
                for argument in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    if argument.startswith(b"--node_id="):
                        return argument.removeprefix(b"--node_id=").decode()
        raise AssertionError(f"no raylet on {self.hosts[index].name}")

    def joined(self, *started: int) -> None:
        """Waits until these hosts are in the cluster."""
        for index in started:
            wait_until(
                lambda index=index: "Ray runtime started" in self._output(index), LONG, lambda index=index: self._output(index)
            )

    def lose(self, index: int) -> None:
        """The raylet and all that runs there end at once."""
        self.hosts[index].kill()

    def restore(self) -> None:
        """All hosts are in the cluster again."""
        lost = [index for index, host in enumerate(self.hosts) if not host.pids()]
        for index in lost:
            self.start_node(index)
        self.joined(*lost)

    def drain(self, index: int, seconds: int) -> None:
        """What a cloud says of a host that it takes away in so many seconds."""
        words = ("drain-node", f"--address={ADDRESS}", f"--node-id={self.node(index)}", "--reason=DRAIN_NODE_REASON_PREEMPTION")
        command = (*_RAY, *words, "--reason-message=taken", f"--deadline-remaining-seconds={seconds}")
        process = self.hosts[0].start(command, subprocess.PIPE, self._folder, self.environment)
        assert process.wait(LONG) == 0, process.stdout.read().decode() if process.stdout else ""

    def start(
        self, *words: str, cwd: Path, index: int = 0, env: Mapping[str, str] | None = None, eager: bool = False
    ) -> Driver:
        """The driver of a run. An `eager` one takes fewer workers after 5 s, not 20, and looks for room each 3 s, not 30."""
        log = cwd / f"driver-{len(list(cwd.glob('driver-*.txt')))}.txt"
        program = ("-c", _EAGER) if eager else ("-m", "project")
        command = (sys.executable, *program, "ray", *words, f"--address={ADDRESS}")
        with log.open("wb") as output:
            return Driver(self.hosts[index].start(command, output, cwd, {**self.environment, **(env or {})}), log)

    def children(self, index: int) -> list[int]:
        """The trainings on a host: processes that were started with our command."""
        trainings = []
        for pid in self.hosts[index].pids():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                session = os.getsid(pid) == pid
            except OSError:
                continue
            if line[1:4] == [b"-m", b"project", b"fit"] and session:
                trainings.append(pid)
        return trainings
