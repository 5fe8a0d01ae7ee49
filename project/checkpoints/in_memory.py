"""Keeps the run's newest states in memory, in a folder that outlives the ranks: a lost rank costs a few steps.

A state is a folder of parts (`project/parts.py`). Between two steps a rank copies its tensors into the memory of an older
one: no thread, no checksum, no second copy. A state counts when it has its manifest, which rank 0 names last.

Of a sharded network that can lose a host, each rank also keeps its part on the next host, which it is sent to in a thread.
"""

import json
import logging
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from project.checkpoints.exchange import Neighbours
from project.checkpoints.reading import Manifest, checkpoints_in, manifest_of
from project.checkpoints.writing import cause, remove
from project.cluster.place import restarts, shared_memory
from project.parts import WHOLE, bytes_of, changed, mark_whole_tensors, part_name, places_of, reserve, view_at
from project.sharded.shards import Split, any_rank
from project.sharded.strategy import is_sharded
from project.step.ddp import all_gather_objects
from project.typed import StateDict

log = logging.getLogger(__name__)

_KEPT = 2  # states
_SHARE = 0.01  # of the time, that copies may take
_FIRST = 2.0  # seconds: ranks that have just been started again need the cores themselves


class CopyInterval:
    """Decides when the next copy is due: after a number of steps, or when the last one has cost 1 % of the time since then."""

    def __init__(self, steps: int | None) -> None:
        """`steps`: None to go by the time."""
        self.steps = steps
        self._ended = time.monotonic()  # when the last copy had been made; or what the ranks begin with was read
        self._cost = _FIRST * _SHARE
        """The seconds of the last copy."""

    def is_due(self, ahead: float, begins: bool) -> bool:
        """Returns whether, in so many seconds, this rank has the time for a copy. `begins`: one begins now."""
        elapsed = 0.0 if begins else time.monotonic() - self._ended
        return self.steps is None and elapsed + ahead >= self._cost / _SHARE

    @contextmanager
    def measured(self, device: torch.device) -> Iterator[None]:
        """Measures a copy that is made within this context."""
        if self.steps is None and device.type != "cpu":
            torch.accelerator.synchronize(device)  # its work of the step before is not the copy's
        began = time.thread_time()  # without the waiting for other ranks
        yield
        self._cost, self._ended = time.thread_time() - began, time.monotonic()


class MemoryWriter:
    """Writes the run's states into memory: rank 0 all of one, or, of a sharded network, each rank its part."""

    def __init__(self, folder: Path, trainer: Trainer, can_lose_host: bool = False) -> None:
        """`folder`: this host's; its first rank removes there what is no longer needed. Called by all ranks."""
        self._folder, self._rank, self._ranks = folder, trainer.global_rank, trainer.world_size
        self._is_first_here = trainer.local_rank == 0
        self._is_sharded = is_sharded(trainer)
        self._memory: dict[Path, Tensor] = {}  # of the states that this rank has written, the oldest first
        self._failed = ""
        self._neighbours: Neighbours | None = None
        if can_lose_host and self._is_sharded and trainer.num_nodes > 1:
            self._neighbours = Neighbours(self._rank, self._ranks, trainer.num_devices)
        self._pending: tuple[Path, Future[str]] | None = None
        self._parts_here = (trainer.num_devices if self._is_sharded else 1) * (2 if self._neighbours else 1)

    def close(self) -> None:
        """Waits until the newest state's copies are on the next hosts."""
        if self._neighbours is not None:
            self._neighbours.close()

    def is_busy(self) -> bool:
        """Returns whether copies of the last state are still on their way, on any rank. Called by all ranks."""
        return self._pending is not None and any_rank([not self._pending[1].done()])[0]

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step:09d}.ckpt"

    def save(self, step: int, own: Split, manifest: Manifest, resumed_at: int) -> None:
        """Writes a state. Called by all ranks between the same two steps, when none is busy; a failure is reported, and
        training continues.

        `own`: what this rank has of it, which is not copied; `resumed_at`: the step at which these ranks have begun.
        """
        if not self._is_sharded and self._rank > 0:
            return
        path, invalid, problem = self.path(step), self._invalid_state(), ""
        try:
            if not self._memory:
                self._remove_all_but({path, self.path(resumed_at)})
            self._write(path, own, manifest, invalid)
        except Exception as error:
            problem = cause(error) or type(error).__name__
        if self._is_sharded and any_rank([bool(problem)])[0]:
            problem = next(filter(None, all_gather_objects(problem and f"rank {self._rank}: {problem}", self._ranks)))
        if problem:
            for never_valid in filter(None, (path, invalid)):
                self._memory.pop(never_valid, None)
        elif self._neighbours is not None:
            self._pending = path, self._neighbours.begin_swap(path, lambda: self._commit(path))
        else:
            problem = self._commit(path)
        valid = {*self._memory} - ({path} if self._pending else set())
        self._remove_all_but({*self._memory, *([] if valid else [self.path(resumed_at)])})
        if problem or self._neighbours is None:
            self._report(step, problem)

    def _invalid_state(self) -> Path | None:
        """Returns the last state if its copies could not be made: it never counts."""
        if self._pending is None:
            return None
        (path, copying), self._pending = self._pending, None
        problem = copying.result()
        self._report(int(path.stem.partition("-")[2]), problem)
        return path if problem else None

    def _report(self, step: int, problem: str) -> None:
        if problem and problem != self._failed and self._rank == 0:
            log.warning("The state of step %d is not kept in memory: %s. Training continues.", step, problem)
        self._failed = problem

    def _write(self, path: Path, own: Split, manifest: Manifest, invalid: Path | None) -> None:
        """Writes all files of this rank. `invalid`: a state whose memory can be taken first."""
        checkpoint, tensors = own
        if self._is_sharded:  # these are few and small, and each host needs them
            checkpoint = _copied(checkpoint)
        else:
            checkpoint, tensors = mark_whole_tensors(checkpoint, self._rank)
        places, size = places_of(tensors)
        name = f"{path.stem}, start {restarts()}"
        part = path / part_name(self._rank, self._ranks)
        path.mkdir(exist_ok=True)
        manifest_of(path).unlink(missing_ok=True)  # of another fit
        memory = self._take_memory(bytes_of(part), invalid)
        if memory is None or len(memory) < size:
            memory = None
            self._check_room(size)
            memory = reserve(bytes_of(part), size)
        for of_tensor, tensor in tensors.items():
            view_at(memory, places[of_tensor]).copy_(tensor)
        part.write_text(json.dumps({"name": name, "places": places}))
        if manifest:
            torch.save({"name": name, "ranks": self._ranks, "checkpoint": checkpoint}, path / WHOLE)
            (path / "manifest").write_text(json.dumps({**manifest, "parts": {}}))
        self._memory[path] = memory

    def _commit(self, path: Path) -> str:
        """Has rank 0 name the manifest. Returns its problem, or ''."""
        try:
            if self._rank == 0:
                (path / "manifest").replace(manifest_of(path))
        except OSError as error:
            return str(error)
        return ""

    def _take_memory(self, file: Path, invalid: Path | None) -> Tensor | None:
        """Gives this name to the memory of a state that is not needed, and returns it."""
        if invalid is None and len(self._memory) < _KEPT:
            return None
        state = invalid or next(iter(self._memory))
        memory = self._memory.pop(state)
        manifest_of(state).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            (state / part_name(self._rank, self._ranks)).unlink()
            (state / file.name).replace(file)
            return memory
        return None

    def _check_room(self, size: int) -> None:
        """Raises an OSError where the states of this host's ranks would take more than half of its memory for files."""
        needed = _KEPT * size * self._parts_here
        if needed > shutil.disk_usage(self._folder).total // 2:
            raise OSError(
                f"{_KEPT} states would take {needed >> 20:,} MiB, more than half of {shared_memory()}, which loader processes "
                "need, too. HINT: recover.every_n_steps=null, or a larger /dev/shm"
            )

    def _remove_all_but(self, kept: set[Path]) -> None:
        if self._is_first_here:
            for path in checkpoints_in(self._folder):
                if path not in kept:
                    with suppress(OSError):
                        remove(path)


def _copied(checkpoint: StateDict) -> StateDict:
    """Returns a checkpoint with plain copies of its tensors: a view would be saved with all that it is a view of."""
    copies: dict[int, Tensor] = {}

    def copy(value: object, _: str) -> object:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().to("cpu", copy=True)
        return copies[id(value)]

    return changed(checkpoint, copy)
