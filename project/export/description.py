"""Describes an export in export.json: its inputs, its outputs, and its origin."""

import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import torch
import yaml
from lightning.pytorch import Trainer

from project.checkpoints.reading import Manifest, manifest_at, sha256_of
from project.export.capture import Inputs, Samples
from project.export.check import TOLERANCE, Difference, Outputs
from project.export.folder import ABOUT
from project.export.formats import Format
from project.masking import masked
from project.typed import typed
from project.untrusted import dump_yaml, open_to_read, read_yaml, write_text

CONFIG = "config.yaml"


About: TypeAlias = dict[str, Any]
"""The content of export.json, which docs/export.md explains."""


def origin(checkpoint: Path | None) -> About:
    """Returns the run, the checkpoint, its step and its metrics, as far as they are known."""
    if checkpoint is None:
        return {"run": None, "checkpoint": None, "step": None, "metrics": {}}
    manifest: Manifest = {}
    with suppress(OSError, ValueError):  # where it was named, nobody has looked at its manifest
        manifest = manifest_at(checkpoint)
    folder = checkpoint.absolute().parent
    return {
        "run": folder.parent.name if folder.name == "checkpoints" else None,
        "checkpoint": checkpoint.name,
        "step": manifest.get("position", {}).get("global_step"),
        "metrics": manifest.get("metrics", {}),
    }


def of_tensors(samples: Samples, size: int | None, outputs: Outputs) -> About:
    """Returns names, shapes and types of inputs and outputs; 'batch' is any number of samples, 'any' any size."""
    inputs = []
    for number, name in enumerate(samples.names):
        parts = [batch[number] for batch in samples.batches]
        lengths = [{*sizes} for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        shape = [size or "batch", *("any" if len(sizes) > 1 else sizes.pop() for sizes in lengths)]
        inputs.append({"name": name, "shape": shape, "dtype": _name(parts[0].dtype)})
    made = [
        {"shape": [size or "batch", *output.shape[1:]] if output.ndim else [], "dtype": _name(output.dtype)}
        for output in outputs[0]
    ]
    return {"inputs": inputs, "outputs": made}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def of_check(samples: Samples, batches: Sequence[Inputs], to: Format, difference: Difference) -> dict[str, object]:
    """Returns what was compared, and how much it differed."""
    return {
        "samples": sum(len(batch[0]) for batch in samples.batches),
        "of": samples.origin,
        "batch_sizes": sorted({len(batch[0]) for batch in batches}, reverse=True),
        "largest_difference": difference.largest,
        "share_of_largest_output": difference.share,
        "tolerated_share": TOLERANCE[to],
    }


def finish(folder: Path, trainer: Trainer, about: About, libraries: Sequence[str]) -> None:
    """Adds size and checksum of each file, and versions, and writes `about` into the folder, with the run's configuration."""
    entries = {}
    for file in sorted(folder.iterdir()):
        with open_to_read(file) as opened:
            entries[file.name] = {"bytes": file.stat().st_size, "sha256": sha256_of(opened)}
    versions = {"python": platform.python_version(), **{name: version(name) for name in ("torch", "lightning", *libraries)}}
    about |= {"files": entries, "versions": versions}
    configuration = typed(trainer).configuration
    with suppress(OSError, ValueError, yaml.YAMLError):
        configuration = masked(read_yaml(Path(trainer.default_root_dir) / CONFIG))
    if configuration:
        write_text(folder / CONFIG, dump_yaml(configuration))
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
