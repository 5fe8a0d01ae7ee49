"""Describes an export in export.json: its inputs, its outputs, and its origin."""

import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer

from project.checkpoints.files import sha256_of
from project.checkpoints.manifest import manifest_at
from project.export.capture import Inputs, Samples
from project.export.check import TOLERANCE, Difference, Outputs
from project.export.formats import LIBRARIES, Format
from project.masking import masked
from project.typed import typed
from project.untrusted import open_to_read, read_yaml, write_text

CONFIG = "config.yaml"


def origin(checkpoint: Path | None) -> dict[str, Any]:
    """Returns the run, the checkpoint, its step and its metrics, as far as they are known."""
    manifest: dict[str, Any] = {}
    if checkpoint is not None:
        with suppress(OSError, ValueError):  # where it was named, nobody has looked at its manifest
            manifest = manifest_at(checkpoint)
    in_run = checkpoint is not None and checkpoint.absolute().parent.name == "checkpoints"
    return {
        "run": checkpoint.absolute().parents[1].name if checkpoint is not None and in_run else None,
        "checkpoint": checkpoint.name if checkpoint is not None else None,
        "step": manifest.get("position", {}).get("global_step"),
        "metrics": manifest.get("metrics", {}),
    }


def of_versions(to: Format) -> dict[str, str]:
    """Returns the versions of the libraries that made the export."""
    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "lightning", *LIBRARIES[to])}}


def of_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns size and checksum of each file."""
    entries = {}
    for file in sorted(folder.iterdir()):
        with open_to_read(file) as opened:
            entries[file.name] = {"bytes": file.stat().st_size, "sha256": sha256_of(opened)}
    return entries


def of_tensors(samples: Samples, size: int | None, outputs: Outputs) -> dict[str, Any]:
    """Returns names, shapes and types of inputs and outputs; 'batch' is any number of samples."""
    inputs = []
    for number, name in enumerate(samples.names):
        parts = [batch[number] for batch in samples.batches]
        shape: list[int | str] = [size or "batch"]
        shape += [
            length if len({part.shape[at] for part in parts}) == 1 else "any" for at, length in enumerate(parts[0].shape) if at
        ]
        inputs.append({"name": name, "shape": shape, "dtype": str(parts[0].dtype).removeprefix("torch.")})
    made = [
        {"shape": [size or "batch", *output.shape[1:]] if output.ndim else [], "dtype": output.dtype.name}
        for output in outputs[0]
    ]
    return {"inputs": inputs, "outputs": made}


def of_check(samples: Samples, batches: Sequence[Inputs], to: Format, difference: Difference) -> dict[str, Any]:
    """Returns what was compared, and how much it differed."""
    return {
        "samples": samples.count,
        "of": samples.origin,
        "batch_sizes": sorted({len(batch[0]) for batch in batches}, reverse=True),
        "largest_difference": difference.largest,
        "share_of_largest_output": difference.share,
        "tolerated_share": TOLERANCE[to],
    }


def copy_config(trainer: Trainer, folder: Path) -> None:
    """Copies the run's configuration into the folder of the export."""
    configuration = typed(trainer).configuration
    with suppress(OSError, ValueError, yaml.YAMLError):
        configuration = masked(read_yaml(Path(trainer.default_root_dir) / CONFIG))
    if configuration:
        write_text(folder / CONFIG, yaml.safe_dump(configuration, sort_keys=False))
