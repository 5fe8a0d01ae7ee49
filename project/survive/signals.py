"""Notes the signals that have arrived: from the first moment of the program on, acted upon between two steps.

No import that takes long: this comes before the seconds in which PyTorch is loaded.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from project.errors import TRY_AGAIN

EXIT_CODES = {number: 128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
ENDING = (*EXIT_CODES, signal.SIGQUIT)
"""The signals that request a process to end: launchers pass them on, and who ends by them has not failed."""
_SAME = 2.0  # seconds: a terminal and a launcher may both pass on one Ctrl-C


def code_of_rank(returncode: int) -> int:
    """Returns the code that counts of a rank that has ended, negative for a signal: SIGABRT, by which NCCL ends ranks, says as
    little about this one as an exit code of 75. It may only have noticed what another rank does.
    """
    return TRY_AGAIN if returncode == -signal.SIGABRT else returncode


class Signals:
    """Notes the first signal; a second one stops at once. Stands in for Lightning's signal connector."""

    received_sigterm = False  # Lightning asks before every batch; the answer that costs nothing

    def __init__(self) -> None:
        self.noted: signal.Signals | None = None
        self.at_first: Callable[[signal.Signals], None] | None = None
        """Called with the first one in a thread, also where the main thread can note none."""
        self._since = 0.0
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def __reduce__(self) -> str:
        """Pickles this object as a reference: a copy, also one sent to another process, is the one of its process."""
        return "SIGNALS"

    def listen(self, *numbers: signal.Signals) -> None:
        """Notes these signals from here on, except those that our parent has switched off, as nohup does with SIGHUP."""
        if not self._before:
            self.noted = None  # a notebook trains again after Ctrl-C
        for number in numbers:
            if signal.getsignal(number) is signal.SIG_IGN:
                continue
            try:
                before = signal.signal(number, self._note)
            except ValueError:  # not the main thread: then signals are not ours to handle
                return
            self._before.setdefault(number, before)

    def register_signal_handlers(self) -> None:
        """Listens when training is about to begin, where Lightning calls this: from here on Ctrl-C waits for the step, too."""
        self.listen(*EXIT_CODES)

    def teardown(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def exit_at_second_signal(self) -> None:
        """Makes a second signal end this process from here on, also while its main thread is in code that is not Python's,
        where it can note none: in a library that is loaded, or a connection that is waited for.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a loader process is ended by one
        threading.Thread(target=self._watch_for_second_signal, args=(reader,), name="signals", daemon=True).start()

    def _watch_for_second_signal(self, reader: int) -> None:
        """Runs in a thread: reads the numbers of signals from a pipe, and ends the process at the second one. Those that come
        within two seconds of the first count as one.
        """
        first: float | None = None
        while number := os.read(reader, 1):
            if signal.getsignal(number[0]) != self._note:  # a user's code has a use of its own for it
                continue
            now = time.monotonic()
            if first is None:
                first = now
                if self.at_first is not None:
                    self.at_first(signal.Signals(number[0]))
            elif now - first > _SAME:
                os._exit(EXIT_CODES[signal.Signals(number[0])])

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: records the first one, and ends the process at the second."""
        now = time.monotonic()
        if self.noted is None:
            self.noted, self._since = signal.Signals(number), now
        elif now - self._since > _SAME:
            os._exit(EXIT_CODES[signal.Signals(number)])  # with the code that a first one leads to: no launcher sees a crash


SIGNALS = Signals()
"""This process's: there is but one set of handlers."""
