"""Keeps training alive when its output is no longer read: a terminal that was closed, or a `| head` that has ended.

No other import than the standard library's: this comes first.
"""

import io
import sys
from typing import Any


class _Patient(io.FileIO):
    """Represents a file descriptor whose writes never fail: text that can't be written is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:  # EIO: the terminal is gone; EPIPE: the reader is; ENOSPC: it is a file, and the disk is full
            return len(data)


def _patient(stream: Any, number: int) -> Any:
    """Returns the same stream over a patient descriptor; what is no program's own output (under a test, say) stays as it is."""
    if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != number:
        return stream
    stream.flush()
    raw = io.BufferedWriter(_Patient(number, "w", closefd=False))
    kept = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
    return io.TextIOWrapper(raw, **kept)


def outlive_the_reader() -> None:
    """Makes writing to standard output and standard error succeed from here on."""
    sys.stdout = _patient(sys.stdout, 1)
    sys.stderr = _patient(sys.stderr, 2)
