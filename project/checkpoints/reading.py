"""Reads checkpoints from the disk: names, manifests and files, each verified before it is used.

A checkpoint is a file or, where the network is sharded, a folder of parts (project/parts.py): step-N.ckpt. Beside it lies its
manifest, step-N.json: checksums, position, metrics, the run's configuration and versions. Any user may have written them: each
value of a manifest is checked to be of its kind, and no code runs from a file unless the user trusts it.
"""

import errno
import hashlib
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, BinaryIO, TypedDict, cast

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.serialization import MAP_LOCATION

from project.cluster.place import MEMORY
from project.errors import TRY_AGAIN, FaultError, UserError, as_user_error
from project.parts import Parted, Stored, load_part
from project.plain_values import finished, load, plain_values
from project.typed import Configuration, StateDict
from project.untrusted import as_count, as_text, foreign_link, open_to_read, read_json, regular_size, shortened

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{1,18})(-validation)?(_\d{1,9})?\.ckpt", re.ASCII)
_WRITTEN = re.compile(r"step-\d{1,18}(-validation)?(_\d{1,9})?\.(ckpt|json)\b", re.ASCII)
_PART = re.compile(r"whole\.pt|part-\d{5}-of-\d{5}\.pt", re.ASCII)
_CHUNK = 1 << 22
_FOLDERS = 1000  # of one name, with numbers
_READERS = 4  # files of a checkpoint that are read at once
_SMALL = 1 << 20  # bytes: what is not cut into slices, and would keep the file open, is copied
_COUNTS = {"epoch", "step", "global_step", "logged_steps"}
_MISPLACED = {None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM}
"""The errors of a file that is not what was written there. All others come from the disk, the network or this process."""
_OPENED: dict[Path, Parted] = {}
"""The state in memory that rank 0 has found to be readable, until it reads it."""
_SWITCHES = ("epoch_over", "validation_due", "begun", "schedules_due")  # of a position; the rest of it are counts


class Content(TypedDict, total=False):
    """A file's size and checksum."""

    bytes: int
    sha256: str


class Entry(Content, total=False):
    """A part of a checkpoint, and the rank and host that have written it."""

    rank: int
    host: str


class Manifest(Content, total=False):
    """The manifest of a checkpoint. One that is a file has a size and a checksum, one of parts their entries."""

    configuration: Configuration | None
    position: dict[str, int]
    finished: bool
    logged: list[tuple[int, str, float]]
    """What was logged for this step and later ones: the step, the name and the value."""
    metrics: dict[str, float]
    world_size: int
    versions: dict[str, str] | None
    image: str | None
    saved: str
    parts: dict[str, Entry]
    before: "Manifest"
    """The manifest of the file that this one replaces."""


# Names ---------------------------------------------------------------------------------------------------------------


def checkpoints_in(folder: Path) -> list[Path]:
    """Lists a folder's checkpoints, the oldest first; none of a folder elsewhere to which another user has put a link."""
    paths = [] if foreign_link(folder) else folder.glob("step-*.ckpt")
    return sorted(path for path in paths if is_checkpoint(path.name))


def is_checkpoint(name: str) -> bool:
    """Returns whether this is the name of a checkpoint that this project has written."""
    return _NAME.fullmatch(name) is not None


def written_in(folder: Path) -> list[Path]:
    """Lists what this project has written into a folder of checkpoints: also manifests, and what was set aside."""
    return [path for path in folder.glob("step-*") if _WRITTEN.match(path.name)]


def is_url(path: str | Path | None) -> bool:
    """Returns whether a path is a URL, which fsspec reads; a `Path` of one has lost a slash."""
    return re.match(r"[a-zA-Z][\w.+:-]+:/", str(path or "")) is not None


def new_folder(folder: Path) -> Path:
    """Makes a folder of this name, or with a number after it, and returns it: making it is what takes the name."""
    for path in (folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, _FOLDERS))):
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise FileExistsError(f"{folder} and {_FOLDERS} of its names are there")


def step_of(path: Path) -> int:
    """Returns the step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


def same_step(path: Path, other: Path) -> bool:
    """Returns whether two checkpoints are of one position, written one after the other."""
    return path.stem.partition("_")[0] == other.stem.partition("_")[0]


def manifest_of(path: Path) -> Path:
    return path.with_suffix(".json")


def delete(path: Path) -> None:
    """Deletes a file, a link or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put_aside(path: Path, suffix: str) -> None:
    """Renames a checkpoint and its manifest so that they are not found again."""
    for file in (path, manifest_of(path)):
        if os.path.lexists(file):
            aside = file.with_name(file.name + suffix)
            if aside.is_dir() or file.is_dir():  # a folder takes nobody's place
                delete(aside)
            file.replace(aside)


def set_aside_later(step: int, folder: Path) -> None:
    """Renames the checkpoints of later steps than that from which a run is to resume: its next start would take the newest."""
    for path in checkpoints_in(folder):
        if step_of(path) > step:
            log.info("%s is of a later step and is set aside.", path)
            put_aside(path, ".later")


def set_aside_as_bad(path: Path, error: Exception) -> None:
    """Reports a damaged checkpoint, and renames it so that it is not found again."""
    outcome = f"is set aside as {path.name}.bad"
    try:
        put_aside(path, ".bad")
    except OSError as why_not:
        outcome = f"can't be set aside: {why_not}"
    log.warning("Checkpoint %s is not used: %s. It %s.", path, error, outcome)


# The manifest --------------------------------------------------------------------------------------------------------


def manifest_at(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint and none of its files; an OSError or a ValueError names what is wrong with it."""
    with _disk_faults(path):
        return _check_manifest(read_json(manifest_of(path)))


def whole_manifest(path: Path) -> Manifest | None:
    """Returns the manifest of a checkpoint; None if it is damaged or missing, but not if the disk does not answer."""
    try:
        return manifest_at(path)
    except FaultError:
        raise
    except (OSError, ValueError):
        return None


def check_complete(manifest: Manifest) -> None:
    """Raises a UserError if a manifest lacks an entry that a resumed run needs."""
    lacking = {"position", "finished"} - manifest.keys() or _COUNTS - manifest["position"].keys()
    if lacking:
        raise UserError(f"its manifest has no {min(lacking)}")


def _check_manifest(document: Mapping[str, object]) -> Manifest:
    """Returns the manifest; raises a UserError that names a value of the wrong kind."""
    for name, value in document.items():
        try:
            _check_value(name, value)
        except (TypeError, AttributeError, ValueError, KeyError) as error:
            raise UserError(f"its {name} can't be: {error}") from error
    return cast(Manifest, document)


def _check_value(name: str, value: Any) -> None:
    match name:
        case "position":
            for key, item in value.items():
                _check_kind(item, bool) if key in _SWITCHES else as_count(item)
        case "finished":
            _check_kind(value, bool)
        case "logged":
            for step, tag, number in value:
                as_count(step)
                as_text(tag)
                _check_kind(number, int, float)
        case "metrics":
            for number in value.values():
                _check_kind(number, int, float)
        case "parts":
            for entry in value.values():
                _check_entry(entry)
                as_count(entry["rank"])
                as_text(entry["host"])
        case "bytes":
            as_count(value)
        case "sha256":
            as_text(value)
        case "before":
            _check_entry(value)
            _check_manifest(value)
        case "configuration" | "versions":
            _check_kind(value, dict, type(None))


def _check_kind(value: object, *kinds: type) -> None:
    if type(value) not in kinds:
        raise UserError(f"{str(value)[:40]!r} is no {kinds[0].__name__}")


def _check_entry(entry: Content) -> None:
    as_count(entry["bytes"])
    as_text(entry["sha256"])


# Verification --------------------------------------------------------------------------------------------------------


@contextmanager
def _disk_faults(path: Path) -> Iterator[None]:
    """Raises a FaultError where a checkpoint can't be read at the moment: that tells nothing about what is in it."""
    try:
        yield
    except OSError as error:
        if error.errno in _MISPLACED:
            raise
        raise FaultError(
            f"Checkpoint {path} can't be read: {error}. It stays where it is. HINT: the same command "
            "resumes from it when the disk answers again; delete it to resume from the one before it."
        ) from error


def sha256_of(file: BinaryIO) -> str:
    """Returns the SHA-256 of a file's content."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def read_manifest(path: Path, content: bool = True) -> Manifest:
    """Returns the manifest of a checkpoint that matches it (without `content`, in sizes); a ValueError names what is wrong."""
    try:
        manifest = manifest_at(path)
        parts: dict[str, Entry] | None = manifest.get("parts")
        if parts is None:
            _check_entry(manifest)
        elif odd := [name for name in parts if not _PART.fullmatch(name)]:
            raise UserError(f"{odd[0]!r} is no name of a part")
    except FaultError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"its manifest can't be read ({shortened(error)})") from error
    if parts is not None:
        with ThreadPool(_READERS) as readers:  # of daemons: a process that ends does not wait for them
            problems = readers.map(lambda part: part_problem(path, *part, content), parts.items())
        if any(problems):
            raise UserError("; ".join(filter(None, problems)))
        return manifest
    if path.is_dir():
        raise UserError("it is a folder, and its manifest is of a file")
    if problem := _problem(path, manifest, content):
        before: Manifest | None = manifest.get("before")
        if before is None or _problem(path, before, content):
            raise UserError(f"it {problem}")
        return before  # whoever wrote it anew was killed when its manifest had taken its place, and it had not
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


def _problem(path: Path, entry: Content, content: bool = True) -> str:
    """Returns how a file differs from what was written, or ''."""
    with _disk_faults(path):
        size = regular_size(path)
        if size != entry["bytes"]:
            return f"has {size} bytes instead of {entry['bytes']}"
        if not content:
            return ""
        with open_to_read(path) as file:
            return "" if sha256_of(file) == entry["sha256"] else "has another checksum than its manifest says"


def newest_good(
    folder: Path, set_aside: bool = True, content: bool = True, complete: bool = False
) -> tuple[Path, Manifest] | None:
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
        except FaultError:
            raise
        except (ValueError, OSError) as error:
            if set_aside:
                set_aside_as_bad(path, error)
    if checkpoints and set_aside:
        log.warning("No checkpoint is left in %s: the run begins at its beginning.", folder)
    return None


def memory_folder() -> Path | None:
    """Returns the folder in memory of a supervised run."""
    return Path(os.environ[MEMORY]) if MEMORY in os.environ else None


def newest_in_memory(after: Path | None) -> tuple[Path, Manifest] | None:
    """Returns the newest state in memory that is whole, where it is of a later step than a checkpoint on the disk."""
    folder = memory_folder()
    for path in reversed(checkpoints_in(folder)) if folder else ():
        if after is not None and step_of(path) <= step_of(after):
            break
        try:
            if manifest_of(path).exists():  # else whoever wrote it was killed
                manifest = read_manifest(path)
                check_complete(manifest)
                _OPENED[path] = Parted(path, partial(load_part, load))
                return path, manifest
        except Exception as error:  # it holds, say, more than plain values: a checkpoint on the disk is of before that
            log.warning("The state of step %d in memory is not used: %s.", step_of(path), shortened(error))
    return None


class Verification(Callback):
    """Ends a run whose checkpoint turns out to be damaged: the same command then resumes from the one before it.

    The other hosts wait for rank 0 for `trainer.join_timeout` seconds, and to compare the checksums of a large checkpoint can
    take longer. So rank 0 looks at its size alone before the ranks meet, and ends its reading before anything is loaded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = ThreadPool(1)  # of daemons: a process that ends does not wait until a large file has been read
        self._manifest = self._reader.apply_async(read_manifest, (path,))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        try:
            self._manifest.get()
        except FaultError:
            raise
        except (ValueError, OSError) as error:
            set_aside_as_bad(self.path, error)
            log.error("The same command resumes from the checkpoint before it.")
            raise SystemExit(TRY_AGAIN) from None
        self._reader.terminate()  # who has threads must not fork


# The content ---------------------------------------------------------------------------------------------------------


class SafeCheckpointIO(TorchCheckpointIO):
    """Reads files and folders of parts, with `weights_only` on unless it was switched off; writes like Lightning's."""

    slice_of: Callable[[Stored], Tensor] | None = None
    """Returns what this rank takes of a tensor in parts, where the network is sharded; None: all of it. Files are then mapped
    into memory: who takes a slice of a tensor reads no more than that."""

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: MAP_LOCATION = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> StateDict:
        try:
            checkpoint = self._read(path, map_location, weights_only is not False)
        except UserError:
            raise
        except Exception as error:  # whatever a damaged file makes of the reader
            hint = "it may be cut short; take an older one from the same folder."
            text = f"{path} can't be read as a checkpoint: {type(error).__name__}: {error}. HINT: {hint}"
            if isinstance(error, FileNotFoundError):
                text = f"There is no checkpoint {path}."
            elif isinstance(error, pickle.UnpicklingError):
                hint = "if you trust where it comes from, set weights_only=false."
                text = f"{path} holds more than weights and plain values, and reading that can run code: {error}. HINT: {hint}"
            raise as_user_error(error, text) from error
        if not isinstance(checkpoint, dict):
            raise UserError(f"{path} holds no checkpoint, but a {type(checkpoint).__name__}.")
        return checkpoint

    def _read(self, address: str | Path, map_location: MAP_LOCATION, safe: bool) -> object:
        """Reads a folder of parts, a file or a remote address; `safe`: runs no code from it."""
        path = Path(address)
        if path.is_dir():
            trusting = partial(torch.load, map_location="cpu", mmap=True, weights_only=False)
            parted = _OPENED.get(path) if safe else None
            _OPENED.clear()
            parted = parted or Parted(path, partial(load_part, load if safe else trusting))
            return parted.checkpoint(self.slice_of or Stored.read)
        if not path.exists() or not safe:  # an address, which Lightning knows how to read, or what is trusted
            with plain_values():
                return finished(super().load_checkpoint(address, cast("Callable[..., object] | None", map_location), safe))
        if self.slice_of is None:
            return load(path, map_location, mmap=False)
        return apply_to_collection(load(path), Tensor, lambda tensor: tensor.clone() if tensor.nbytes < _SMALL else tensor)
