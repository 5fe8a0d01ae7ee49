"""Checks that the file is as good as the checkpoint: a fresh process loads it, and the outputs are compared."""

import io
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor

from project.errors import FaultError, UserError
from project.export import fresh
from project.export.capture import Inputs

TOLERANCE = {"safetensors": 0.0, "torch-export": 1e-5, "onnx": 1e-4}
"""By format: how far an output may be off, as a share of the largest one of its batch."""

Outputs = list[list[Tensor]]
"""The outputs of each batch."""


class Difference(NamedTuple):
    """The largest difference, absolute and as a share of the largest output of its batch."""

    largest: float = 0.0
    share: float = 0.0


def outputs(network: Callable[..., object], batches: Sequence[Inputs]) -> Outputs:
    """Returns the outputs of the checkpoint's network for the batches, on the CPU."""
    with torch.no_grad():
        return [[_tensor(leaf) for leaf in fresh.flattened(network(*batch))] for batch in batches]


def _tensor(leaf: object) -> Tensor:
    if not isinstance(leaf, (Tensor, int, float)):
        raise UserError(
            f"forward returns a {type(leaf).__name__}. HINT: tensors go out, alone or in lists, tuples and dicts; "
            "--to safetensors exports the weights alone."
        )
    return torch.as_tensor(leaf).clone()


def loaded(form: str, file: Path, batches: Sequence[Inputs] = ()) -> object:
    """Returns the outputs of the file's network, or the weights by name of one that has only these, from a fresh process
    without this package.
    """
    with TemporaryDirectory(dir=file.parent) as place:
        inputs, results, content = Path(place) / "inputs", Path(place) / "outputs", io.BytesIO()
        torch.save(list(batches), content)  # into memory: on a full disk it ends the process
        inputs.write_bytes(content.getbuffer())
        command = [sys.executable, "-c", Path(fresh.__file__).read_text(), form, file.name, str(inputs), str(results)]
        done = subprocess.run(command, cwd=file.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise FaultError(f"The exported file can't be used: in a process without this project, {reason}")
        return torch.load(results, weights_only=True)


def compare(wanted: Outputs, results: Outputs, tolerance: float) -> Difference:
    """Returns the largest difference; raises a UserError beyond the tolerance, which is a share of the largest output."""
    worst = Difference()
    for expected, exported in zip(wanted, results, strict=True):
        if (kinds := _kinds(exported)) != (wanted_kinds := _kinds(expected)):
            raise FaultError(f"The exported network's outputs are {kinds}, and the checkpoint's {wanted_kinds}.")
        for difference in map(_difference, expected, exported):
            if not difference.share <= worst.share:
                worst = difference
    if not worst.share <= tolerance:
        raise FaultError(
            f"The exported network is another one: its outputs differ by up to {worst.largest:.2g}, which is {worst.share:.1e} "
            f"of the largest output, and {tolerance:.0e} is tolerated. HINT: the export is left out; another --to may do."
        )
    return worst


def _kinds(values: Sequence[Tensor]) -> str:
    return ", ".join(f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}" for value in values) or "none"


def _difference(expected: Tensor, exported: Tensor) -> Difference:
    left, right = (value.to(torch.complex128 if value.is_complex() else torch.float64) for value in (expected, exported))
    finite = left.isfinite()
    alike = torch.allclose(left[~finite], right[~finite], rtol=0, atol=0, equal_nan=True)
    if not alike or not torch.equal(finite, right.isfinite()):
        return Difference(float("inf"), float("inf"))
    if torch.equal(left[finite], right[finite]):
        return Difference()
    largest, scale = (value[finite].abs().max().item() for value in (left - right, left))
    return Difference(largest, largest / scale if scale else float("inf"))
