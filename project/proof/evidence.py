"""Reads what a trial left, and finds the first difference from another one, with its likely source."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from project.proof.plan import RUN
from project.proof.states import Compared, Difference, compare_states
from project.watch.comparison import compare
from project.watch.fingerprint_file import FILE, read

_NAMED = 5  # attributes
_ROUNDING = 1e-3  # of a mean loss, relative, in a few steps
_COARSE = 3e-2  # with 16 bits
_MOVED = 10  # times as much: of what moves beside the optimiser, the sum and the norm
_BY_STEP = ("samples", "losses")
_ORDER = (
    *_BY_STEP,
    "weights",
    "buffers",
    "optimiser states",
    "schedules",
    "validation samples",
    "other states",
    "logged values",
)


@dataclass
class Seen:
    """What the ranks of a trial noted; a step that was taken again counts as it was taken last."""

    samples: dict[int, list[str]] = field(default_factory=dict)
    losses: dict[int, dict[int, float]] = field(default_factory=dict)
    """By the step and the number of the micro-batch."""
    validated: dict[int, list[str]] = field(default_factory=dict)
    attributes: dict[int, dict[str, str]] = field(default_factory=dict)
    buffers: dict[int, dict[str, tuple[float, float]]] = field(default_factory=dict)
    """Sum and norm, by the step that comes next and the name."""
    begins: int = 0
    """The step of the first start."""

    def forget(self, step: int) -> None:
        """Drops what was noted from this step on: it is taken again."""
        for noted in (self.samples, self.losses, self.attributes, self.buffers):
            for late in [one for one in noted if one >= step]:
                del noted[late]
        self.validated = {at: samples for at, samples in self.validated.items() if at <= step}


def seen(folder: Path) -> Seen:
    """Reads the records of all ranks."""
    whole = Seen()
    for path in sorted(folder.glob("record-*.jsonl")):
        rank = _seen(path)
        if path.name == "record-0.jsonl":
            whole.begins = rank.begins
        whole.attributes, whole.buffers = whole.attributes or rank.attributes, whole.buffers or rank.buffers
        for mine, theirs in ((whole.samples, rank.samples), (whole.validated, rank.validated)):
            for step, samples in theirs.items():
                mine[step] = sorted([*mine.get(step, []), *samples])
        for step, losses in rank.losses.items():
            whole.losses.setdefault(step, {}).update(losses)
    return whole


def _seen(path: Path) -> Seen:
    rank = Seen()
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        step = entry["step"]
        match entry["kind"]:
            case "begin":
                rank.begins = rank.begins if rank.samples else step
                rank.forget(step)
            case "attributes":
                rank.attributes[step], rank.buffers[step] = entry["values"], entry["buffers"]
            case "batch":
                rank.samples.setdefault(step, []).extend(entry["samples"])
                if entry["loss"] is not None:
                    rank.losses.setdefault(step, {})[entry["number"]] = entry["loss"]
            case "validation":
                rank.validated[step] = []
            case "validated":
                rank.validated[step].extend(entry["samples"])
    return rank


# Comparing -----------------------------------------------------------------------------------------------------------


@dataclass
class Finding:
    """How a trial compares with the reference."""

    compared: Compared
    first: Difference | None = None
    lines: list[str] = field(default_factory=list)
    """Where the difference likely comes from."""
    attributes: list[str] = field(default_factory=list)
    """What the objects of the user keep in Python, and what differs before that step."""


def compare_trials(folder: Path, other: Path, ranks: bool, kept: Sequence[str], coarse: bool = False) -> Finding:
    """Compares a trial with the reference.

    Args:
        folder: of the reference.
        other: of the trial.
        ranks: whether it ran on another number of ranks.
        kept: what must be the same: 'bits', or 'samples' and 'losses' up to rounding.
        coarse: whether numbers have 16 bits.
    """
    mine, theirs = seen(folder), seen(other)
    begins, bits = max(mine.begins, theirs.begins), "bits" in kept
    rounding = 0.0 if bits else _COARSE if coarse else _ROUNDING
    compared = compare_states(folder / RUN, other / RUN, not ranks) if bits else Compared()
    differences = compared.differences
    for step in sorted(one for one in mine.samples.keys() | theirs.samples.keys() if one >= begins):
        compared.count("steps")
        samples, others = mine.samples.get(step, []), theirs.samples.get(step, [])
        compared.count("samples", len(samples))
        if samples != others:
            what = f"{len(samples)} in this step, {len({*samples} ^ {*others})} in one of them only"
            differences.append(Difference(step + 1, "samples", what))
    for step in sorted(mine.validated.keys() | theirs.validated.keys()):
        compared.count("validation samples", len(mine.validated.get(step, ())))
        if mine.validated.get(step) != theirs.validated.get(step) and step > begins:
            differences.append(Difference(step, "validation samples", "others were looked at, or with other values"))
    for step in sorted(mine.losses.keys() & theirs.losses.keys()) if bits or "losses" in kept else ():
        compared.count("losses", len(mine.losses[step]))
        most = max(map(abs, mine.losses[step].values()))
        for number, loss in sorted(mine.losses[step].items()):
            if not _close(loss, value := theirs.losses[step].get(number, float("nan")), rounding * most):
                texts = f"of micro-batch {number}", f"{loss:.9g}", f"{value:.9g}"
                differences.append(Difference(step + 1, "losses", *texts))
                break
    for step in sorted(mine.buffers.keys() & theirs.buffers.keys()) if bits or "losses" in kept else ():
        for name, (total, norm) in mine.buffers[step].items():
            sums = theirs.buffers[step].get(name, (float("nan"), 0.0))
            tolerance = _MOVED * rounding * norm
            if not (_close(total, sums[0], tolerance) and _close(norm, sums[1], tolerance)):
                differences.append(Difference(step, "buffers", name, f"its sum is {total:.6g}", f"{sums[0]:.6g}"))
    first = min(differences, key=_place, default=None)
    finding = Finding(compared, first)
    if first is not None:
        common = [at for at in mine.attributes.keys() & theirs.attributes.keys() if at < max(1, first.step) + ranks]
        before, after = (noted.attributes.get(max(common, default=-1), {}) for noted in (mine, theirs))
        both = (
            {name: (before.get(name, "not set"), after.get(name, "not set")) for name in [*before, *after]} if before else {}
        )
        different = [f"{name}: {one}, and {other}" for name, (one, other) in both.items() if one != other]
        finding.attributes = different[:_NAMED]
        finding.lines = _module(folder / RUN, other / RUN) if bits else []
    return finding


def _place(difference: Difference) -> tuple[int, int]:
    """Sorts differences by when they can be seen first. Some log a step by the number of steps before it."""
    return difference.step + (difference.kind == "logged values"), _ORDER.index(difference.kind)


def _close(one: float, other: float, tolerance: float) -> bool:
    return one == other or abs(one - other) <= tolerance or (one != one and other != other)


def _module(folder: Path, other: Path) -> list[str]:
    """Returns what the fingerprints say of the place: the module whose output differs first, say."""
    if not all((one / FILE).is_file() for one in (folder, other)):
        return []
    verdict = compare(read(folder, "the first run"), read(other, "this one"))
    return [] if verdict is None or verdict.same else [line.strip() for line in verdict.lines[1:]]
