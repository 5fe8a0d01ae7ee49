"""A thread that writes what is logged to a server, so that the training never waits for it."""

import threading
import time
from collections.abc import Callable
from queue import Full, Queue
from typing import Any

_PAUSE = 30.0  # seconds between two attempts
_LONGEST = 100_000  # entries that may wait for a server that is away; later ones are dropped


class Sender:
    """Takes entries in their order. Those that a server that is away does not take wait until it is back.

    Args:
        send: takes one; False where it is worth another attempt.
    """

    def __init__(self, send: Callable[[Any], bool]) -> None:
        self._send = send
        self._entries: Queue[Any] = Queue(_LONGEST)
        self._hurry, self._away, self._dropped = threading.Event(), False, 0
        threading.Thread(target=self._run, name="logger", daemon=True).start()

    def put(self, entry: Any) -> None:
        """Adds an entry, and returns at once."""
        try:
            self._entries.put_nowait(entry)
        except Full:
            self._dropped += 1

    def left(self, seconds: float, hurry: bool = False) -> int:
        """Returns how many entries were not sent, when all are, or after so many seconds, or when the server is away.

        With `hurry` it is their last chance: attempts follow each other at once.
        """
        if hurry:
            self._hurry.set()
        end = time.monotonic() + seconds
        while self._entries.unfinished_tasks and time.monotonic() < end and (hurry or not self._away):
            time.sleep(0.005)
        return self._entries.unfinished_tasks + self._dropped

    def _run(self) -> None:
        while True:
            entry = self._entries.get()
            while not self._send(entry):
                self._away = True
                if self._hurry.wait(_PAUSE):
                    time.sleep(1)
            self._away = False
            self._entries.task_done()
