"""The curves of a run: TensorBoard's events in its folder, read as data that may be damaged, or somebody else's.

TensorBoard's own reader opens pipes, follows links, and allocates what a record claims to hold. Here only regular files of the
folder are read, of which no record is larger than the file, and only numbers are kept. Imports TensorBoard when it is needed:
it takes a second.
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from project.untrusted import LARGEST_COUNT, LATEST, open_to_read

_HEADER = struct.Struct("<QI")  # of a record: its length, and that length's checksum; the record and its own checksum follow
_LARGEST = 1 << 22  # bytes of a record with numbers; those of pictures and graphs are passed over
_TAGS = 10_000


class Point(NamedTuple):
    """A value of a curve."""

    step: int
    value: float
    time: float


class Curves:
    """A reader of a folder, which reads each file once, in the order of their names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._points: dict[str, list[Point]] = {}
        self._done: dict[str, int] = {}  # bytes of each file

    def read(self) -> dict[str, list[Point]]:
        """Reads what is new since the last call, and returns all curves.

        They are as TensorBoard shows them: what a resumed run has taken back is left out, and files that precede the newest
        one that was begun are over.
        """
        newest = max(self._done, default="")
        for path in sorted(self._folder.glob("events.out.tfevents.*")):
            if path.name >= newest:
                try:
                    with open_to_read(path, follow=False) as file:
                        for record in self._records(path.name, file):
                            self._add(record)
                except OSError:
                    continue
        return {tag: points for tag, points in self._points.items() if points}

    def _records(self, name: str, file: BinaryIO) -> Iterator[bytes]:
        """Yields the whole records; what follows a damaged one is not known."""
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        size = file.seek(0, 2)
        while True:
            at = file.seek(self._done.setdefault(name, 0))
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return
            length, checksum = _HEADER.unpack(header)
            if at + _HEADER.size + length + 4 > size or masked_crc32c(header[:8]) != checksum:
                return
            self._done[name] = at + _HEADER.size + length + 4
            if length <= _LARGEST:
                yield file.read(length)

    def _add(self, record: bytes) -> None:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        try:
            event: Any = Event.FromString(record)
        except DecodeError:
            return
        if not (0 <= event.step < LARGEST_COUNT and math.isfinite(event.wall_time) and 0 <= event.wall_time < LATEST):
            return
        if event.HasField("session_log") and event.session_log.status == SessionLog.START:
            for tag, points in self._points.items():
                self._points[tag] = [point for point in points if point.step < event.step]
        for value in event.summary.value:
            if value.HasField("simple_value") and (value.tag in self._points or len(self._points) < _TAGS):
                self._points.setdefault(value.tag, []).append(Point(event.step, value.simple_value, event.wall_time))
