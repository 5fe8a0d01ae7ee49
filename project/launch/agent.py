"""torchrun's agent, the parent of this process, may have been stopped: Ctrl-Z stops it and not the ranks.

It passes on no signals then, and when the training is over all hosts' agents wait for it, without a word, for many minutes.
"""

import atexit
import logging
import os
import signal
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from project.cluster.place import host
from project.launch.launcher import detect
from project.launch.orphans import launcher_pid

log = logging.getLogger(__name__)

_LONG = 5.0  # seconds: who stops it for a moment knows that


def _stopped(pid: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


class Agent:
    """The agent, as the first rank of a host sees it."""

    def __init__(self) -> None:
        first = detect().kind == "torchrun" and os.environ.get("LOCAL_RANK") == "0"
        self._pid = launcher_pid() if first else None
        self._since: float | None = None
        self._told = False
        if first:
            atexit.register(self.wake)

    @property
    def _name(self) -> str:
        return f"torchrun on {host()} (process {self._pid})"

    def look(self) -> None:
        """Says it once if the agent is stopped. Called now and then."""
        if self._pid is None or not _stopped(self._pid):
            self._since = None
            return
        self._since = self._since or time.monotonic()
        if not self._told and time.monotonic() - self._since > _LONG:
            self._told = True
            log.warning(
                "%s is stopped (Ctrl-Z, SIGSTOP). Training continues, but signals don't reach it. HINT: kill -CONT %d",
                *(self._name, self._pid),
            )

    def wake(self) -> None:
        """When this rank ends, its agent must see it."""
        if self._pid is not None and launcher_pid() == self._pid and _stopped(self._pid):
            log.warning("%s is stopped, and the other hosts would wait for it: it is continued.", self._name)
            with suppress(OSError):
                os.kill(self._pid, signal.SIGCONT)


@cache
def agent() -> Agent:
    """This process's."""
    return Agent()
