"""Collects what a rank receives of the end of another: from that rank, which failed, or from its warden, as it was killed."""

import threading
import time

from project.errors import TRY_AGAIN


class News:
    """The deaths and failures that the watchdog's thread receives; a moment earlier, the main thread meets a closed
    connection.
    """

    def __init__(self) -> None:
        self.deaths: dict[int, str] = {}
        self.failures: dict[int, str] = {}
        self.silence = False
        """A rank has gone, and nobody says how: with its warden, and so with its host."""
        self.since: float | None = None
        """When the first came; None: nothing is known."""
        self._heard = threading.Event()

    def of_death(self, rank: int, text: str) -> None:
        """Notes the death of a rank that was killed: its warden reports it."""
        self.deaths.setdefault(rank, text)
        self._hear()

    def of_failure(self, rank: int, text: str) -> None:
        """Notes the failure of a rank that an error ends: it reports that itself."""
        self.failures.setdefault(rank, text)
        self._hear()

    def _hear(self) -> None:
        self.since = self.since or time.monotonic()
        self._heard.set()

    @property
    def code(self) -> int:
        """Returns the exit code of the ranks that are left, where one was killed or its host is gone; an error would come
        again.
        """
        return TRY_AGAIN if (self.deaths or self.silence) and not self.failures else 1

    def wait(self, seconds: float) -> bool:
        """Waits until a death or a failure is known, or so long; returns whether one is."""
        return self._heard.wait(seconds)

    def clear(self) -> None:
        """Forgets everything: another run begins in this process."""
        self.deaths.clear()
        self.failures.clear()
        self.silence = False
        self.since = None
        self._heard.clear()


NEWS = News()
