"""The file fingerprints.jsonl in a run's folder: what each step left behind, in a few bytes.

A line with `format` begins a start of the run at some step. The lines that follow are the steps that were taken from
there, one each. After a kill some steps are taken again: they stand there twice, and the later line counts.

No heavy imports: a file is read without PyTorch.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from project.errors import UserError
from project.untrusted import as_count, as_text, parse_json, read_lines, shortened

FILE = "fingerprints.jsonl"
FORMAT = 1
MODULE_BYTES = 2
_MOST = 1_000_000  # ranks, threads, and micro-batches of a step


@dataclass(frozen=True)
class Start:
    """A start of the run, where it begins or resumes."""

    step: int
    """The steps that are done."""
    ranks: int
    micro_batches: int
    """The number in a step, over all ranks."""
    exact: bool
    torch: str
    device: str
    threads: int
    names: tuple[str, ...]
    """The names of the tensors: parameters and floating-point buffers."""
    weights: str | None
    """A checksum of all tensors, in hex; None where it was not taken."""
    tensors: bytes
    """A byte of each tensor's own checksum."""

    def line(self) -> str:
        return _line({"format": FORMAT, **vars(self), "tensors": _text(self.tensors)})


@dataclass(frozen=True)
class Step:
    """The record of a step: checksums of the weights after it, and its losses."""

    step: int
    epoch: int
    ranks: int
    weights: str
    tensors: bytes
    losses: Mapping[int, bytes]
    """The bits of each micro-batch's loss, by its number."""
    modules: Sequence[tuple[str, bytes]] = ()
    """The outputs, where they were recorded: what each module gave in micro-batch 0, in the order in which they were done."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Ranks whose weights are not rank 0's, with their checksums."""

    def line(self, micro_batches: int) -> str:
        """Returns the line of a step. `micro_batches`: of the start; a step that has just these does not name them."""
        numbers, modules = sorted(self.losses), list(zip(*self.modules, strict=True))
        known = {
            **vars(self),
            "tensors": _text(self.tensors),
            "losses": _text(b"".join(self.losses[number] for number in numbers)),
            "numbers": None if numbers == list(range(micro_batches)) else numbers,
            "modules": [modules[0], _text(b"".join(modules[1]))] if modules else None,
            "others": self.others or None,
        }
        return _line({name: value for name, value in known.items() if value is not None})


@dataclass(frozen=True)
class Taken:
    """A step, with the start it belongs to and the weights before it."""

    record: Step
    start: Start
    before: str | None

    def rank_of(self, number: int) -> int:
        """Returns the rank that computed a micro-batch."""
        return number // max(1, self.start.micro_batches // self.record.ranks)


class Recorded:
    """The content of a run's file."""

    def __init__(self, name: str, starts: Sequence[tuple[Start, Sequence[Step]]]) -> None:
        self.name, self.starts = name, starts
        self.steps: dict[int, Taken] = {}
        """The steps as the run stands now: a start leaves what was recorded before it for later steps to be taken again."""
        self.again: list[tuple[Taken, Taken]] = []
        """Steps that were taken more than once: an earlier and the next later time."""
        ever: dict[int, Taken] = {}
        for start, records in starts:
            while self.steps and next(reversed(self.steps)) > start.step:
                self.steps.popitem()
            before = start.weights
            for record in records:
                taken = Taken(record, start, before)
                if record.step in ever:
                    self.again.append((ever[record.step], taken))
                ever[record.step] = self.steps[record.step] = taken
                before = record.weights

    @property
    def last(self) -> int:
        return max(self.steps)


def read(folder: Path, name: str) -> Recorded:
    """Reads the run's file; a UserError names what is wrong with it."""
    path = folder / FILE
    try:
        starts = _starts(path)
    except FileNotFoundError:
        raise UserError(
            f"The run {name} has no {path}: it has not come to its first steps, was trained by an older version of this "
            "project, with trainer.fingerprints=false, or with a strategy that shards the network. HINT: train it again, with "
            "trainer.strategy=ddp; a step leaves its fingerprint as it is taken."
        ) from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error}.") from error
    if not any(records for _, records in starts):
        raise UserError(f"{path} holds no step: the run {name} was ended before one was recorded. HINT: let it go on.")
    return Recorded(name, starts)


def _starts(path: Path) -> list[tuple[Start, list[Step]]]:
    """Reads line by line; the last one may have no end: it was cut off by a kill."""
    starts: list[tuple[Start, list[Step]]] = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            entry = parse_json(line)
            version = entry.get("format")
            if version == FORMAT:
                starts.append((_start(entry), []))
            elif version is None:
                starts[-1][1].append(_step(entry, starts[-1][0]))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise UserError(
                f"{path}, line {number}: this is no fingerprint ({type(error).__name__}: {shortened(error)}). HINT: damaged? "
                "Take it from a copy of the run, or compare the checkpoints."
            ) from error
        if version not in (None, FORMAT):
            raise UserError(
                f"{path} is of another version of this project (format {version!r}, not {FORMAT}). HINT: use that one."
            )
    return starts


def _start(entry: dict[str, Any]) -> Start:
    return Start(
        step=as_count(entry["step"]),
        ranks=as_count(entry["ranks"], 1, _MOST),
        micro_batches=as_count(entry["micro_batches"], 1, _MOST),
        exact=entry["exact"] is True,
        torch=as_text(entry["torch"]),
        device=as_text(entry["device"]),
        threads=as_count(entry["threads"], 0, _MOST),
        names=tuple(map(as_text, entry["names"])),
        weights=None if entry["weights"] is None else as_text(entry["weights"]),
        tensors=base64.b64decode(entry["tensors"], validate=True),
    )


def _step(entry: dict[str, Any], start: Start) -> Step:
    losses = base64.b64decode(entry["losses"], validate=True)
    numbers = entry.get("numbers") or range(start.micro_batches)
    size, left = divmod(len(losses), len(numbers))
    if left:
        raise UserError("numbers that can't be")
    names, modules = entry.get("modules", ((), ""))
    return Step(
        step=as_count(entry["step"]),
        epoch=as_count(entry["epoch"]),
        ranks=as_count(entry["ranks"], 1, _MOST),
        weights=as_text(entry["weights"]),
        tensors=base64.b64decode(entry["tensors"], validate=True),
        losses=dict(zip((as_count(number, 0, _MOST) for number in numbers), _cut(losses, size), strict=False)),
        modules=tuple(zip(map(as_text, names), _cut(base64.b64decode(modules, validate=True), MODULE_BYTES), strict=True)),
        others={as_text(rank): as_text(weights) for rank, weights in entry.get("others", {}).items()},
    )


def _cut(content: bytes, size: int) -> list[bytes]:
    return [content[at : at + size] for at in range(0, len(content), size)] if size else []


def _line(entry: dict[str, object]) -> str:
    return json.dumps(entry, separators=(",", ":")) + "\n"


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
