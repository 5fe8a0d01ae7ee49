"""What a rank hears of the end of another: from that rank, which failed, or from its warden, as it was killed."""

import threading
import time

from project.errors import TRY_AGAIN


class News:
    """The watchdog's thread hears it; what the main thread meets is a connection that was closed, a moment before."""

    def __init__(self) -> None:
        self.deaths: dict[int, str] = {}
        self.failures: dict[int, str] = {}
        self.silence = False
        """A rank has gone, and nobody says how: with its warden, and so with its host."""
        self.since: float | None = None
        """When the first came; None: nothing is known."""
        self._heard = threading.Event()

    def of_death(self, rank: int, text: str) -> None:
        """Of a rank that was killed: its warden says so."""
        self.deaths.setdefault(rank, text)
        self._hear()

    def of_failure(self, rank: int, text: str) -> None:
        """Of a rank that an error ends: it says so itself."""
        self.failures.setdefault(rank, text)
        self._hear()

    def _hear(self) -> None:
        self.since = self.since or time.monotonic()
        self._heard.set()

    @property
    def code(self) -> int:
        """With which the ranks that are left end, where one was killed or its host is gone; an error would come again."""
        return TRY_AGAIN if (self.deaths or self.silence) and not self.failures else 1

    def wait(self, seconds: float) -> bool:
        """Until there is news, or so long."""
        return self._heard.wait(seconds)

    def clear(self) -> None:
        """Another run begins in this process."""
        self.deaths.clear()
        self.failures.clear()
        self.silence = False
        self.since = None
        self._heard.clear()


NEWS = News()
