"""Compares the checkpoints and logged values of two runs, beside their fingerprints.

`project same` and `project prove` both ask here.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from project.checkpoints.reading import SafeCheckpointIO, checkpoints_in, step_of
from project.watch.curves import Curves
from project.watch.history import of_the_module

# What says where and when a run ran, or follows from what is compared.
_ASIDE = {
    *("configuration", "global_batch", "pytorch-lightning_version", "loops", "position", "hyper_parameters", "hparams_name"),
    *("hparams_type", "datamodule_hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type", "callback_metrics"),
    *("states_of_ranks", "schedules_as_built", "unsaved_values"),
}
_OF_RANKS = {"logged_sums", "metric_states"}
"""The parts that each number of ranks keeps in another form."""
_CLOCKS = {"time_elapsed"}
"""The states of Lightning's Timer."""
_MONITOR = "DeviceStatsMonitor."
_KINDS = {
    "state_dict": "weights",
    "current_model_state": "weights",
    "optimizer_states": "optimiser states",
    "lr_schedulers": "schedules",
}


@dataclass(frozen=True)
class Difference:
    """The first difference: after how many steps, of which kind, and its name."""

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

    counts: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    def count(self, kind: str, many: int = 1) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + many

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

    Args:
        folder: of a run.
        other: of the other one.
        same_ranks: False leaves out what each number of ranks keeps in another form.
    """
    compared = Compared()
    other_checkpoints = {path.name: path for path in checkpoints_in(other / "checkpoints")}
    for path in checkpoints_in(folder / "checkpoints"):
        if path.name in other_checkpoints:
            _compare_checkpoints(compared, step_of(path), path, other_checkpoints[path.name], same_ranks)
    _compare_curves(compared, folder, other)
    return compared


# Checkpoints ---------------------------------------------------------------------------------------------------------


def _compare_checkpoints(compared: Compared, step: int, path: Path, other: Path, same_ranks: bool) -> None:
    aside = _ASIDE if same_ranks else _ASIDE | _OF_RANKS
    values, other_values = (dict(_flattened(file, aside)) for file in (path, other))
    counts = dict.fromkeys(("weights", "optimiser states", "schedules", "other states"), 0)
    for key in dict.fromkeys([*values, *other_values]):
        kind = _KINDS.get(key[0], "other states")
        counts[kind] += 1
        if key not in values or key not in other_values:
            texts = ["there" if key in content else "missing" for content in (values, other_values)]
        elif alike(values[key], other_values[key]):
            continue
        else:
            texts = [_text(content[key]) for content in (values, other_values)]
        compared.differences.append(Difference(step, kind, _name(key), *texts))
    compared.count("checkpoints")
    compared.counts |= counts  # of one checkpoint, the last one


def _flattened(path: Path, aside: set[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each value of a checkpoint, with the keys that lead to it; a path is given without the run's folder."""
    run = str(path.parent.parent.absolute())

    def walk(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if isinstance(value, Mapping):
            for key, item in value.items():
                if key in _CLOCKS and keys[0] == "callbacks":
                    continue
                yield from walk(item, (*keys, str(key).replace(run, "RUN")))
        elif isinstance(value, (list, tuple)):
            for at, item in enumerate(value):
                yield from walk(item, (*keys, str(at)))
        else:
            yield keys, str(value).replace(run, "RUN") if isinstance(value, (str, Path)) else value

    for key, part in SafeCheckpointIO().load_checkpoint(path).items():
        if key not in aside:
            yield from walk(part, (str(key),))


def _name(keys: tuple[str, ...]) -> str:
    if keys[0] == "state_dict":
        return ".".join(keys[1:])
    if keys[0] == "callbacks" and len(keys) > 1:
        return f"{'.'.join(keys[2:])} of the callback {keys[1].partition('{')[0]}"
    return ".".join(keys)


def alike(value: Any, other: Any) -> bool:
    """Returns whether two values have the same bits; NaN is NaN."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.dtype == other.dtype and value.shape == other.shape and _same_bits(value, other)
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
        return value.dtype == other.dtype and value.shape == other.shape and value.tobytes() == other.tobytes()
    if isinstance(value, float) and isinstance(other, float):
        return value == other or (math.isnan(value) and math.isnan(other))
    return type(value) is type(other) and bool(value == other)


def _same_bits(left: Tensor, right: Tensor) -> bool:
    if left.is_sparse or left.is_quantized:
        return torch.equal(left, right)
    left_bits, right_bits = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(left_bits, right_bits)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else ""
    return "" if isinstance(value, np.ndarray) else str(value)[:60]


# Logged values -------------------------------------------------------------------------------------------------------


def _compare_curves(compared: Compared, folder: Path, other: Path) -> None:
    curves, other_curves = (_curves(run) for run in (folder, other))
    for tag in sorted(curves.keys() & other_curves.keys()):
        for step in sorted(curves[tag].keys() & other_curves[tag].keys()):
            compared.count("logged values")
            if not alike(value := curves[tag][step], against := other_curves[tag][step]):
                compared.differences.append(Difference(step, "logged values", tag, f"{value:g}", f"{against:g}"))
                break


def _curves(folder: Path) -> dict[str, dict[int, float]]:
    curves = Curves(folder).read()
    tags = [tag for tag in curves if of_the_module(tag) and not tag.startswith(_MONITOR)]
    return {tag: {point.step: point.value for point in curves[tag]} for tag in tags}
