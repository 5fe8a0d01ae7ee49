"""Keeps training alive when its output is no longer read: a terminal that was closed, or a `| head` that has ended.

No other import than the standard library's: this comes first.
"""

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


LOST: dict[int, OSError] = {}
"""The errors of writes that failed, by file descriptor: the last one of each."""


class _TolerantFile(io.FileIO):
    """Represents a file descriptor whose writes never fail: text that can't be written is dropped."""

    def write(self, data: "ReadableBuffer") -> int:
        try:
            return super().write(data)
        except OSError as error:  # EIO: the terminal is gone; EPIPE: the reader is; ENOSPC: a file, and the disk is full
            LOST[self.fileno()] = error
            return memoryview(data).nbytes


def _tolerant_stream(stream: TextIO, number: int) -> TextIO:
    """Returns a stream whose writes never fail; one that is not the program's own (under a test, say) is returned as it is.

    With PYTHONUNBUFFERED a line is written as soon as it is whole, so that the lines of several ranks don't mix.
    """
    if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != number:
        return stream
    stream.flush()
    raw = io.BufferedWriter(_TolerantFile(number, "w", closefd=False))
    by_lines = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=by_lines)


def open_standard_streams() -> None:
    """Opens /dev/null in the place of standard streams that were closed at the start: the next file that is opened would take
    its number. What the terminal's encoding lacks is written in escapes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, number)  # which the processes that this one starts have, too
            if opened != number:
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def ignore_output_errors() -> None:
    """Makes writing to standard output and standard error succeed from here on."""
    sys.stdout = _tolerant_stream(sys.stdout, 1)
    sys.stderr = _tolerant_stream(sys.stderr, 2)
