"""Starts the warden of this rank (warden.py) and sends it messages."""

import json
import subprocess
import sys
from contextlib import suppress

from project.launch.orphans import describe_launcher
from project.survive.hang import warden
from project.survive.hang.heartbeats import Member


class WardenProcess:
    """Represents the warden, a child process. Does nothing where it could not be started or has ended."""

    def __init__(self, member: Member) -> None:
        arguments = [
            str(member.pid),
            member.started,
            member.dump,
            f"rank {member.rank} on {member.host}",
            describe_launcher(member.host),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(OSError):
            self._process = subprocess.Popen([sys.executable, "-I", "-S", warden.__file__, *arguments], stdin=subprocess.PIPE)

    def _write_line(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def send(self, **facts: object) -> None:
        """Sends facts that the warden needs to report or record the end of this rank, such as the path of a file."""
        self._write_line(json.dumps(facts))

    def allow_silence(self, seconds: float) -> None:
        """Restarts the countdown after which the warden kills this rank."""
        self._write_line(f"{seconds:g}")

    def announce_exit(self) -> None:
        """Announces that this process is about to exit and reports the reason itself."""
        self._write_line("end")

    def stop(self, seconds: float) -> None:
        """Ends the warden, and waits for that. This process continues without it."""
        self.announce_exit()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired, OSError):
                self._process.communicate(timeout=seconds)
