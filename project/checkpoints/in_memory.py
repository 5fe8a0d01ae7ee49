"""Keeps the run's newest states in memory, in a folder that outlives the ranks: a lost rank costs a few steps.

A state is a folder of parts (`project/parts.py`). Between two steps a rank copies its tensors into the memory of an older
one: no thread, no checksum, no second copy. A state counts when it has its manifest, which rank 0 writes last.

Of a sharded network that can lose a host, each rank also keeps its part on the next host, which it is sent to in a thread.
"""

import json
import logging
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from project.checkpoints.exchange import Neighbours
from project.checkpoints.reading import Manifest, checkpoints_in, manifest_of
from project.checkpoints.writing import cause, remove, write_manifest
from project.cluster.place import restarts, shared_memory
from project.parts import WHOLE, bytes_of, mark_whole_tensors, part_name, places_of, view_at
from project.sharded.shards import Split, any_rank
from project.sharded.strategy import is_sharded
from project.step.ddp import all_gather_objects

log = logging.getLogger(__name__)

_KEPT = 2  # states


class MemoryWriter:
    """Writes the run's states into memory: rank 0 all of one, or, of a sharded network, each rank its part."""

    def __init__(self, folder: Path, trainer: Trainer, can_lose_host: bool = False) -> None:
        """`folder`: this host's; its first rank removes there what is no longer needed. Called by all ranks."""
        self._folder, self._rank, self._ranks = folder, trainer.global_rank, trainer.world_size
        self._is_first_here = trainer.local_rank == 0
        self._is_sharded = is_sharded(trainer)
        self._ranks_here = trainer.num_devices if self._is_sharded else 1
        self._memory: dict[Path, Tensor] = {}  # of the states that this rank has written, the oldest first
        self._failed = ""
        self._neighbours: Neighbours | None = None
        if can_lose_host and self._is_sharded and trainer.num_nodes > 1:
            self._neighbours = Neighbours(self._rank, self._ranks, self._ranks_here)
        self._thread = ThreadPoolExecutor(1, "neighbours")
        self._pending: Future[None] | None = None

    def close(self) -> None:
        """Waits for the thread, and ends it."""
        self._thread.shutdown()

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step:09d}.ckpt"

    def save(self, step: int, own: Split, manifest: Manifest, resumed_at: int) -> None:
        """Writes a state. Called by all ranks between the same two steps; a failure is reported, and training continues.

        `own`: what this rank has of it, which is not copied; `resumed_at`: the step at which these ranks have begun.
        """
        if not self._is_sharded and self._rank > 0:
            return
        if self._pending is not None:
            self._pending.result()
        path, problem = self.path(step), ""
        try:
            if not self._memory:
                self._remove_all_but({path, self.path(resumed_at)})
            self._write(path, own, bool(manifest))
        except Exception as error:
            problem = cause(error) or type(error).__name__
        if self._is_sharded and any_rank([bool(problem)])[0]:
            problem = next(filter(None, all_gather_objects(problem and f"rank {self._rank}: {problem}", self._ranks)))
        if problem:
            self._memory.pop(path, None)
        elif self._neighbours is not None:
            self._pending = self._thread.submit(self._copy_to_neighbour, self._neighbours, path, manifest)
        elif manifest:
            write_manifest(path, {**manifest, "parts": {}})
        self._remove_all_but({*self._memory} or {self.path(resumed_at)})
        if problem and problem != self._failed and self._rank == 0:
            log.warning("The state of step %d is not kept in memory: %s. Training continues.", step, problem)
        self._failed = problem

    def _write(self, path: Path, own: Split, has_whole: bool) -> None:
        checkpoint, tensors = own
        if not self._is_sharded:  # else these are few and small, and each host needs them
            checkpoint, tensors = mark_whole_tensors(checkpoint, self._rank)
        places, size = places_of(tensors)
        name = f"{path.stem}, start {restarts()}"
        part = path / part_name(self._rank, self._ranks)
        path.mkdir(exist_ok=True)
        memory = self._take_oldest(bytes_of(part))
        if memory is None or len(memory) < size:
            memory = self._allocate(bytes_of(part), size)
        for of_tensor, tensor in tensors.items():
            view_at(memory, places[of_tensor]).copy_(tensor)
        part.write_text(json.dumps({"name": name, "places": places}))
        if has_whole:
            torch.save({"name": name, "ranks": self._ranks, "checkpoint": checkpoint}, path / WHOLE)
        self._memory[path] = memory

    def _copy_to_neighbour(self, neighbours: "Neighbours", path: Path, manifest: Manifest) -> None:
        """Runs in the thread: the state counts when all hosts have the copies."""
        with suppress(RuntimeError, OSError):  # a rank is lost, and this one ends soon
            neighbours.swap_parts(path)
            if manifest:
                write_manifest(path, {**manifest, "parts": {}})

    def _take_oldest(self, file: Path) -> Tensor | None:
        """Gives the memory of the oldest state this name, and returns it, where there are enough newer ones."""
        if len(self._memory) < _KEPT:
            return None
        oldest = next(iter(self._memory))
        memory = self._memory.pop(oldest)
        manifest_of(oldest).unlink(missing_ok=True)
        (oldest / file.name).replace(file)
        return memory

    def _allocate(self, file: Path, size: int) -> Tensor:
        """Returns new memory. Raises an OSError where a state would take more than half of what is free."""
        file.unlink(missing_ok=True)
        needed = size * self._ranks_here * (1 if self._neighbours is None else 2)
        if needed > shutil.disk_usage(self._folder).free // 2:
            raise OSError(
                f"its {needed >> 20:,} MiB are more than half of what is free in {shared_memory()}, which loader processes "
                "need, too. HINT: recover.every_n_steps=null, or a larger /dev/shm"
            )
        with file.open("xb") as opened:
            os.posix_fallocate(opened.fileno(), 0, max(1, size))  # where memory runs out later, a write is a SIGBUS
        return torch.from_file(str(file), shared=True, size=max(1, size), dtype=torch.uint8)

    def _remove_all_but(self, kept: set[Path]) -> None:
        if self._is_first_here:
            for path in checkpoints_in(self._folder):
                if path not in kept:
                    remove(path)
