"""A supervisor starts `python -m project` on a host, passes signals on, and hands over what it prints and how it ends."""

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import ray.util

from project.cluster.cores import cores
from project.launch.early_start import free_port

_TURN = 0.5  # seconds that `poll` waits for output
_PIECE = 1 << 16


class Place(NamedTuple):
    """A place of a rank: the host's name and address, a free port, and the GPUs of the actor."""

    host: str
    address: str
    port: int
    gpus: str


class Supervisor:
    """An actor of Ray's above a rank. Ray runs its methods one after the other, in one thread: when Ray ends the actor, the
    kernel kills the rank (launch/orphans.py).
    """

    def place(self) -> Place:
        """Returns where this actor is."""
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return Place(socket.gethostname(), ray.util.get_node_ip_address(), free_port(), gpus)

    def start(self, words: Sequence[str], environment: Mapping[str, str], ranks: int, cwd: str, is_checked: bool) -> None:
        """Starts the process, which first checks the host if `is_checked`, with this on top of the actor's environment; `ranks`
        share the host.
        """
        check = ("-m", "project.doctor.joining", str(ranks)) if is_checked else ()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)  # Ray starts its workers at nice 15 unless RAY_worker_niceness says otherwise
        before = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT, and a child inherits that
        try:
            self._process = subprocess.Popen(
                [sys.executable, *check, "-m", "project", *words], cwd=cwd, stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": str(cores(ranks)), **environment},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C comes by way of the driver, and once
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._unfinished = {1: b"", 2: b""}
        self._pipes = selectors.DefaultSelector()
        for number, pipe in ((1, self._process.stdout), (2, self._process.stderr)):
            assert pipe is not None
            self._pipes.register(pipe, selectors.EVENT_READ, number)

    def poll(self, signals: Iterable[int] = ()) -> tuple[list[tuple[int, bytes]], int | None]:
        """Passes signals on; returns new lines, each with its file descriptor, and the exit code once all lines are read."""
        for number in signals:
            self._process.send_signal(number)  # to this process and no other: the ranks stop together
        code, lines = self._process.poll(), []
        events = self._pipes.select(_TURN if code is None else 0)
        for key, _ in events:
            piece = os.read(key.fd, _PIECE)
            if not piece:
                self._pipes.unregister(key.fileobj)
                piece = b"\n" if self._unfinished[key.data] else b""
            whole, newline, self._unfinished[key.data] = (self._unfinished[key.data] + piece).rpartition(b"\n")
            if newline:
                lines.append((key.data, whole + newline))
        return lines, None if events else code
