"""Reads what a trial left, and finds the first difference from another one, with its likely source."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from project.proof.plan import RUN
from project.proof.states import Compared, Difference, compare_states
from project.watch.comparison import compare
from project.watch.fingerprint_file import FILE, read

_NAMED = 5  # attributes
_ROUNDING = 1e-3  # of a loss, relative, in a few steps
_COARSE = 3e-2  # with 16 bits
_MOVED = 10  # times as much: of what moves beside the optimiser
_ORDER = (
    *("samples", "losses", "weights", "buffers", "optimiser states", "schedules", "validation samples"),
    *("other states", "logged values"),
)
Noted = dict[str, dict[int, list[Any]]]
"""What the ranks of a trial noted: values by kind and step."""


def noted(folder: Path) -> Noted:
    """Reads the records of all ranks. A step, or a validation, that was begun again counts as it was done last."""
    whole: Noted = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("record-*.jsonl")):
        entries: list[tuple[str, int, list[Any]]] = []
        for line in path.read_text().splitlines():
            kind, step, values = json.loads(line)
            if kind == "begins":
                entries = [one for one in entries if one[1] < step or (one[0], one[1]) == ("validation samples", step)]
            if kind == "validates":
                entries = [one for one in entries if (one[0], one[1]) != ("validation samples", step)]
            entries.append((kind, step, values))
        for kind, step, values in entries:
            whole[kind][step] += values
    return whole


@dataclass
class Finding:
    """How a trial compares with the reference."""

    compared: Compared
    first: Difference | None = None
    lines: list[str] = field(default_factory=list)
    """Where the difference likely comes from."""
    attributes: list[str] = field(default_factory=list)
    """What the objects of the user keep in Python, and what differs before that step."""


def compare_trials(folder: Path, other: Path, ranks_differ: bool, kept: Sequence[str], coarse: bool = False) -> Finding:
    """Compares a trial with the reference.

    Args:
        folder: of the reference.
        other: of the trial.
        ranks_differ: whether it ran on another number of ranks.
        kept: what must be the same: 'bits', or 'samples' and 'losses' up to rounding.
        coarse: whether numbers have 16 bits.
    """
    mine, theirs, bits = noted(folder), noted(other), "bits" in kept
    begins = min(theirs["begins"])  # where it resumes from another one's checkpoint
    rounding = 0.0 if bits else _COARSE if coarse else _ROUNDING
    compared = compare_states(folder / RUN, other / RUN, not ranks_differ) if bits else Compared()
    for kind in ("samples", "validation samples"):
        for step in sorted(at for at in mine[kind].keys() | theirs[kind].keys() if at >= begins + (kind != "samples")):
            samples, others = sorted(mine[kind].get(step, [])), sorted(theirs[kind].get(step, []))
            compared.count(kind, len(samples))
            if samples != others:
                what = f"{len(samples)} at this step, {len({*samples} ^ {*others})} in one of them only"
                compared.differences.append(Difference(step + (kind == "samples"), kind, what))
    compared.count("steps", len([at for at in mine["samples"] if at >= begins]))
    if bits or "losses" in kept:
        compared.differences += _losses(mine["losses"], theirs["losses"], rounding)
        compared.differences += _buffers(mine["buffers"], theirs["buffers"], _MOVED * rounding)
        compared.count("losses", sum(map(len, mine["losses"].values())))
    finding = Finding(compared, min(compared.differences, key=_place, default=None))
    if finding.first is not None:
        known = mine["attributes"].keys() & theirs["attributes"].keys()
        last = max((at for at in known if at < max(1, finding.first.step) + ranks_differ), default=-1)
        before, after = dict(mine["attributes"].get(last, [])), dict(theirs["attributes"].get(last, []))
        both = {name: (before.get(name, "not set"), after.get(name, "not set")) for name in [*before, *after]}
        finding.attributes = [f"{name}: {one}, and {two}" for name, (one, two) in both.items() if one != two][:_NAMED]
        finding.lines = _module(folder / RUN, other / RUN) if bits else []
    return finding


def _place(difference: Difference) -> tuple[int, int]:
    """Sorts differences by when they can be seen first. Some log a step by the number of steps before it."""
    return difference.step + (difference.kind == "logged values"), _ORDER.index(difference.kind)


def _losses(mine: dict[int, list[Any]], theirs: dict[int, list[Any]], rounding: float) -> Iterator[Difference]:
    for step in sorted(mine.keys() & theirs.keys()):
        losses, others = dict(mine[step]), dict(theirs[step])
        most = max(map(abs, losses.values()))
        for number, loss in sorted(losses.items()):
            if not _close(loss, value := others.get(number, float("nan")), rounding * most):
                yield Difference(step + 1, "losses", f"of micro-batch {number}", f"{loss:.9g}", f"{value:.9g}")
                break


def _buffers(mine: dict[int, list[Any]], theirs: dict[int, list[Any]], rounding: float) -> Iterator[Difference]:
    for step in sorted(mine.keys() & theirs.keys()):
        others = {name: (total, norm) for name, total, norm in theirs[step]}
        for name, total, norm in mine[step]:
            values = others.get(name, (float("nan"), 0.0))
            if not (_close(total, values[0], rounding * norm) and _close(norm, values[1], rounding * norm)):
                yield Difference(step, "buffers", name, f"its sum is {total:.6g}", f"{values[0]:.6g}")


def _close(one: float, other: float, tolerance: float) -> bool:
    return one == other or abs(one - other) <= tolerance or (one != one and other != other)


def _module(folder: Path, other: Path) -> list[str]:
    """Returns what the fingerprints say of the place: the module whose output differs first, say."""
    if not all((one / FILE).is_file() for one in (folder, other)):
        return []
    verdict = compare(read(folder, "the first run"), read(other, "this one"))
    return [] if verdict is None or verdict.same else [line.strip() for line in verdict.lines[1:]]
