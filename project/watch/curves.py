"""The curves of a run: TensorBoard's events in its folder, read as untrusted data that may be damaged.

TensorBoard's own reader opens pipes, follows links, and allocates what a record claims to hold. Here only regular files of the
folder are read, of which no record is larger than the file, and only numbers and the newest pictures are kept. Imports
TensorBoard when it is needed: it takes a second.
"""

import math
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from project.untrusted import LARGEST_COUNT, LATEST, open_to_read

_HEADER = struct.Struct("<QI")  # of a record: its length, and that length's checksum; the record and its own checksum follow
_LARGEST = 1 << 22  # bytes of a record; larger pictures and graphs are passed over
_TAGS, _PICTURES, _SIDE = 10_000, 24, 8192  # curves; pictures, and pixels of their sides
_TIME = struct.Struct("<d")
_AT_ONCE = 2_048  # events that wait to be added to curves
_RECENT = 1_000  # points of a thinned curve that stay as they are: the last ones
_STARTS = 1_000
_LAYOUTS = 8  # of events of one length
_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
ASIDE = "watch/"
"""The prefix that what is not the module's has in TensorBoard, which sorts by name: train/ and val/ come first."""
OURS = ("speed/", "ranks/", "run/", ASIDE)
"""The prefixes of the curves that are not the module's."""

LEARNING_RATE = "run/lr"
"""The curve of the learning rate that the schedule has set, whatever the module logs."""


def board_tag(tag: str) -> str:
    """Returns the name that a curve has in TensorBoard."""
    return f"{ASIDE}{tag}" if tag == "epoch" or tag.startswith(OURS[:3]) else tag


class Point(NamedTuple):
    """A value of a curve."""

    step: int
    value: float
    time: float


class Picture(NamedTuple):
    """A picture as TensorBoard has it: a PNG."""

    step: int
    png: bytes


class _Curve:
    """A curve while it is read. `most`: the points that are kept of it, about; None: all."""

    def __init__(self, most: int | None) -> None:
        self.points: list[Point] = []
        self.waiting: _Layout | None = None
        """The events whose numbers are still to be added."""
        self._most, self._full = most, 3 * (4 * most + _RECENT) if most else math.inf
        self._numbers = array("d")  # step, value and time of each point; of a million they take a sixth of the room

    def add(self, numbers: Iterable[float]) -> None:
        """Adds points: a step, a value and a time of each."""
        self._numbers.extend(numbers)
        if self._most and len(self._numbers) > self._full:
            self._numbers = _thinned(self._numbers, self._most)
            self.points.clear()

    def settle(self) -> list[Point]:
        """Makes points of what is new, and returns all."""
        new = self._numbers[3 * len(self.points) :]
        self.points += [Point(int(step), value, time) for step, value, time in zip(new[::3], new[1::3], new[2::3], strict=True)]
        return self.points

    def take_back(self, step: int) -> None:
        self.points = [point for point in self.settle() if point.step < step]
        self._numbers = array("d", chain.from_iterable(self.points))


class _Layout:
    """The form of events that differ in their numbers alone: the bytes between these, and the curves that they belong to. Their
    numbers wait here, and are added to the curves together: one by one they would take three times as long.
    """

    def __init__(self, between: Sequence[bytes], curves: Sequence[_Curve]) -> None:
        self.numbers = struct.Struct("<" + "".join(f"{len(part)}sf" for part in between))
        self.between, self.curves = tuple(between), curves
        self.rows = array("d")
        """A step, a time and the values of each event."""
        self.full = _AT_ONCE * (2 + len(curves))
        self.first = False
        """Whether no other layout has numbers of these curves that wait."""

    def begin(self) -> None:
        """Lets others that have numbers of the same curves add theirs: they were logged before."""
        for curve in self.curves:
            if curve.waiting is not None and curve.waiting is not self:
                curve.waiting.pass_on()
            curve.waiting = self
        self.first = True

    def pass_on(self) -> None:
        """Adds the numbers to the curves."""
        each = 2 + len(self.curves)
        numbers = array("d", bytes(24 * (len(self.rows) // each)))
        numbers[::3], numbers[2::3] = self.rows[::each], self.rows[1::each]
        for place, curve in enumerate(self.curves, start=2):
            numbers[1::3] = self.rows[place::each]
            curve.add(numbers)
            curve.waiting = None
        self.rows, self.first = array("d"), False


def _thinned(numbers: "array[float]", most: int) -> "array[float]":
    """Returns about so many of a curve's points: of each stretch of steps the smallest, the largest and what is not finite,
    and the last ones as they are.
    """
    import numpy as np

    rows = np.frombuffer(numbers).reshape(-1, 3)
    early, recent = rows[:-_RECENT], rows[-_RECENT:]
    steps, values = early[:, 0], early[:, 1]
    width = max(1.0, (steps.max() - steps.min()) / (most / 2))
    stretches = (steps - steps.min()) // width
    order = np.lexsort((values, stretches))  # what is no number comes last in its stretch
    edges = np.flatnonzero(np.diff(stretches[order])) + 1
    finite = np.flatnonzero(np.isfinite(values[order]))
    ends = np.concatenate([[0], edges, edges - 1, [len(order) - 1]])
    # Beside what is not finite, the largest number of a stretch is kept, too.
    beside = finite[np.searchsorted(finite, ends, side="right") - 1] if len(finite) else ends
    kept = np.unique(np.concatenate([order[ends], order[beside], [0]]))
    return array("d", np.concatenate([early[kept], recent]).tobytes())


class Curves:
    """A reader of a folder, which reads each file once, in the order of their names. `most`: the points that are kept of each
    curve, about, so that a run of a million steps fits into memory; None: all.
    """

    def __init__(self, folder: Path, most: int | None = None) -> None:
        self._folder, self._most = folder, most
        self._curves: dict[str, _Curve] = {}
        self._done: dict[str, int] = {}  # bytes of each file
        self._lengths: dict[bytes, int] = {}  # that headers of records give, whose checksums are right
        self._layouts: dict[int, list[_Layout]] = {}  # by bytes
        self.pictures: dict[str, Picture] = {}
        """The newest of each tag."""
        self.starts: list[tuple[float, int]] = []
        """The time and the step of the last point before each resumption."""

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
                            if not self._add_numbers(record):
                                self._add(record)
                except OSError:
                    continue
        self._pass_on()
        return {tag: points for tag, curve in self._curves.items() if (points := curve.settle())}

    def _records(self, name: str, file: BinaryIO) -> Iterator[bytes]:
        """Yields the complete records up to the first damaged one."""
        size = file.seek(0, 2)
        at = file.seek(self._done.setdefault(name, 0))
        known = self._lengths
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length = known.get(header)
            if length is None and (length := self._length(header)) is None:
                return
            at += _HEADER.size + length + 4
            if at > size:
                return
            self._done[name] = at
            if length <= _LARGEST:
                yield file.read(length + 4)[:-4]
            else:
                file.seek(at)

    def _length(self, header: bytes) -> int | None:
        """Returns the length of a record, if its checksum is right, and keeps it: few are common, and a checksum takes long."""
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        length, checksum = _HEADER.unpack(header)
        if masked_crc32c(header[:8]) != checksum:
            return None
        if len(self._lengths) < _TAGS:
            self._lengths[header] = length
        return int(length)

    def _add_numbers(self, record: bytes) -> bool:
        """Adds an event of a form that was seen before. Protobuf would take half a minute for a million of them."""
        if (head := _head(record)) is None:
            return False
        step, at = head
        (time,) = _TIME.unpack_from(record, 1)
        for layout in self._layouts.get(len(record) - at, ()):
            parts = layout.numbers.unpack_from(record, at)
            if parts[::2] == layout.between and 0 <= time < LATEST:
                if not layout.first:
                    layout.begin()
                layout.rows.extend((step, time, *parts[1::2]))
                if len(layout.rows) >= layout.full:
                    layout.pass_on()
                return True
        return False

    def _pass_on(self) -> None:
        for layouts in self._layouts.values():
            for layout in layouts:
                layout.pass_on()

    def _add(self, record: bytes) -> None:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        try:
            event: Any = Event.FromString(record)
        except DecodeError:
            return
        if not (0 <= event.step < LARGEST_COUNT and math.isfinite(event.wall_time) and 0 <= event.wall_time < LATEST):
            return
        self._pass_on()  # what was logged before
        if event.HasField("session_log") and event.session_log.status == SessionLog.START:
            self._take_back(event.step)
        for value in event.summary.value:
            if value.HasField("simple_value") and (curve := self._curve(_own_tag(value.tag))):
                curve.add((event.step, value.simple_value, event.wall_time))
            elif value.HasField("image"):
                self._add_picture(value.tag, Picture(event.step, value.image.encoded_image_string))
        if (head := _head(record)) and (between := _between(event.summary.value, record[head[1] :])):
            curves = [curve for value in event.summary.value if (curve := self._curve(_own_tag(value.tag)))]
            layout = _Layout(between, curves)
            alike = self._layouts.setdefault(layout.numbers.size, [])
            if len(curves) == len(between) and len(self._layouts) < _TAGS and len(alike) < _LAYOUTS:
                alike.append(layout)

    def _take_back(self, step: int) -> None:
        """Removes the points that a resumed run repeats: this step and later ones."""
        last = [(points[-1].time, points[-1].step) for curve in self._curves.values() if (points := curve.settle())]
        if last and len(self.starts) < _STARTS:
            self.starts.append(max(last))
        for curve in self._curves.values():
            curve.take_back(step)
        self.pictures = {tag: picture for tag, picture in self.pictures.items() if picture.step < step}

    def _curve(self, tag: str) -> _Curve | None:
        if tag not in self._curves and len(self._curves) < _TAGS:
            self._curves[tag] = _Curve(self._most)
        return self._curves.get(tag)

    def _add_picture(self, tag: str, picture: Picture) -> None:
        sides = struct.unpack_from(">II", picture.png, len(_PNG)) if len(picture.png) > 100 else (0, 0)
        if picture.png.startswith(_PNG) and max(sides) <= _SIDE and (tag in self.pictures or len(self.pictures) < _PICTURES):
            self.pictures[tag] = picture


def _own_tag(tag: str) -> str:
    own = tag.removeprefix(ASIDE)
    return own if board_tag(own) == tag else tag


def _head(record: bytes) -> tuple[int, int] | None:
    """Returns the step of an event that begins with a time and a step, and where the rest of it begins."""
    if len(record) < 12 or record[0] != 0x09 or record[9] != 0x10:
        return None
    step = shift = 0
    for byte in record[10:17]:
        step |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return step, 10 + shift // 7
    return None


def _between(values: Sequence[Any], summary: bytes) -> list[bytes] | None:
    """Returns the bytes before each number of a summary that holds numbers alone."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    between, at = [], 0
    for value in values:
        packed = value.SerializeToString()
        if packed != Summary.Value(tag=value.tag, simple_value=value.simple_value).SerializeToString():
            return None
        end = summary.find(packed, at) + len(packed)
        between.append(summary[at : end - 4])  # a number is the last that is written of a value
        at = end
    return between if at == len(summary) else None
