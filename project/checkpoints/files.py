"""Writes and reads checkpoints on the disk, each with a manifest that verifies it, and finds the newest intact one.

A checkpoint is a file or, where the network was spread over the ranks, a folder of parts: step-N.ckpt; beside it lies its
manifest, step-N.json: checksums, position, metrics, the run's configuration and versions. Both are written under another
name, forced to the disk and renamed, the manifest first: a checkpoint that is there has one. Where it replaces a file of its
name, it knows that file's manifest, too: one of the two is whole, whenever the process is killed.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, BinaryIO

import torch

from project.checkpoints.manifest import check_complete, manifest_at, manifest_of
from project.errors import UserError
from project.untrusted import foreign_link, open_to_read, regular_size, shortened

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{1,18})(-validation)?(_\d{1,9})?\.ckpt", re.ASCII)
_PART = re.compile(r"whole\.pt|part-\d{5}-of-\d{5}\.pt", re.ASCII)
_CHUNK = 1 << 22
_READERS = 4  # files of a checkpoint that are read at once

Entry = dict[str, Any]
"""A file in a manifest: its size and checksum, and the rank and host that have written it."""


def checkpoints_in(folder: Path) -> list[Path]:
    """Lists a folder's checkpoints, the oldest first; none of a folder elsewhere to which another user has put a link."""
    paths = [] if foreign_link(folder) else folder.glob("step-*.ckpt")
    return sorted(path for path in paths if _NAME.fullmatch(path.name))


def step_of(path: Path) -> int:
    """Returns the step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def sha256_of(file: BinaryIO) -> str:
    """Returns the SHA-256 of a file's content."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


# Reading -------------------------------------------------------------------------------------------------------------


def read_manifest(path: Path, content: bool = True) -> dict[str, Any]:
    """Returns the manifest of a checkpoint that matches it; raises a ValueError that names what is wrong otherwise.

    `content`: whether the files are read and their checksums compared, or their sizes only.
    """
    try:
        manifest = manifest_at(path)
        parts: dict[str, Entry] | None = manifest.get("parts")
        if parts is None:
            manifest["bytes"], manifest["sha256"]
        elif odd := [name for name in parts if not _PART.fullmatch(name)]:
            raise UserError(f"{odd[0]!r} is no name of a part")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"its manifest can't be read ({shortened(error)})") from error
    if parts is None:
        if path.is_dir():
            raise UserError("it is a folder, and its manifest is of a file")
        if problem := _problem(path, manifest, content):
            before: dict[str, Any] | None = manifest.get("before")
            if before is None or _problem(path, before, content):
                raise UserError(f"it {problem}")
            return before  # whoever wrote it anew was killed when its manifest had taken its place, and it had not
        return manifest
    with ThreadPool(_READERS) as readers:  # of daemons: a process that ends does not wait for them
        if problems := [*filter(None, readers.map(lambda part: part_problem(path, *part, content), parts.items()))]:
            raise UserError("; ".join(problems))
    return manifest


def part_problem(folder: Path, name: str, entry: Entry, content: bool = True) -> str:
    """Returns what is wrong with a part, and who has written it; '' if it is unchanged."""
    by = f"{name}, which rank {entry['rank']} on {entry['host']} has written,"
    try:
        problem = _problem(folder / name, entry, content)
    except (FileNotFoundError, NotADirectoryError):
        return f"{by} is missing"
    except OSError as error:
        return f"{by} can't be read ({error})"
    return f"{by} {problem}" if problem else ""


def _problem(path: Path, entry: Entry, content: bool = True) -> str:
    """Returns how a file differs from what was written, or ''."""
    size = regular_size(path)
    if size != entry["bytes"]:
        return f"has {size} bytes instead of {entry['bytes']}"
    if not content:
        return ""
    with open_to_read(path) as file:
        return "" if sha256_of(file) == entry["sha256"] else "has another checksum than its manifest says"


def newest_good(
    folder: Path, set_aside: bool = True, content: bool = True, complete: bool = False
) -> tuple[Path, dict[str, Any]] | None:
    """Returns the newest checkpoint in a folder that is whole. One that is not is reported and `set_aside`, or passed over.

    `complete`: whether its manifest must have all that a run that is resumed needs.
    """
    checkpoints = checkpoints_in(folder)
    for path in reversed(checkpoints):
        try:
            manifest = read_manifest(path, content)
            if complete:
                check_complete(manifest)
            return path, manifest
        except (ValueError, OSError) as error:
            if not set_aside:
                continue
            set_aside_as_bad(path, error)
    if checkpoints and set_aside:
        log.error("No checkpoint is left in %s: the run begins at its beginning.", folder)
    return None


def set_aside_as_bad(path: Path, error: Exception) -> None:
    """Reports a damaged checkpoint, and renames it so that it is not found again."""
    try:
        put_aside(path, ".bad")
        log.error("Checkpoint %s is not used: %s. It is set aside as %s.bad.", path, error, path.name)
    except OSError as why_not:
        log.error("Checkpoint %s is not used: %s. It can't be set aside: %s.", path, error, why_not)


# What goes -----------------------------------------------------------------------------------------------------------


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Removes a checkpoint and its manifest. A folder is first renamed: what is there is whole, or nothing."""
    if path.is_dir():
        going = path.with_name(f".{path.name}.gone")
        _remove(going)
        path.replace(going)
        path = going
    _remove(path)
    manifest_of(path.with_name(path.name.removeprefix(".").removesuffix(".gone"))).unlink(missing_ok=True)


def put_aside(path: Path, suffix: str) -> None:
    """Renames a checkpoint and its manifest so that they are not found again."""
    for file in (path, manifest_of(path)):
        if os.path.lexists(file):
            aside = file.with_name(file.name + suffix)
            if aside.is_dir() or file.is_dir():  # a folder takes nobody's place
                _remove(aside)
            file.replace(aside)


def clean_up(folder: Path) -> None:
    """Removes the files of interrupted writes."""
    for left in () if foreign_link(folder) else (*folder.glob(".step-*"), *folder.glob("step-*.json")):
        if left.name.startswith(".") or not os.path.lexists(left.with_suffix(".ckpt")):
            try:
                _remove(left)
            except OSError as error:
                log.warning("%s is left of a write that was cut off, and can't be removed: %s", left, error)


# Writing -------------------------------------------------------------------------------------------------------------


def sync(folder: Path) -> None:
    """Forces the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Fills a file under another name, forces it to the disk and gives it its name."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a write that was cut off
        with temporary.open("xb") as file:  # which follows no link that somebody has put there
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest of a checkpoint that is about to get this name."""
    text = json.dumps(manifest, indent=1).encode()
    write_file(manifest_of(path), lambda file: file.write(text))


def entry_of(path: Path) -> Entry:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": sha256_of(file)}


def write(path: Path, checkpoint: dict[str, Any], manifest: dict[str, Any]) -> int:
    """Writes a checkpoint as a file, and its manifest, and reads it back; returns how many bytes it has."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        write_file(temporary, lambda file: torch.save(checkpoint, file))
        manifest = {**manifest, **entry_of(temporary), **_replaced_manifest(path)}
        write_manifest(path, manifest)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    read_manifest(path)
    size: int = manifest["bytes"]
    return size


def _replaced_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of the file that is about to be replaced, as {'before': manifest}, or {}: file and manifest can't be
    renamed at once.
    """
    try:
        known = manifest_at(path) if path.is_file() else {}
    except (OSError, ValueError):
        return {}
    known.pop("before", None)
    return {"before": known} if known else {}


def free_name(path: Path, folder: bool) -> Path:
    """Returns the path for a checkpoint of this name. A file replaces a file; a folder is never written to twice, and so gets a
    name that comes after the one that is there: step-000000006_02.ckpt.
    """
    name, number = path, 1
    while name.is_dir() or (folder and os.path.lexists(name)):
        number += 1
        name = path.with_name(f"{path.stem}_{number:02d}{path.suffix}")
    return name


def same_step(path: Path, other: Path) -> bool:
    """Returns whether two checkpoints are of one position, written one after the other."""
    return path.stem.partition("_")[0] == other.stem.partition("_")[0]


def cause(error: BaseException | None) -> str:
    """Returns the operating system's message, if it raised the error: PyTorch's writer hides it behind an error of its own."""
    text = str(error)
    while error is not None:
        if isinstance(error, OSError):
            return str(error)
        error = error.__cause__ or error.__context__
    return text
