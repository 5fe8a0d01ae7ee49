"""Reads what a trial left, and finds the first difference from another one, with its likely source."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from project.proof.states import Compared, Difference, compare_states
from project.watch.comparison import compare
from project.watch.fingerprint_file import FILE, read

RUN = "lightning_logs/prove"
_NAMED = 5  # attributes
_ROUNDING = 1e-3  # of a mean loss, relative, in a few steps
_COARSE = 3e-2  # with 16 bits
_BY_STEP = ("samples", "losses")
_ORDER = (*_BY_STEP, "weights", "optimiser states", "schedules", "validation samples", "other states", "logged values")


@dataclass
class Seen:
    """What the ranks of a trial noted; a step that was taken again counts as it was taken last."""

    samples: dict[int, list[str]] = field(default_factory=dict)
    losses: dict[int, dict[int, tuple[float, float]]] = field(default_factory=dict)
    """Loss and weight, by the step and the number of the micro-batch."""
    validated: dict[int, list[str]] = field(default_factory=dict)
    attributes: dict[int, dict[str, str]] = field(default_factory=dict)

    def loss(self, step: int) -> float:
        """Returns the mean loss of a step."""
        pairs = self.losses[step].values()
        return sum(loss * weight for loss, weight in pairs) / sum(weight for _, weight in pairs)

    def forget(self, step: int) -> None:
        """Drops what was noted from this step on: it is taken again."""
        for noted in (self.samples, self.losses, self.attributes):
            for late in [one for one in noted if one >= step]:
                del noted[late]
        self.validated = {at: samples for at, samples in self.validated.items() if at <= step}


def seen(folder: Path) -> Seen:
    """Reads the records of all ranks."""
    whole = Seen()
    for path in sorted(folder.glob("record-*.jsonl")):
        rank = _seen(path)
        whole.attributes = whole.attributes or rank.attributes
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
                rank.forget(step)
            case "attributes":
                rank.attributes[step] = entry["values"]
            case "batch":
                rank.samples.setdefault(step, []).extend(entry["samples"])
                if entry["loss"] is not None:
                    rank.losses.setdefault(step, {})[entry["number"]] = entry["loss"], entry["weight"]
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
    bits = "bits" in kept
    compared = compare_states(folder / RUN, other / RUN, not ranks) if bits else Compared()
    differences = compared.differences
    for step in sorted(mine.samples.keys() | theirs.samples.keys()):
        compared.count("steps")
        if step not in mine.samples or step not in theirs.samples:
            differences.append(Difference(step + 1, "samples", "this step was taken by one of them only"))
        elif mine.samples[step] != theirs.samples[step]:
            many = len(set(mine.samples[step]) ^ set(theirs.samples[step]))
            differences.append(
                Difference(step + 1, "samples", f"{len(mine.samples[step])} in this step, {many} in one of them only")
            )
        compared.count("samples", len(mine.samples.get(step, ())))
    for step in sorted(mine.validated.keys() | theirs.validated.keys()):
        compared.count("validation samples", len(mine.validated.get(step, ())))
        if mine.validated.get(step) != theirs.validated.get(step):
            differences.append(Difference(step, "validation samples", "others were looked at, or with other values"))
    for step in sorted(mine.losses.keys() & theirs.losses.keys()) if bits or "losses" in kept else ():
        compared.count("losses", len(mine.losses[step]) if bits else 1)
        if difference := _losses(step, mine, theirs, bits, _COARSE if coarse else _ROUNDING):
            differences.append(difference)
    first = min(differences, key=_place, default=None)
    finding = Finding(compared, first)
    if first is not None:
        common = [at for at in mine.attributes.keys() & theirs.attributes.keys() if at < max(1, first.step) + ranks]
        before, after = (noted.attributes.get(max(common, default=-1), {}) for noted in (mine, theirs))
        texts = (
            {name: (before.get(name, "not set"), after.get(name, "not set")) for name in [*before, *after]} if before else {}
        )
        different = [f"{name}: {one}, and {other}" for name, (one, other) in texts.items() if one != other]
        finding.attributes = different[:_NAMED]
        finding.lines = _module(folder / RUN, other / RUN) if bits else []
    return finding


def _place(difference: Difference) -> tuple[int, int]:
    """Sorts differences by when they can be seen first. Some log a step by the number of steps before it."""
    return difference.step + (difference.kind == "logged values"), _ORDER.index(difference.kind)


def _losses(step: int, mine: Seen, theirs: Seen, bits: bool, rounding: float) -> Difference | None:
    if not bits:
        loss, other = mine.loss(step), theirs.loss(step)
        close = abs(loss - other) <= rounding * max(abs(loss), abs(other), 1e-6)
        return None if close else Difference(step + 1, "losses", "of the step, its mean", f"{loss:.7g}", f"{other:.7g}")
    for number, (loss, _) in sorted(mine.losses[step].items()):
        other = theirs.losses[step].get(number, (float("nan"), 0.0))[0]
        if loss != other and not (loss != loss and other != other):
            return Difference(step + 1, "losses", f"of micro-batch {number}", f"{loss:.9g}", f"{other:.9g}")
    return None


def _module(folder: Path, other: Path) -> list[str]:
    """Returns what the fingerprints say of the place: the module whose output differs first, say."""
    if not all((one / FILE).is_file() for one in (folder, other)):
        return []
    verdict = compare(read(folder, "the first run"), read(other, "this one"))
    return [] if verdict is None or verdict.same else [line.strip() for line in verdict.lines[1:]]
