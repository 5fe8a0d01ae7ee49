"""Compares the checkpoints and logged values of two runs, beside their fingerprints, for `project same` and `project prove`."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from project.checkpoints.reading import SafeCheckpointIO, checkpoints_in, step_of
from project.watch.curves import Curves
from project.watch.history import FILE, lives_of, of_the_module

_ASIDE = {
    *("configuration", "global_batch", "pytorch-lightning_version", "loops", "position", "hyper_parameters", "hparams_name"),
    *("hparams_type", "datamodule_hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type", "callback_metrics"),
    *("states_of_ranks", "schedules_as_built", "changed_values"),
}
"""Parts of a checkpoint that tell where and when a run ran, or follow from what is compared."""
_OF_RANKS = {"logged_sums", "metric_states"}
"""The parts that each number of ranks keeps in another form."""
_CLOCK = "time_elapsed"  # of Lightning's Timer
_MONITOR = "DeviceStatsMonitor."
_KINDS = {
    "state_dict": "weights",
    "current_model_state": "weights",
    "optimizer_states": "optimiser states",
    "lr_schedulers": "schedules",
}
_OTHER = "other states"
Keys = tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """A difference: after how many steps, of which kind, and its name."""

    step: int
    kind: str
    name: str
    value: str = ""
    other_value: str = ""

    def __str__(self) -> str:
        values = f": {self.value}, and {self.other_value}" if self.value or self.other_value else ""
        return f"{self.kind}: {self.name}{values}"


@dataclass
class Compared:
    """The number of compared values of each kind (of a checkpoint's values, how many it has), and the differences."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)

    @property
    def firsts(self) -> list[Difference]:
        """Returns the first difference of each kind, the earliest first."""
        kinds: dict[str, Difference] = {}
        for difference in sorted(self.differences, key=lambda entry: entry.step):
            kinds.setdefault(difference.kind, difference)
        return list(kinds.values())

    def __str__(self) -> str:
        return ", ".join(f"{many} {kind}" for kind, many in self.counts.items() if many)


def compare_states(folder: Path, other: Path, same_ranks: bool = True) -> Compared:
    """Compares all checkpoints of steps that both runs still have, and all values that both have logged.

    `same_ranks`: False leaves out what each number of ranks keeps in another form.
    """
    compared = Compared()
    aside = _ASIDE if same_ranks else _ASIDE | _OF_RANKS
    others = {path.name: path for path in checkpoints_in(other / "checkpoints")}
    for path in checkpoints_in(folder / "checkpoints"):
        if path.name in others:
            _compare_checkpoints(compared, path, others[path.name], aside)
    curves, other_curves = (_curves(run) for run in (folder, other))
    for tag in sorted(curves.keys() & other_curves.keys()):
        for step in sorted(curves[tag].keys() & other_curves[tag].keys()):
            compared.counts["logged values"] += 1
            if not alike(value := curves[tag][step], against := other_curves[tag][step]):
                compared.differences.append(Difference(step, "logged values", tag, f"{value:g}", f"{against:g}"))
                break
    return compared


def _compare_checkpoints(compared: Compared, path: Path, other: Path, aside: set[str]) -> None:
    values, other_values = (dict(_flattened(file, aside)) for file in (path, other))
    kinds = {key: _KINDS.get(key[0], _OTHER) for key in values | other_values}
    for key, kind in kinds.items():
        if key not in values or key not in other_values:
            texts = ["there" if key in content else "missing" for content in (values, other_values)]
        elif alike(values[key], other_values[key]):
            continue
        else:
            texts = [_text(content[key]) for content in (values, other_values)]
        compared.differences.append(Difference(step_of(path), kind, _name(key), *texts))
    compared.counts["checkpoints"] += 1
    for kind in dict.fromkeys((*_KINDS.values(), _OTHER)):  # of one checkpoint, the last one
        compared.counts[kind] = list(kinds.values()).count(kind)


def _flattened(path: Path, aside: set[str]) -> Iterator[tuple[Keys, object]]:
    """Yields each value of a checkpoint, with the keys that lead to it; a path is given without the run's folder."""
    run = str(path.parent.parent.absolute())

    def walk(value: object, keys: Keys) -> Iterator[tuple[Keys, object]]:
        if isinstance(value, Mapping):
            for key, item in value.items():
                if key != _CLOCK or keys[0] != "callbacks":
                    yield from walk(item, (*keys, str(key).replace(run, "RUN")))
        elif isinstance(value, (list, tuple)):
            for at, item in enumerate(value):
                yield from walk(item, (*keys, str(at)))
        else:
            yield keys, str(value).replace(run, "RUN") if isinstance(value, (str, Path)) else value

    for key, part in SafeCheckpointIO().load_checkpoint(path).items():
        if key not in aside:
            yield from walk(part, (str(key),))


def _name(keys: Keys) -> str:
    if keys[0] == "state_dict":
        return ".".join(keys[1:])
    if keys[0] == "callbacks" and len(keys) > 1:
        return f"{'.'.join(keys[2:])} of the callback {keys[1].partition('{')[0]}"
    return ".".join(keys)


def alike(value: object, other: object) -> bool:
    """Returns whether two values have the same bits; NaN is NaN."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        if (value.dtype, value.shape, value.layout) != (other.dtype, other.shape, other.layout):
            return False
        if value.is_quantized:
            return torch.equal(value, other)
        if value.layout != torch.strided:
            return all(map(alike, _parts(value), _parts(other)))
        bits, other_bits = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (value, other))
        return torch.equal(bits, other_bits)
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
        return (value.dtype, value.shape, value.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(value, float) and isinstance(other, float):  # one of them may be NumPy's
        return value == other or (value != value and other != other)
    return type(value) is type(other) and bool(value == other or (value != value and other != other))


def _parts(sparse: Tensor) -> list[Tensor]:
    """Returns the strided tensors that a sparse one is made of: as a whole it may be larger than any memory."""
    if sparse.layout == torch.sparse_coo:
        sparse = sparse.coalesce()
        return [sparse.indices(), sparse.values()]
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [sparse.crow_indices(), sparse.col_indices(), sparse.values()]
    return [sparse.ccol_indices(), sparse.row_indices(), sparse.values()]


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else ""
    return "" if isinstance(value, np.ndarray) else str(value)[:60]


def _curves(folder: Path) -> dict[str, dict[int, float]]:
    curves = Curves(folder).read()
    tags = [tag for tag in curves if of_the_module(tag) and not tag.startswith(_MONITOR)]
    lives = lives_of(folder / FILE)
    # An evaluation after the fit logs under the fit's names and last step. A time is written with three digits.
    end = lives[-1].end + 1e-3 if lives and lives[-1].state != "killed" else float("inf")
    return {tag: {point.step: point.value for point in curves[tag] if point.time <= end} for tag in tags}
