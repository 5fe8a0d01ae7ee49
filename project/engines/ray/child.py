"""The unchanged command as a child process: its words are passed on, it is signalled, and it ends with its parent."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

_PIECE = 1 << 16


class Child:
    """python -m project, with these words.

    Args:
        words: the command line, from the verb on.
        environment: all of it.
        cwd: the folder to run in.
        say: called with 1 or 2 (as of file descriptors) and what it has printed there.
    """

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], cwd: Path, say: Callable[[int, bytes], None]
    ) -> None:
        self.ended = threading.Event()
        """It has ended, and all that it has said has been passed on."""
        # Ray blocks SIGINT in all its processes, and a child inherits that.
        before = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "project", *words], env=dict(environment), cwd=cwd,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C comes by way of the driver, and once
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        pipes = (self._process.stdout, 1), (self._process.stderr, 2)
        self._readers = [threading.Thread(target=self._read, args=(pipe, number, say), daemon=True) for pipe, number in pipes]
        for reader in (*self._readers, threading.Thread(target=self._wait, daemon=True)):
            reader.start()

    @staticmethod
    def _read(pipe: IO[bytes] | None, number: int, say: Callable[[int, bytes], None]) -> None:
        assert pipe is not None
        held = b""
        while piece := os.read(pipe.fileno(), _PIECE):
            whole, newline, rest = (held + piece).rpartition(b"\n")  # lines of several ranks are not mixed
            if newline:
                say(number, whole + newline)
            held = rest
        if held:
            say(number, held + b"\n")

    def signal(self, number: int) -> None:
        """To this process and no other: the ranks stop together."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _wait(self) -> None:
        self._process.wait()
        for reader in self._readers:
            reader.join(timeout=5)  # a grandchild may hold the pipe
        self.ended.set()

    def wait(self) -> int:
        """Its exit code; all that it has said has been passed on."""
        self.ended.wait()
        return self._process.wait()
