"""Records the ranks that this rank has lost: those that failed, and those that were killed, which their wardens report."""

import threading
import time

from project.errors import TRY_AGAIN, Cause
from project.survive.hang.warden import OOM_KILL

_UNTIL_NOTICED = 4.0  # seconds for the main thread to notice, which then says more and leaves nothing half done
_UNTIL_WRITTEN = 60.0  # for a checkpoint that is being written


class LostRanks:
    """Records deaths and failures of other ranks. The watchdog's thread receives them; a moment earlier, the main thread gets
    an error from a closed connection.
    """

    def __init__(self) -> None:
        self.deaths: dict[int, str] = {}
        self.failures: dict[int, Cause] = {}
        self.unexplained = False
        """Whether a rank is lost and nothing reports how: its warden, and so its host, is lost too."""
        self.since: float | None = None
        """When the first report came; None: no rank is lost."""
        self._received = threading.Event()

    def note_death(self, rank: int, text: str) -> None:
        """Records the death of a rank that was killed: its warden reports it."""
        self.deaths.setdefault(rank, text)
        self._mark()

    def note_failure(self, rank: int, cause: Cause) -> None:
        """Records the failure of a rank that an error ends: it reports that itself."""
        self.failures.setdefault(rank, cause)
        self._mark()

    @property
    def cause(self) -> Cause | None:
        """Returns why ranks are lost, where anything has reported that: a failure explains the deaths that follow it."""
        causes = list(self.failures.values()) or [Cause(text) for text in self.deaths.values()]
        if not causes:
            return None
        return Cause(" ".join(cause.text for cause in causes), causes[0].where, causes[0].traceback)

    @property
    def out_of_memory(self) -> bool:
        """Returns whether the kernel has killed a rank for its memory: it would do so again."""
        return any(OOM_KILL in text for text in self.deaths.values())

    def _mark(self) -> None:
        """Records the time of the first report, and ends `wait`."""
        self.since = self.since or time.monotonic()
        self._received.set()

    @property
    def exit_code(self) -> int:
        """Returns the exit code of the remaining ranks: 'try again' where one was killed or its host is lost, 1 after an error,
        which would occur again.
        """
        return TRY_AGAIN if (self.deaths or self.unexplained) and not self.failures else 1

    def exit_due(self, writing: bool) -> bool:
        """Returns whether the main thread has had the time to notice. `writing`: a checkpoint is being written meanwhile."""
        patience = _UNTIL_WRITTEN if writing else _UNTIL_NOTICED
        return self.since is not None and time.monotonic() - self.since > patience

    def wait(self, seconds: float) -> bool:
        """Waits until a death or a failure is known, or so long; returns whether one is."""
        return self._received.wait(seconds)

    def clear(self) -> None:
        """Removes all records: another run begins in this process."""
        self.deaths.clear()
        self.failures.clear()
        self.unexplained = False
        self.since = None
        self._received.clear()


LOST_RANKS = LostRanks()
