"""Brings the parts of a state in memory to the hosts that need them, where a sharded network's ranks are on several hosts.

Each rank has kept its part on its own host, and, where the run can lose a host, on the next one. Ranks that begin again on the
same hosts mostly have what they need; other parts are sent between the first ranks of the hosts.
"""

import json
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from project.checkpoints.reading import checkpoints_in, manifest_of, memory_folder
from project.cluster.group import Group
from project.errors import TRY_AGAIN
from project.parts import WHOLE, Box, Parted, Stored, bytes_of, part_name, reserve
from project.plain_values import load
from project.step.ddp import all_gather_objects

log = logging.getLogger(__name__)


class _Needed(Stored):
    """A tensor that lies in parts, of which only the ranks are noted that have written what is read."""

    def __init__(self, stored: Stored, ranks: set[int]) -> None:
        vars(self).update(vars(stored))
        self._ranks = ranks

    def read(self, wanted: Box | None = None) -> Tensor:
        wanted = wanted or self.all
        for rank, box in self.layout.slices(self.shape):
            if all(common.start < common.stop for common in box.within(wanted)):
                self._ranks.add(rank)
        return torch.empty(wanted.size, dtype=self.dtype, device="meta")


def bring_parts(path: Path, rank: int, local_rank: int, slice_of: Callable[[Stored], object]) -> Path:
    """Returns this host's folder of a state that rank 0 has in memory, with the parts that its ranks need. Called by all ranks.

    Ends the run where a part is on no host: the next start reads a checkpoint from the disk.

    `path`: rank 0's; `slice_of`: reads what a rank takes of a tensor.
    """
    ranks = dist.get_world_size()
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    of_ranks = all_gather_objects((rank - local_rank, memory_folder()), ranks, group)
    firsts = [first for first, _ in of_ranks]
    here = cast(Path, of_ranks[firsts[rank]][1]) / path.name
    if local_rank == 0:
        here.mkdir(exist_ok=True)
    problem = _send({(WHOLE, 0, host) for host in {*firsts} - {0}}, here, rank, group)
    if not problem:
        needed: set[int] = set()
        state = Parted(here, load)
        state.checkpoint(lambda stored: slice_of(_Needed(stored, needed)))
        has = {part for part in range(state.ranks) if _is_of(state, here / part_name(part, state.ranks))}
        parts_of = all_gather_objects((needed, has), ranks, group)
        sources = {part: firsts[by] for by, (_, parts) in reversed([*enumerate(parts_of)]) for part in parts}
        missing = {(part, firsts[by]) for by, (wanted, parts) in enumerate(parts_of) for part in wanted - parts}
        if nowhere := sorted({part for part, _ in missing} - {*sources}):
            problem = f"no host has the part of rank(s) {', '.join(map(str, nowhere))}"
        else:
            files = [(Path(part_name(part, state.ranks)), sources[part], to) for part, to in missing]
            transfers = {(name, source, to) for file, source, to in files for name in (file.name, bytes_of(file).name)}
            problem = _send(transfers, here, rank, group)
    if problem:
        if rank == 0:
            log.error("The state %s in memory is not complete: %s. The run resumes from the disk.", path.stem, problem)
            for of_step in reversed(checkpoints_in(path.parent)):
                manifest_of(of_step).unlink(missing_ok=True)
        raise SystemExit(TRY_AGAIN)
    dist.destroy_process_group(group)
    return here


def has_all_parts(path: Path) -> bool:
    """Returns whether a state in memory lies in this folder with the parts of all its ranks."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        ranks = int(json.loads(manifest_of(path).read_text())["world_size"])
        return all(bytes_of(path / part_name(rank, ranks)).exists() for rank in range(ranks))
    return False


def _is_of(state: Parted, part: Path) -> bool:
    """Returns whether a part is there, and of this state."""
    with suppress(OSError, ValueError):
        return bytes_of(part).exists() and json.loads(part.read_text())["name"] == state.name
    return False


class Neighbours:
    """Connects each rank with those of the same number on the next host and on the one before."""

    def __init__(self, rank: int, ranks: int, ranks_per_host: int) -> None:
        """Called by all ranks."""
        self._rank, self._ranks = rank, ranks
        self._next, self._before = (rank + ranks_per_host) % ranks, (rank - ranks_per_host) % ranks
        self._group = Group()
        self._group.make()
        self._thread = ThreadPoolExecutor(1, "neighbours")

    def close(self) -> None:
        """Waits until the newest state's copies are on the next hosts, and ends the thread."""
        self._thread.shutdown()

    def begin_swap(self, folder: Path, commit: Callable[[], str]) -> "Future[str]":
        """Sends, in a thread, this rank's part of a state to the next host, and receives that of the host before.

        Calls `commit` when all ranks have theirs. Returns on all ranks the problem of one, or ''.
        """
        return self._thread.submit(self._swap, folder, commit)

    def _swap(self, folder: Path, commit: Callable[[], str]) -> str:
        if (group := self._group()) is None:
            return "the ranks are no longer connected"
        own, received = (folder / part_name(rank, self._ranks) for rank in (self._rank, self._before))
        try:
            problem = ""
            for file, copy in ((own, received), (bytes_of(own), bytes_of(received))):
                content, unread = _content(file)
                sending = [dist.isend(tensor, self._next, group) for tensor in (torch.tensor(len(content)), content)]
                problem = _receive(copy, self._before, group) or unread or problem
                for work in sending:
                    cast(dist.Work, work).wait()
            return _problem_of_any(problem, self._rank, group) or _problem_of_any(commit(), self._rank, group)
        except (RuntimeError, ValueError) as error:  # a rank is lost, and this one ends soon
            return str(error)


def _send(transfers: set[tuple[str, int, int]], folder: Path, rank: int, group: dist.ProcessGroup) -> str:
    """Sends files from the folder on one host to that on another: each a name, and the first ranks of the two. Returns on all
    ranks the problem of one, or ''.
    """
    problem = ""
    for name, source, destination in sorted(transfers):
        if rank == source:
            content, unread = _content(folder / name)
            problem = unread or problem
            dist.send(torch.tensor(len(content)), destination, group)
            dist.send(content, destination, group)
        elif rank == destination:
            problem = _receive(folder / name, source, group) or problem
    return _problem_of_any(problem, rank, group)


def _content(file: Path) -> tuple[Tensor, str]:
    """Returns a file's content, and why it can't be read, or '': the receiver is not left waiting."""
    try:
        return torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8), ""
    except (OSError, RuntimeError) as error:
        return torch.empty(0, dtype=torch.uint8), str(error)


def _receive(file: Path, source: int, group: dist.ProcessGroup) -> str:
    """Receives a file. Returns why it can't be written, or '': the sender is not left waiting."""
    size, problem = torch.tensor(0), ""
    dist.recv(size, source, group)
    try:
        content = reserve(file, int(size))
    except OSError as error:
        content, problem = torch.empty(int(size), dtype=torch.uint8), str(error)
    dist.recv(content, source, group)
    return problem


def _problem_of_any(problem: str, rank: int, group: dist.ProcessGroup) -> str:
    problems = all_gather_objects(problem and f"rank {rank}: {problem}", dist.get_world_size(), group)
    return next(filter(None, problems), "")
