"""This rank's warden (warden.py), as the rank itself sees it."""

import json
import subprocess
import sys
from contextlib import suppress
from typing import Any

from project.survive.hang import warden
from project.survive.hang.heartbeats import Member
from project.survive.orphans import launched_by


class Beside:
    """Starts it, and tells it things. One that could not be started, or has gone, is none."""

    def __init__(self, me: Member) -> None:
        words = [str(me.pid), me.started, me.dump, f"rank {me.rank} on {me.host}", launched_by(me.host)]
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(OSError):
            self._process = subprocess.Popen([sys.executable, "-I", "-S", warden.__file__, *words], stdin=subprocess.PIPE)

    def _say(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def tell(self, **facts: Any) -> None:
        self._say(json.dumps(facts))

    def allow(self, seconds: float) -> None:
        """Sets how long it may hear nothing."""
        self._say(f"{seconds:g}")

    def ends(self) -> None:
        """This process is about to end, and says why itself."""
        self._say("end")

    def dismiss(self, seconds: float) -> None:
        """This process goes on without it."""
        self.ends()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired, OSError):
                self._process.communicate(timeout=seconds)
