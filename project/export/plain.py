"""Writes a checkpoint that lies in parts as one plain file, from which a run resumes with any strategy. It is never whole in
memory: its tensors lie in files of their own while it is written, so it takes its size on the disk twice."""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from project.checkpoints.reading import Manifest, manifest_of, read_manifest
from project.checkpoints.writing import entry_of, write_file, write_manifest
from project.errors import FaultError, UserError
from project.export import description
from project.export.folder import ABOUT, staging
from project.parts import Parted, Stored, changed
from project.plain_values import load

log = logging.getLogger(__name__)


def as_one_file(trainer: Trainer, checkpoint: Path | None, target: Path) -> Path:
    """Writes the file and its manifest into the folder `target`, and returns the file, which `--resume` takes."""
    if checkpoint is None:
        raise UserError("export --to checkpoint needs a checkpoint. HINT: --run NAME, or --ckpt_path PATH.")
    manifest = _manifest(checkpoint)
    with staging(target) as folder:
        file = folder / checkpoint.name
        if checkpoint.is_dir():
            _write(checkpoint, file)
        else:
            shutil.copyfile(checkpoint, file)
        whole = {key: value for key, value in manifest.items() if key != "parts"}
        write_manifest(file, {**whole, **entry_of(file)})
        about: description.About = {"format": "checkpoint", "file": file.name, **description.origin(checkpoint)}
        description.finish(folder, trainer, about, ())
    file = target / checkpoint.name
    size = file.stat().st_size / 1e6
    log.info("%-11s %s (%.1f MB), and beside it its manifest, %s and config.yaml", "exported", file, size, ABOUT)
    log.info("%-11s python -m project fit --config %s --run NAME --resume %s", "to go on", target / "config.yaml", file)
    return file


def _manifest(checkpoint: Path) -> Manifest:
    if not manifest_of(checkpoint).exists():
        return {}
    try:
        return read_manifest(checkpoint)
    except FaultError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(f"Checkpoint {checkpoint} can't be used: {error}. HINT: take an older one.") from error


def _write(checkpoint: Path, file: Path) -> None:
    parted = Parted(checkpoint, load)
    with TemporaryDirectory(dir=file.parent, prefix=".tensors-") as place:
        content = parted.checkpoint(lambda stored: _on_disk(stored, Path(place) / "tensor"))
        write_file(file, lambda opened: torch.save(content, opened))
    _compare(parted, load(file))


def _on_disk(stored: Stored, file: Path) -> Tensor:
    """Returns a tensor, assembled in a file that disappears with the tensor."""
    if not stored.all.count:
        return stored.read()
    size = stored.all.count * stored.dtype.itemsize
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, size)  # a disk that is full is an error here, and the end of the process later
    storage = torch.UntypedStorage.from_file(str(file), True, size)
    file.unlink()
    flat = torch.empty(0, dtype=stored.dtype).set_(storage)  # type: ignore[arg-type]
    return stored.fill(flat.view(stored.shape), stored.all)


def _compare(parted: Parted, written: Mapping[str, object]) -> None:
    """Compares the written file with the checkpoint, tensor by tensor, as it will be read."""
    written_tensors: dict[str, object] = {}
    changed(written, lambda value, name: written_tensors.setdefault(name, value))

    def compare(stored: Stored) -> None:
        tensors = cast(Tensor, written_tensors[stored.name]), stored.read()
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        if not torch.equal(*bits):
            raise FaultError(f"The file has another {stored.name} than the checkpoint. HINT: it is left out; is the disk well?")

    parted.checkpoint(compare)
