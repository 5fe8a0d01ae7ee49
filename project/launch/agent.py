"""torchrun's agent, as the warden of a rank sees it, which outlives the rank. Standard library only.

Ctrl-Z stops the agent and not the ranks: it passes on no signals then, and when the training is over all hosts' agents wait for
it, without a word, for many minutes. One that is cut off from its store asks it in a call that neither a signal nor a timeout
ends, for 15 minutes.
"""

import os
import signal
import time
from contextlib import suppress

from project.cluster.place import host
from project.cluster.processes import ended, is_stopped, start_time, status_fields

_LONG = 5.0  # seconds: who stops it for a moment knows that


class Agent:
    """Represents the agent that has launched a rank."""

    def __init__(self, pid: int) -> None:
        self._pid, self._began = pid, start_time(pid)
        self._stopped_since: float | None = None
        self._is_reported = False

    @property
    def _name(self) -> str:
        return f"torchrun on {host()} (process {self._pid})"

    def report_stop(self) -> str:
        """Returns a warning, once, if the agent is stopped for some seconds, or ''."""
        now = time.monotonic()
        self._stopped_since = (self._stopped_since or now) if is_stopped(self._pid) else None
        if self._is_reported or self._stopped_since is None or now - self._stopped_since < _LONG:
            return ""
        self._is_reported = True
        hint = f"HINT: kill -CONT {self._pid}"
        return f"{self._name} is stopped (Ctrl-Z, SIGSTOP). Training continues, but signals don't reach it. {hint}"

    def wake(self) -> str:
        """Continues the agent, if it is stopped, and returns a warning, or ''."""
        if start_time(self._pid) != self._began or not is_stopped(self._pid):
            return ""
        with suppress(OSError):
            os.kill(self._pid, signal.SIGCONT)
        return f"{self._name} is stopped, and the other hosts would wait for it: it is continued."

    def end(self, seconds: float, rank: int) -> str:
        """Waits so long for the agent to end or to start its ranks again; kills it if it does neither, and returns a warning.

        `rank`: the process id of a rank that has ended.
        """
        until = time.monotonic() + seconds
        while not (is_over := ended(self._pid, self._began)[0]) and time.monotonic() < until:
            time.sleep(0.2)
        starts = {os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS")}
        has_noticed = status_fields(rank)[:2] != ["Z", str(self._pid)]
        if is_over or (has_noticed and len(starts) > 1):
            return ""
        with suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
        return "torchrun waits for a host that it can't talk to, for a quarter of an hour or longer: it is ended."
