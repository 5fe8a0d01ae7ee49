"""The curves of a run: TensorBoard's events in its folder, read as data that may be damaged, or somebody else's.

TensorBoard decides what is shown (a resumed run takes back what it had logged later). What it receives is read here:
regular files of the folder, of which no record is larger than what is there, and nothing but numbers. Imports TensorBoard when
it is needed: it takes a second.
"""

import logging
import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from project.untrusted import LARGEST_COUNT, LATEST, open_to_read

_FILES = "events.out.tfevents.*"
_HEADER = struct.Struct("<QI")  # of a record: its length, and that length's checksum; the record and its own checksum follow
_LARGEST = 1 << 22  # bytes of a record with numbers; those of pictures and graphs are passed over
_TAGS = 10_000


class Events:
    """A reader of a folder, by TensorBoard. `keep`: values of each curve, the newest and others by chance; 0: all."""

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self._folder, self._keep = folder, keep
        self._accumulator: Any = None

    def read(self) -> list[str]:
        """Reads what is new since the last call, and returns the names of all curves."""
        if self._accumulator is None and not any(self._folder.glob(_FILES)):
            return []
        quiet, logging.root.manager.disable = logging.root.manager.disable, logging.WARNING
        try:
            if self._accumulator is None:
                from tensorboard.backend.event_processing.event_accumulator import (
                    EventAccumulator,
                )

                self._accumulator = EventAccumulator(str(self._folder), size_guidance={"scalars": self._keep})
                self._accumulator._generator = Records(self._folder)
            self._accumulator.Reload()
        finally:
            logging.root.manager.disable = quiet
        return list(self._accumulator.Tags()["scalars"])

    def scalars(self, tag: str) -> Sequence[Any]:
        return self._accumulator.Scalars(tag) if self._accumulator else ()


class Records:
    """The events of a folder in the order of its files, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[str, int] = {}  # bytes of each file
        self._tags: set[str] = set()

    def Load(self) -> Iterator[Any]:
        """Yields what is new. What precedes the newest file that was begun is over, as TensorBoard has it."""
        newest = max(self._done, default="")
        for path in sorted(self._folder.glob(_FILES)):
            if path.name < newest:
                continue
            try:
                with open_to_read(path, follow=False) as file:
                    for record in self._records(path.name, file):
                        if (event := self._numbers(record)) is not None:
                            yield event
            except OSError:
                continue

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

    def _numbers(self, record: bytes) -> Any:
        """Returns the event with only the numbers in it; None for one that has none, and marks no start."""
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event

        try:
            event = Event.FromString(record)
        except DecodeError:
            return None
        if not (0 <= event.step < LARGEST_COUNT and math.isfinite(event.wall_time) and 0 <= event.wall_time < LATEST):
            return None
        if event.HasField("file_version") or event.HasField("session_log"):
            return event
        numbers = Event(step=event.step, wall_time=event.wall_time)
        for value in event.summary.value:
            if value.HasField("simple_value") and (value.tag in self._tags or len(self._tags) < _TAGS):
                self._tags.add(value.tag)
                numbers.summary.value.add(tag=value.tag, simple_value=value.simple_value)
        return numbers if numbers.summary.value else None
