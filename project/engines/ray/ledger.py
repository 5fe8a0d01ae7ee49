"""What the starts of one run under Ray came to, and what follows: once more, or over, and with which exit code.

Ray's FailureConfig counts how often a worker failed. It does not know that a wrong key fails each time, that a run which was
told to stop has not failed, nor that a run which comes to no new checkpoint will not by trying again. No import but the
standard library's and the exit codes: this is asked without Ray in its tests, and lives in an actor otherwise.
"""

import signal
import time
from dataclasses import dataclass, field

from project.errors import TRY_AGAIN, WRONG

MOST = 3
"""Starts in a row without a new checkpoint."""
STOPPED = {128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
"""Exit codes of a run that was told to stop, and saved."""
LAST_WORDS = 10.0
"""Seconds that ranks have to end by themselves when one has failed: to say which it was, and to save."""


@dataclass
class Start:
    """One start of all workers."""

    name: str
    hosts: list[str]
    codes: dict[int, int] = field(default_factory=dict)
    preempted: str = ""
    """The hosts that Ray takes away, in words."""
    resized: bool = False
    """Ray ends it to go on with another number of workers."""
    failed_at: float | None = None
    gone: bool = False
    """Ray has ended all workers, as one failed: whoever has not said how it ended will not."""
    lost: dict[int, str] = field(default_factory=dict)
    """The ranks whose workers failed, and what Ray says of it."""
    again: bool | None = None
    """Whether another start follows; None: not decided."""

    @property
    def whole(self) -> bool:
        return len(self.codes) == len(self.hosts)


def shown(code: int) -> str:
    """How a process ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class Ledger:
    """Of one run."""

    def __init__(self, max_failures: int) -> None:
        self._max = max_failures
        self.failures = 0
        self.start: Start | None = None
        self.asked: int | None = None
        """The signal that the user sent."""
        self.code: int | None = None
        """The exit code, once nothing more follows."""
        self.said: list[tuple[str, str]] = []
        """News for the user: level and text."""
        self._newest: list[str] = []

    def begins(self, name: str, hosts: list[str], newest: str) -> bool:
        """A start, with the host of each rank and the checkpoint that it will find. False: nothing is to be started."""
        before, self.start = self.start, Start(name, hosts)
        if before is not None and before.again is None:  # nobody was left to tell
            lost = sorted({host for rank, host in enumerate(before.hosts) if rank not in before.codes})
            self._fails(f"the worker{'s' * (len(lost) > 1)} on {', '.join(lost)} vanished")
        self._newest.append(newest)
        if self.code is None and self._newest[-MOST - 1 :] == [newest] * (MOST + 1):
            self._over(self._code_of(before), f"it was started {MOST} times and came to no new checkpoint")
        if self.code is not None or self.asked is not None:
            if self.code is None:
                self.code = 128 + (self.asked or 0)
            self.start.again = False
            return False
        each = ", ".join(f"{host} x {hosts.count(host)}" if hosts.count(host) > 1 else host for host in dict.fromkeys(hosts))
        self.said.append(("INFO", f"Ray: {len(hosts)} worker{'s' * (len(hosts) > 1)} on {each}"))
        return True

    def ends(self, rank: int, code: int) -> None:
        """A rank of this start has ended."""
        assert self.start is not None
        self.start.codes[rank] = code
        if code and self.start.failed_at is None:
            self.start.failed_at = time.monotonic()

    @property
    def decides(self) -> bool:
        """Whether all has been heard that will be."""
        start = self.start
        if start is None or start.again is not None:
            return False
        late = start.failed_at is not None and time.monotonic() - start.failed_at > LAST_WORDS
        stopping = self.asked is not None or start.preempted or start.resized  # that takes what a checkpoint takes
        return start.whole or (late and (start.gone or not stopping))

    def decide(self) -> bool:
        """Whether another start follows."""
        start = self.start
        assert start is not None
        if start.again is None:
            start.again = self._decide(start)
        return start.again

    def _decide(self, start: Start) -> bool:
        codes = set(start.codes.values())
        if start.whole and codes == {0}:
            self.code = 0
            return False
        if self.asked is not None:
            self.code = max(codes & STOPPED, default=self._code_of(start) or 128 + self.asked)
            return False
        if WRONG in codes:
            self.code = WRONG
            return False
        if codes & STOPPED and (start.preempted or start.resized) and codes <= {*STOPPED, TRY_AGAIN}:
            why = f"{start.preempted} is taken away" if start.preempted else "another number of workers"
            self.said.append(("INFO", f"Ray starts the workers again: {why}."))
            return True
        if start.whole and codes <= STOPPED:  # somebody told a rank to stop: that is no failure
            self.code = max(codes)
            return False
        self._fails(self._cause(start))
        return self.code is None

    def _cause(self, start: Start) -> str:
        """Who failed; ranks that only lost another one, or that Ray ended for it, are not named where that one is known."""
        codes = {rank: code for rank, code in start.codes.items() if code and code != TRY_AGAIN} or start.codes
        named = [f"rank {rank} on {start.hosts[rank]}: {shown(code)}" for rank, code in sorted(codes.items()) if code]
        silent = [rank for rank in range(len(start.hosts)) if rank not in start.codes]
        lost = [f"rank {rank} on {start.hosts[rank]} is lost: {start.lost[rank]}" for rank in silent if rank in start.lost]
        missing = [f"rank {rank} on {start.hosts[rank]} is not heard of" for rank in silent]
        return "; ".join(named + (lost or missing))

    def _fails(self, why: str) -> None:
        self.failures += 1
        if self.failures > self._max:
            self._over(self._code_of(self.start), f"{why}; so many failures: {self.failures} (--max-failures {self._max})")
        else:
            self.said.append(("WARNING", f"Ray starts the workers again (failure {self.failures} of {self._max}): {why}."))

    def _over(self, code: int, why: str) -> None:
        self.code = code or TRY_AGAIN
        hint = (
            "" if "checkpoint" not in why else " HINT: the lines above say why; checkpoints.every_n_minutes saves more often."
        )
        self.said.append(("ERROR", f"The run is not started again: {why}.{hint}"))

    @staticmethod
    def _code_of(start: Start | None) -> int:
        """As the ranks' own: rank 0's, else another's; of a rank that a signal killed, a shell's."""
        codes = [code for _, code in sorted(start.codes.items()) if code] if start else []
        ours = [code for code in codes if code > 0]
        return ours[0] if ours else 128 - codes[0] if codes else 0
