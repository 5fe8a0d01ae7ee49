"""Writes checkpoints to the disk: the whole checkpoint, or nothing, wherever the process is killed.

Files are written under another name, forced to the disk and renamed, the manifest before its checkpoint: a checkpoint that is
there has one. Where a file replaces one of its name, its manifest knows that file's, too: one of the two is whole.

Where the network is sharded, each rank writes its part (`ShardWriters`). The parts lie in a new folder under another name until
all are on the disk and the manifest names them; then rank 0 renames the folder, and each rank reads back its part.
`torch.distributed.checkpoint` keeps its metadata in a pickle, and whoever can write to a run's folder could have any code run
where the checkpoint is read (a test shows it). So the format is our own.
"""

import io
import json
import logging
import os
import pickle
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from project.checkpoints.reading import (
    Content,
    Entry,
    Manifest,
    delete,
    manifest_at,
    manifest_of,
    part_problem,
    put_aside,
    read_manifest,
    sha256_of,
)
from project.cluster.group import Group
from project.cluster.place import host
from project.errors import UserError
from project.parts import WHOLE, Parted, Stored, part_name
from project.plain_values import load, plain_values
from project.sharded.shards import Split
from project.sharded.strategy import Sharded
from project.typed import StateDict, typed
from project.untrusted import foreign_link, make_folder

log = logging.getLogger(__name__)

T = TypeVar("T")


# Can it be read again ------------------------------------------------------------------------------------------------


def check(checkpoint: StateDict) -> None:
    """Raises a UserError that names the part of a checkpoint that could not be read again. Skips what tensors hold."""
    if not (problem := _reading_problem(checkpoint)):
        return
    states = checkpoint.get("callbacks") or {}
    parts = {
        **{f"the state of the callback {str(name).partition('{')[0]}": state for name, state in states.items()},
        **{f"{key!r} of the checkpoint": part for key, part in checkpoint.items() if key != "callbacks"},
    }
    problems = ((name, of_part) for name, part in parts.items() if (of_part := _reading_problem(part)))
    name, problem = next(problems, ("the checkpoint", problem))
    raise UserError(
        f"A run could not resume from this checkpoint: {name} holds what can't be read again ({problem}). HINT: keep plain "
        "tensors, arrays, numbers, texts, lists and dicts in what is saved (state_dict, get_extra_state, on_save_checkpoint), "
        "or set weights_only=False for fit: reading a checkpoint can then run code of its file."
    )


def unreadable_items(part: Mapping[str, object]) -> dict[str, str]:
    """Returns the items of a part of a checkpoint that could not be read again, with the names of their classes; of a class,
    its own.
    """
    kinds = {name: value if isinstance(value, type) else type(value) for name, value in part.items()}
    return {name: f"{kinds[name].__module__}.{kinds[name].__qualname__}" for name in part if _reading_problem(part[name])}


def _reading_problem(part: object) -> str:
    """Returns PyTorch's reason not to read a part, without its page of advice, or ''."""
    file = io.BytesIO()
    try:
        torch.save(apply_to_collection(part, Tensor, _emptied), file)
        file.seek(0)
        with plain_values():
            torch.load(file, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        reason = str(error).rpartition("WeightsUnpickler error: ")[2]
        return reason.strip().splitlines()[0].partition(" was not an allowed global")[0]
    return ""


def _emptied(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same type without content. Parameters are saved as plain tensors, and DTensors by ranks."""
    kind = type(tensor)
    is_other = is_lazy(tensor) or isinstance(tensor, nn.Parameter) or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return _empty(Tensor if is_other else kind, tensor.dtype)


@cache
def _empty(kind: type[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype).as_subclass(kind)  # one for all tensors, so that a large network takes no time


# A file --------------------------------------------------------------------------------------------------------------


def sync(folder: Path) -> None:
    """Forces the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_file(
    path: Path, fill: Callable[[BinaryIO], object], before_naming: Callable[[Path], object] = lambda temporary: None
) -> None:
    """Fills a file under another name, forces it to the disk and gives it its name."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a write that was cut off
        with temporary.open("xb") as file:  # which follows no link that somebody has put there
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        before_naming(temporary)
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_manifest(path: Path, manifest: Mapping[str, object]) -> None:
    """Writes the manifest of a checkpoint that is about to get this name."""
    text = json.dumps(manifest, indent=1).encode()
    write_file(manifest_of(path), lambda file: file.write(text))


def entry_of(path: Path) -> Content:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": sha256_of(file)}


def write(path: Path, checkpoint: StateDict, manifest: Manifest) -> int:
    """Writes a checkpoint as a file, and its manifest, and reads it back; returns how many bytes it has."""

    def describe(temporary: Path) -> None:
        write_manifest(path, {**manifest, **entry_of(temporary), **_replaced_manifest(path)})

    write_file(path, lambda file: torch.save(checkpoint, file), describe)
    size: int = read_manifest(path)["bytes"]
    return size


def _replaced_manifest(path: Path) -> dict[str, Manifest]:
    """Returns the manifest of a file that is about to be replaced, as {'before': it}: both can't be renamed at once."""
    with suppress(OSError, ValueError, KeyError):
        known = manifest_at(path)
        if path.is_file() and known["sha256"]:
            known.pop("before", None)
            return {"before": known}
    return {}


def free_name(path: Path, folder: bool) -> Path:
    """Returns the path for a checkpoint of this name. A file replaces a file; a folder comes after it: step-000000006_02."""
    name, number = path, 1
    while name.is_dir() or (folder and os.path.lexists(name)):
        number += 1
        name = path.with_name(f"{path.stem}_{number:02d}{path.suffix}")
    return name


class FileWriter:
    """Writes a checkpoint as a file. `trusted`: it may hold what only Python's pickle reads."""

    def __init__(self, trusted: bool = False) -> None:
        self._trusted = self._read_back = trusted

    def write(self, path: Path, own: Split, manifest: Manifest) -> tuple[Path, int]:
        """Writes a checkpoint, whole and verified, and returns its path and size; the first is loaded as a resumed run does."""
        make_folder(path.parent)
        if not self._trusted:
            check(own.marked)
        path = free_name(path, folder=False)
        size = write(path, own.marked, manifest)
        if not self._read_back:
            load(path)  # but not into main memory
            self._read_back = True
        return path, size


def cause(error: BaseException | None) -> str:
    """Returns the operating system's message, if it raised the error; PyTorch's writer wraps it in another error."""
    text = str(error)
    while error is not None:
        if isinstance(error, OSError):
            return str(error)
        error = error.__cause__ or error.__context__
    return text


# A folder of parts ---------------------------------------------------------------------------------------------------


class Incomplete(Exception):
    """Raised when at least one rank could not write its part of a checkpoint."""


class Lost(Incomplete):
    """Raised when a checkpoint is abandoned because a rank is lost."""


class ShardWriters:
    """Writes this rank's part of a checkpoint, in step with the writers of the other ranks.

    Each is a thread beside the training, whose group may be in use: they have a group of their own, and exchange results after
    each action. A disk that is full on one host is every rank's failure, and a rank that is gone ends the wait of the others.
    """

    def __init__(self, host: str, timeout: timedelta | None, trusted: bool = False) -> None:
        """Connects the writers. Called by all ranks; `timeout`: how long they wait for each other's disks."""
        self.host, self._trusted = host, trusted
        self._group = Group()
        self._group.make(timeout)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._read_back = trusted

    def write(self, path: Path, own: Split, manifest: Manifest) -> tuple[Path, int]:
        """Writes all parts into a new folder, renames it and verifies it; removes it, or sets it aside, where that fails.

        All ranks' writers call it, and all raise Incomplete where one of them fails. Returns the checkpoint's path and size.
        """
        staging, name = self._on_rank_0(partial(_stage, path))
        try:
            written = self._on_all_ranks(lambda: self._write_own_files(staging, name, own))
            entries = {file: entry for of_rank in written for file, entry in of_rank.items()}
            path = self._on_rank_0(lambda: _commit(staging, path, {**manifest, "parts": entries}))
        except Exception:
            if self._rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        try:
            self._on_all_ranks(lambda: self._verify(path, written[self._rank]))
        except Lost:  # the files are there: who resumes reads them, and finds out
            raise
        except Incomplete:
            if self._rank == 0:
                put_aside(path, ".bad")
            raise
        return path, sum(entry["bytes"] for entry in entries.values())

    def _on_all_ranks(self, action: Callable[[], T]) -> list[T]:
        """Returns the results of an action on all ranks. Raises Incomplete, which names those on which it failed, or Lost."""
        if (group := self._group()) is None:
            raise Lost("the ranks are no longer connected")
        result, problem = None, ""
        try:
            result = action()
        except Exception as error:
            problem = cause(error) or type(error).__name__
        of_ranks = cast(list[tuple[T, str, str]], [None] * self._ranks)
        try:
            dist.all_gather_object(of_ranks, (cast(T, result), problem, self.host), group=group)
        except RuntimeError as error:  # gloo's, which begins with its file and continues with guesses
            text = re.sub(r"^\[\S+gloo\S+\] ", "", str(error).strip())
            reason = text.partition(" This is typically")[0].partition("\n")[0].rstrip(".")
            raise Lost(f"a rank does not answer: {reason}") from error
        if failures := [f"rank {rank} on {host}: {problem}" for rank, (_, problem, host) in enumerate(of_ranks) if problem]:
            raise Incomplete("; ".join(failures))
        return [result for result, _, _ in of_ranks]

    def _on_rank_0(self, action: Callable[[], T]) -> T:
        """Runs an action on rank 0, and returns its result on all ranks."""
        result = self._on_all_ranks(lambda: action() if self._rank == 0 else None)[0]
        assert result is not None
        return result

    def _write_own_files(self, staging: Path, name: str, own: Split) -> dict[str, Entry]:
        """Writes this rank's files, and returns their entries of the manifest."""
        contents: dict[str, StateDict] = {}
        if self._rank == 0:
            if not self._trusted:
                check(own.marked)
            contents[WHOLE] = {"name": name, "ranks": self._ranks, "checkpoint": own.marked}
        if own.slices:
            contents[part_name(self._rank, self._ranks)] = {"name": name, "slices": own.slices}
        entries: dict[str, Entry] = {}
        for file, content in contents.items():
            write_file(staging / file, partial(torch.save, content))
            entries[file] = {**entry_of(staging / file), "rank": self._rank, "host": self.host}
        return entries

    def _verify(self, path: Path, entries: dict[str, Entry]) -> None:
        """Reads back this rank's files and compares their checksums; the first time, also loads them as a resumed run does."""
        for file, entry in entries.items():
            if problem := part_problem(path, file, entry):
                raise OSError(problem)
        if not self._read_back:
            Parted(path, load).checkpoint(self._read_own_slices)
            self._read_back = True

    def _read_own_slices(self, stored: Stored) -> None:
        for rank, box in stored.layout.slices(stored.shape):
            if rank == self._rank:
                stored.read(box)


def shard_writers(trainer: Trainer) -> ShardWriters | None:
    """Returns the writers of a sharded network's parts; None where the network is whole. Called by all ranks."""
    if isinstance(trainer.strategy, Sharded) and trainer.strategy.is_sharded:
        return ShardWriters(host(), trainer.strategy.patience, typed(trainer).resuming.trusts_checkpoints)
    return None


def _stage(path: Path) -> tuple[Path, str]:
    """Makes a new folder, and returns it with a name that no other checkpoint has."""
    name = uuid.uuid4().hex
    staging = path.with_name(f".{path.name}.{name[:8]}.part")
    make_folder(path.parent)
    staging.mkdir()
    return staging, name


def _commit(staging: Path, path: Path, manifest: Manifest) -> Path:
    """Gives the checkpoint its manifest and its name, when all parts are on the disk."""
    sync(staging)
    path = free_name(path, folder=True)
    write_manifest(path, manifest)
    staging.replace(path)
    sync(path.parent)
    return path


# Removal -------------------------------------------------------------------------------------------------------------


def remove(path: Path) -> None:
    """Removes a checkpoint and its manifest. A folder is renamed first, so no name stands for half of a checkpoint."""
    going = path
    if path.is_dir():
        going = path.with_name(f".{path.name}.gone")
        delete(going)
        path.replace(going)
    delete(going)
    manifest_of(path).unlink(missing_ok=True)


def clean_up(folder: Path) -> None:
    """Removes the files of interrupted writes."""
    for left in () if foreign_link(folder) else (*folder.glob(".step-*"), *folder.glob("step-*.json")):
        if left.name.startswith(".") or not os.path.lexists(left.with_suffix(".ckpt")):
            try:
                delete(left)
            except OSError as error:
                log.warning("%s is left of a write that was cut off, and can't be removed: %s", left, error)
