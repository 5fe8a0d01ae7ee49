"""Checks that the file is as good as the checkpoint: a fresh process loads it, and the outputs are compared."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from project.errors import UserError
from project.export import fresh
from project.export.capture import Inputs

TOLERANCE = {"safetensors": 0.0, "torch-export": 1e-5, "onnx": 1e-4}
"""By format: how far an output may be off, as a share of the largest one of its batch."""

Outputs = list[list[np.ndarray[Any, Any]]]
"""Of each batch, its outputs."""


@dataclass
class Difference:
    """The largest difference, absolute and as a share of the largest output of its batch."""

    largest: float
    share: float


def outputs(network: nn.Module, batches: Sequence[Inputs]) -> Outputs:
    """Returns the outputs of the checkpoint's network for the batches, on the CPU."""
    with torch.no_grad():
        return [[_array(leaf) for leaf in fresh.flattened(network(*batch))] for batch in batches]


def _array(leaf: Any) -> np.ndarray[Any, Any]:
    if not isinstance(leaf, (Tensor, int, float)):
        raise UserError(
            f"forward returns a {type(leaf).__name__}. HINT: tensors go out, alone or in lists, tuples and dicts; "
            "--to safetensors exports the weights alone."
        )
    return torch.as_tensor(leaf).numpy().copy()


def loaded(form: str, file: Path, batches: Sequence[Inputs]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the outputs of the file in a fresh process without this package."""
    inputs, results = file.with_name(".inputs.npz"), file.with_name(".outputs.npz")
    try:
        named = {f"{at} {number}": part.numpy() for at, batch in enumerate(batches) for number, part in enumerate(batch)}
        np.savez(inputs, **named)  # type: ignore[arg-type]
        source = Path(fresh.__file__).read_text()
        command = [sys.executable, "-c", source, form, file.name, inputs.name, results.name]
        done = subprocess.run(command, cwd=file.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UserError(f"The exported file can't be used: in a process without this project, {reason}")
        with np.load(results) as archive:
            return {name: archive[name] for name in archive}
    finally:
        inputs.unlink(missing_ok=True)
        results.unlink(missing_ok=True)


def in_batches(arrays: Mapping[str, np.ndarray[Any, Any]], count: int) -> Outputs:
    """Returns the outputs of a fresh process, batch by batch."""
    return [[value for name, value in arrays.items() if name.split()[0] == str(at)] for at in range(count)]


def compare(wanted: Outputs, results: Outputs, tolerance: float) -> Difference:
    """Returns the largest difference; raises a UserError beyond the tolerance, which is a share of the largest output."""
    worst = Difference(0.0, 0.0)
    for expected, exported in zip(wanted, results, strict=True):
        shapes = [[(value.shape, value.dtype.name) for value in values] for values in (expected, exported)]
        if shapes[0] != shapes[1]:
            raise UserError(f"The exported network's outputs are {_text(shapes[1])}, and the checkpoint's {_text(shapes[0])}.")
        for expected_value, exported_value in zip(expected, exported, strict=True):
            difference = _difference(expected_value, exported_value)
            if not difference.share <= worst.share:
                worst = difference
    if not worst.share <= tolerance:
        raise UserError(
            f"The exported network is another one: its outputs differ by up to {worst.largest:.2g}, which is {worst.share:.1e} "
            f"of the largest output, and {tolerance:.0e} is tolerated. HINT: the export is left out; another --to may do."
        )
    return worst


def _difference(expected: np.ndarray[Any, Any], exported: np.ndarray[Any, Any]) -> Difference:
    if expected.tobytes() == exported.tobytes():
        return Difference(0.0, 0.0)
    left, right = (value.astype(np.complex128 if np.iscomplexobj(value) else np.float64) for value in (expected, exported))
    finite = np.isfinite(left)
    if not np.array_equal(left[~finite], right[~finite], equal_nan=True):
        return Difference(float("inf"), float("inf"))
    largest = float(np.abs(left[finite] - right[finite]).max(initial=0.0))
    scale = float(np.abs(left[finite]).max(initial=0.0))
    return Difference(largest, largest / scale if scale else float("inf") if largest else 0.0)


def _text(shapes: Sequence[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{dtype} {shape}" for shape, dtype in shapes) or "none"
