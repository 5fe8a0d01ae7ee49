"""Writes a checkpoint in parts, one by each rank: the whole checkpoint, or nothing.

Each rank's writer is a thread beside the training. The writers have a group of their own, as the training's may be in use,
and exchange results after each action: a disk that is full on one host is every rank's failure, and a rank that is gone ends
the wait of the others. The parts lie in a new folder under another name until all are on the disk and the manifest names
them; then rank 0 renames the folder, and each rank reads back its part.

`torch.distributed.checkpoint` keeps its metadata in a pickle, and whoever can write to a run's folder could have any code run
where the checkpoint is read (a test shows it). So the format is our own.
"""

import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from project.checkpoints.files import (
    Entry,
    cause,
    entry_of,
    free_name,
    part_problem,
    put_aside,
    sync,
    write_file,
    write_manifest,
)
from project.checkpoints.readable import check
from project.cluster.group import Group
from project.parts import WHOLE, Parted, Stored, part_name
from project.plain_values import load
from project.untrusted import make_folder

T = TypeVar("T")


class Incomplete(Exception):
    """Raised when at least one rank could not write its part of a checkpoint."""


class Lost(Incomplete):
    """Raised when a checkpoint is abandoned because a rank is lost."""


@dataclass
class HostCopy:
    """Holds a rank's part of a checkpoint in main memory: `slices` of sharded tensors; on rank 0 also `marked`, all else, with
    marks where sharded tensors belong.
    """

    marked: dict[str, Any]
    slices: dict[str, Tensor]


class ShardWriters:
    """Writes this rank's part of a checkpoint, in step with the writers of the other ranks.

    Args:
        host: this rank's.
    """

    def __init__(self, host: str = "") -> None:
        self.host = host
        self._group = Group()
        self._members: Any = None  # torch's group, held while something is being written
        self._read_back = False

    def connect(self, timeout: timedelta | None) -> None:
        """Connects the writers. Called by all ranks; `timeout`: how long they wait for each other's disks."""
        self._group.make(timeout)

    @property
    def ready(self) -> bool:
        return self._group() is not None

    @property
    def _rank(self) -> int:
        return dist.get_rank(self._members)

    @property
    def _ranks(self) -> int:
        return dist.get_world_size(self._members)

    def write(self, path: Path, copied: HostCopy, manifest: dict[str, Any]) -> tuple[Path, int]:
        """Writes a checkpoint, and returns its path and size. All ranks' writers call it, and all raise Incomplete where one of
        them fails."""
        self._members = self._group()
        if self._members is None:
            raise Lost("the ranks are no longer connected")
        try:
            return self._write(path, copied, manifest)
        finally:
            self._members = None

    def _write(self, path: Path, copied: HostCopy, manifest: dict[str, Any]) -> tuple[Path, int]:
        """Writes all parts into a new folder, renames it and verifies it; removes it, or sets it aside, where that fails."""
        staging, name = self._on_rank_0(lambda: _stage(path))
        try:
            written = self._on_all_ranks(lambda: self._write_own_files(staging, name, copied))
            entries = {file: entry for entries in written for file, entry in entries.items()}
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

    # Actions ---------------------------------------------------------------------------------------------------------

    def _on_all_ranks(self, action: Callable[[], T]) -> list[T]:
        """Runs an action on each rank, and returns the results of all, by rank.

        Raises:
            Incomplete: it failed on some ranks, which are named, with the reasons.
            Lost: a rank does not answer.
        """
        own: Any = (None, "")
        try:
            own = (action(), "")
        except Exception as error:
            own = (None, cause(error) or type(error).__name__)
        of_ranks: list[Any] = [None] * self._ranks
        try:
            dist.all_gather_object(of_ranks, (*own, self.host), group=self._members)
        except RuntimeError as error:  # gloo's
            raise Lost(f"a rank does not answer: {_gloo_reason(str(error))}") from error
        if failures := [f"rank {rank} on {host}: {problem}" for rank, (_, problem, host) in enumerate(of_ranks) if problem]:
            raise Incomplete("; ".join(failures))
        return [result for result, _, _ in of_ranks]

    def _on_rank_0(self, action: Callable[[], T]) -> T:
        """Runs an action on rank 0, and returns its result on all ranks."""
        result = self._on_all_ranks(lambda: action() if self._rank == 0 else None)[0]
        assert result is not None
        return result

    def _write_own_files(self, staging: Path, name: str, copied: HostCopy) -> dict[str, Entry]:
        """Writes this rank's files, and returns their entries of the manifest."""
        contents: dict[str, Any] = {}
        if self._rank == 0:
            check(copied.marked)
            contents[WHOLE] = {"name": name, "ranks": self._ranks, "checkpoint": copied.marked}
        if copied.slices:
            contents[part_name(self._rank, self._ranks)] = {"name": name, "slices": copied.slices}
        entries = {}
        for file, content in contents.items():
            write_file(staging / file, partial(torch.save, content))
            entries[file] = {**entry_of(staging / file), "rank": self._rank, "host": self.host}
        return entries

    def _verify(self, path: Path, entries: dict[str, Entry]) -> None:
        """Reads back this rank's files and compares their checksums; the first time, also loads them as a resumed run does."""
        for file, entry in entries.items():
            if problem := part_problem(path, file, entry):
                raise OSError(problem)
        if not self._read_back:  # the first of this process, as one that goes on will read it
            Parted(path, load).checkpoint(self._read_own_slices)
            self._read_back = True

    def _read_own_slices(self, stored: Stored) -> None:
        for rank, box in stored.layout.slices(stored.shape):
            if rank == self._rank:
                stored.read(box)


def _stage(path: Path) -> tuple[Path, str]:
    """Makes a new folder, and returns it with a name that no other checkpoint has."""
    name = uuid.uuid4().hex
    staging = path.with_name(f".{path.name}.{name[:8]}.part")
    make_folder(path.parent)
    staging.mkdir()
    return staging, name


def _commit(staging: Path, path: Path, manifest: dict[str, Any]) -> Path:
    """Gives the checkpoint its manifest and its name, when all parts are on the disk."""
    sync(staging)
    path = free_name(path, folder=True)
    write_manifest(path, manifest)
    staging.replace(path)
    sync(path.parent)
    return path


def _gloo_reason(text: str) -> str:
    """Returns gloo's reason without its file and its guesses."""
    return re.sub(r"^\[\S+gloo\S+\] ", "", text.strip()).partition(" This is typically")[0].partition("\n")[0].rstrip(".")
