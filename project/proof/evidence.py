"""Reads the records of a trial, and finds the first difference from another one, its likely cause, and a remedy."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from project.proof.plan import RUN, Trial
from project.proof.states import Compared, Difference, compare_states
from project.watch.comparison import compare
from project.watch.fingerprint_file import FILE, read

_NAMED = 5  # attributes
_ROUNDING = 1e-3  # of a loss, relative, in a few steps
_COARSE = 3e-2  # with 16 bits
_MOVED = 10  # times as much: of what moves beside the optimiser
_VALIDATED = "validation samples"
_SAMPLES = ("samples", _VALIDATED)
_ORDER = (
    *("samples", "losses", "weights", "buffers", "optimiser states", "schedules", _VALIDATED),
    *("other states", "logged values"),
)
_SAVE = "HINT: make it a buffer (register_buffer), or save it in on_save_checkpoint and take it back in on_load_checkpoint."
_DRAW = (
    "HINT: draw from torch's, Python's or NumPy's own generators, which are seeded for each micro-batch; or save the "
    "generator's state in on_save_checkpoint and take it back in on_load_checkpoint."
)
_GENERATOR = re.compile(r"Generator|random\.|RandomState")
_OWN_DRAW = (
    "HINT: {} is a generator of its own, whose place is saved nowhere: in __getitem__ and collate_fn draw from torch's, "
    "Python's or NumPy's own generators (torch.randn without generator=), which are seeded for each sample."
)
_COUNT = "HINT: what counts a rank's own micro-batches depends on the number of ranks: go by trainer.global_step."
_CLOCK = (
    "HINT: no sample may depend on the clock, os.urandom, the hash of a string, the order of a folder or set, or a generator "
    "of its own: look at the dataset, collate_fn and on_after_batch_transfer."
)
_WORKERS = (
    "HINT: what a dataset or collate_fn remembers from item to item is another in each loader process: make an item a function "
    "of its index."
)
_DEALT = (
    "HINT: a plain DataLoader over a dataset with indices gives the same samples after a kill and on any number of ranks; what "
    "is drawn when the data is set up (random_split) takes a generator with a seed."
)
_RANKS = (
    "HINT: look for what goes by the rank, by batch_idx or by torch.distributed, and for random numbers that are not torch's, "
    "Python's or NumPy's own."
)
_EACH = (
    "HINT: each rank moves it by its own micro-batches: move it once a step, in on_before_optimizer_step, by what all ranks "
    "have."
)
_STATES = "HINT: what is saved there must be a function of the steps, and be taken back when the run resumes."
_HIDDEN = (
    "HINT: the step depends on something that is in no checkpoint: a global variable, a closure, an object without a state, "
    "the clock, a generator of its own."
)
Noted = dict[str, dict[int, list[object]]]
"""The records of the ranks of a trial: values by kind and step."""


def noted(folder: Path) -> Noted:
    """Reads the records of all ranks. A step, or a validation, that began again counts as its last repetition."""
    whole: Noted = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.glob("record-*.jsonl")):
        entries: dict[tuple[str, int], list[object]] = defaultdict(list)
        for line in path.read_text().splitlines():
            kind, step, values = json.loads(line)
            if kind == "begins":
                kept = {key: items for key, items in entries.items() if key[1] < step or key == (_VALIDATED, step)}
                entries = defaultdict(list, kept)
            elif kind == "validates":
                entries.pop((_VALIDATED, step), None)
            entries[kind, step] += values
        for (kind, step), values in entries.items():
            whole[kind][step] += values
    return whole


def compare_trials(trial: Trial, folder: Path, other: Path, coarse: bool) -> tuple[Compared, Difference | None, list[str]]:
    """Compares a trial's folder with the reference's: how much was compared, the first difference, and lines on its cause.

    `coarse`: numbers have 16 bits.
    """
    reference, tested, bits = noted(folder), noted(other), "bits" in trial.kept
    begins = min(tested["begins"])  # where it resumes from another one's checkpoint
    compared = compare_states(folder / RUN, other / RUN, not trial.other_ranks) if bits else Compared()
    for kind in _SAMPLES:
        for step in sorted(at for at in reference[kind].keys() | tested[kind].keys() if at >= begins + (kind == _VALIDATED)):
            samples, others = (sorted(cast(list[str], record[kind].get(step, []))) for record in (reference, tested))
            compared.counts[kind] += len(samples)
            if samples != others:
                what = f"{len(samples)} at this step, {len({*samples} ^ {*others})} in one of them only"
                compared.differences.append(Difference(step + (kind == "samples"), kind, what))
    compared.counts["steps"] += sum(at >= begins for at in reference["samples"])
    if bits or "losses" in trial.kept:
        for kind in ("losses", "buffers"):
            rounding = 0.0 if bits else _COARSE if coarse else _ROUNDING
            compared.differences += _numbers(kind, reference, tested, rounding)
        compared.counts["losses"] += sum(map(len, reference["losses"].values()))
    first = min(compared.differences, key=_place, default=None)
    if first is None:
        return compared, None, []
    attributes = _attributes(reference, tested, max(1, first.step) + trial.other_ranks)
    lines = _module(folder / RUN, other / RUN) if bits else []
    lines += [f"It differs there, too, and is in no state that is compared: {attribute}." for attribute in attributes]
    lines += (order := _from_log(other / RUN / "log.txt"))
    return compared, first, [*lines, _hint(first.kind, trial, attributes, bool(order))]


def _place(difference: Difference) -> tuple[int, int]:
    """Returns the sort key of a difference: when it can be seen first. Some log a step by the number of steps before it."""
    return difference.step + (difference.kind == "logged values"), _ORDER.index(difference.kind)


def _numbers(kind: str, reference: Noted, tested: Noted, rounding: float) -> Iterator[Difference]:
    """Yields the first number of each step that differs. Each has a name, a value, and a scale for its rounding."""
    for step in sorted(reference[kind].keys() & tested[kind].keys()):
        own, new = (cast(list[tuple[str, float, float]], record[kind][step]) for record in (reference, tested))
        others = {name: value for name, value, _ in new}
        most = max((size for _, _, size in own), default=0.0)
        for name, value, size in sorted(own):
            other = others.get(name, float("nan"))
            tolerance = rounding * (most if kind == "losses" else _MOVED * size)
            if not (value == other or abs(value - other) <= tolerance or (value != value and other != other)):
                yield Difference(step + (kind == "losses"), kind, name, f"{value:.9g}", f"{other:.9g}")
                break


# Where it comes from -------------------------------------------------------------------------------------------------


def _attributes(reference: Noted, tested: Noted, until: int) -> list[str]:
    """Returns what users' objects keep that differs, in the last step before this one that both have on record."""
    both = reference["attributes"].keys() & tested["attributes"].keys()
    last = max((at for at in both if at < until), default=-1)
    before, after = (dict(cast(list[tuple[str, str]], record["attributes"].get(last, []))) for record in (reference, tested))
    values = {name: (before.get(name, "not set"), after.get(name, "not set")) for name in [*before, *after]}
    return [f"{name}: {value}, and {other}" for name, (value, other) in values.items() if value != other][:_NAMED]


def _module(folder: Path, other: Path) -> list[str]:
    """Returns the place that the fingerprints report: the module whose output differs first, say."""
    if not all((run / FILE).is_file() for run in (folder, other)):
        return []
    verdict = compare(read(folder, "the first run"), read(other, "this one"))
    return [] if verdict is None or verdict.same else [line.strip() for line in verdict.lines[1:]]


def _from_log(path: Path) -> list[str]:
    """Returns lines of the run's own log about the order of its samples."""
    text = path.read_text() if path.is_file() else ""
    return list(dict.fromkeys(re.findall(r"The \w+ loader \(.*gives its samples in its own order.*", text)))


def _hint(kind: str, trial: Trial, attributes: list[str], own_order: bool) -> str:
    ranks_differ = trial.other_ranks
    drawn = [attribute.partition(":")[0] for attribute in attributes if _GENERATOR.search(attribute)]
    if kind in _SAMPLES and drawn:
        return _OWN_DRAW.format(", ".join(drawn))
    if kind in _SAMPLES:
        return _DEALT if own_order or ranks_differ else _WORKERS if trial.name == "workers" else _CLOCK
    if attributes:
        return _DRAW if drawn else _COUNT if ranks_differ else _SAVE
    by_kind = {"buffers": _EACH if ranks_differ else _SAVE, "other states": _STATES}
    return by_kind.get(kind, _RANKS if ranks_differ else _HIDDEN)
