"""Ranks that write checkpoints in parts without a training: processes that are started, struck, and looked at."""

import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from project.checkpoints.callback import Checkpoints
from project.checkpoints.reading import SafeCheckpointIO
from project.checkpoints.writing import ShardWriters
from project.cluster.interfaces import use_loopback
from project.parts import Stored
from project.sharded.shards import Split, read_shard, split
from tests.conftest import _SERVER, PATIENCE
from tests.survive.test_resume import same

SPREAD = ("weight", "bias", "row")
_MOVES = ((os, "mkdir"), (os, "fsync"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (torch, "save"))


def whole(step: int) -> dict[str, Any]:
    """A run's state at a step: a matrix that no number of ranks divides, a vector that is smaller than most, averages of
    them, what each rank has, and values of other kinds."""
    draw = torch.Generator().manual_seed(step)
    weight, bias = torch.randn(7, 3, generator=draw), torch.randn(2, generator=draw)
    row = torch.randn(1, 5, generator=draw, dtype=torch.float64)
    state = {"weight": weight, "bias": bias, "row": row, "running_mean": torch.full((4,), float(step))}
    moments = {number: {"step": torch.tensor(float(step)), "exp_avg": state[name] * 2} for number, name in enumerate(SPREAD)}
    return {
        "state_dict": state,
        "current_model_state": {name: value + 1 for name, value in state.items()},
        "optimizer_states": [{"state": moments, "param_groups": [{"lr": 0.1, "params": [0, 1, 2], "betas": (0.9, 0.99)}]}],
        "callbacks": {"Yours": {"list": [bias.clone(), step], "empty": torch.empty(0, 3)}},
        "position": {"global_step": step},
    }


def spread(value: Any, mesh: DeviceMesh, name: str = "") -> Any:
    """The same, with what is named in SPREAD, and the moments of it, spread by torch over a mesh."""
    if isinstance(value, dict):
        return {key: spread(entry, mesh, str(key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [spread(entry, mesh, f"{name} {at}") for at, entry in enumerate(value)]
    if name not in (*SPREAD, "exp_avg", "list 0"):
        return value
    return distribute_tensor(value, mesh, [Shard(0) if at == "shard" else Replicate() for at in mesh.mesh_dim_names or ()])


@dataclass(frozen=True)
class Strike:
    """A rank ends before its so-manieth move of a write (in the middle of what it saves), alone or with `all`."""

    rank: int
    move: int
    all: bool = False


@dataclass
class World:
    """Ranks of one checkpoint folder.

    Args:
        folder: of a run.
        ranks: how many.
        hosts: over how many hosts they have copies.
    """

    folder: Path
    ranks: int = 2
    hosts: int = 1
    codes: list[int] = field(default_factory=list)

    def run(self, work: Callable[..., Any], *words: Any) -> list[Any]:
        """What `work` says on each rank; None of one that has ended before."""
        self.folder.mkdir(exist_ok=True)
        place = self.folder / "world"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        processes = [_SERVER.Process(target=_rank, args=(self, rank, work, *words)) for rank in range(self.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE)
            assert process.exitcode is not None, "a rank is still running"
        self.codes = [int(process.exitcode or 0) for process in processes]
        files = [place / f"result-{rank}" for rank in range(self.ranks)]
        return [json.loads(file.read_text()) if file.exists() else None for file in files]


def _rank(world: World, rank: int, work: Callable[..., Any], *words: Any) -> None:
    torch.set_num_threads(1)
    use_loopback()
    place = world.folder / "world"
    (place / f"pid-{rank}").write_text(str(os.getpid()))
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=world.ranks)
    sizes, names = ((world.ranks,), ("shard",)) if world.hosts == 1 else (
        (world.hosts, world.ranks // world.hosts), ("copies", "shard"),
    )  # fmt: skip
    result = work(world, init_device_mesh("cpu", sizes, mesh_dim_names=names), *words)
    (place / f"result-{rank}").write_text(json.dumps(result))
    if all(path.exists() for path in (place / f"pid-{rank}" for rank in range(world.ranks))):
        dist.destroy_process_group()


# What a world does ---------------------------------------------------------------------------------------------------


def write(world: World, mesh: DeviceMesh, steps: list[int], strike: Strike | None, keep: int) -> list[Any]:
    """Writes a checkpoint of each step as `Checkpoints` does, struck in the last; what became of each, and how many moves the
    last one took."""
    save = _saver(world, mesh, keep)
    results: list[Any] = []
    moves = [0]
    for step in steps:
        if step == steps[-1]:
            for module, name in _MOVES:
                setattr(module, name, _counted(getattr(module, name), moves, strike, world))
        results.append(save(step).failed)
    return [*results, moves[0]]


def _saver(world: World, mesh: DeviceMesh, keep: int) -> Callable[[int], Checkpoints]:
    rank = dist.get_rank()
    checkpoints = Checkpoints(keep_last=keep, monitor=None)
    checkpoints._shard_writers, checkpoints._folder = ShardWriters(f"host-{rank}", None), world.folder / "checkpoints"

    def save(step: int) -> Checkpoints:
        apart = split(spread(whole(step), mesh))
        manifest = {"position": {"global_step": step}} if rank == 0 else {}
        path = checkpoints._folder / f"step-{step:09d}.ckpt"
        checkpoints._write(path, Split(apart.marked if rank == 0 else {}, apart.slices), manifest)
        return checkpoints

    return save


def _counted(real: Any, moves: list[int], strike: Strike | None, world: World) -> Any:
    def move(*args: Any, **kwargs: Any) -> Any:
        number, moves[0] = moves[0], moves[0] + 1
        if strike is not None and (strike.rank, strike.move) == (dist.get_rank(), number):
            if real.__name__ == "save":
                content = io.BytesIO()
                real(args[0], content)
                args[1].write(content.getvalue()[: len(content.getvalue()) // 2])
                args[1].flush()
            ranks = range(world.ranks) if strike.all else ()
            pids = [int((world.folder / "world" / f"pid-{rank}").read_text()) for rank in ranks]
            for pid in (*(pid for pid in pids if pid != os.getpid()), os.getpid()):
                os.kill(pid, signal.SIGKILL)
        return real(*args, **kwargs)

    return move


def full_disk(world: World, mesh: DeviceMesh, sick: int) -> list[Any]:
    """Three checkpoints, of which the second finds a rank's disk full."""
    real = torch.save

    def full(value: Any, file: Any) -> None:
        file.write(b"half")
        raise RuntimeError("unexpected pos 64 vs 0") from OSError(28, "No space left on device")

    save = _saver(world, mesh, keep=9)
    results: list[Any] = []
    for step in (1, 2, 3):
        torch.save = full if step == 2 and dist.get_rank() == sick else real
        checkpoints = save(step)
        dist.barrier()  # what is left goes when the others have been told
        names = sorted(path.name for path in checkpoints._folder.iterdir())
        results.append((checkpoints.failed, names))
        dist.barrier()
    return results


def read(world: World, mesh: DeviceMesh, name: str, step: int) -> list[Any]:
    """Whether what this rank reads is its part of a step; and how many values it has read, and should hold."""
    taken = [0]
    fill = Stored.fill

    def counted(stored: Stored, tensor: Tensor, wanted: Any) -> Tensor:
        taken[0] += wanted.count
        return fill(stored, tensor, wanted)

    Stored.fill = counted  # type: ignore[method-assign]
    reader = SafeCheckpointIO()
    reader.slice_of = lambda stored: read_shard(stored, mesh)
    state = reader.load_checkpoint(world.folder / "checkpoints" / name)
    wanted = spread(whole(step), mesh)
    held = [0]
    alike = _alike(state, wanted, held)
    return [alike, taken[0], held[0]]


def _alike(value: Any, wanted: Any, held: list[int]) -> bool:
    """All of it is looked at: what is spread is brought together by all ranks."""
    if isinstance(wanted, DTensor):
        held[0] += wanted.to_local().numel()
        put_together = same(value.full_tensor(), wanted.full_tensor())
        placed = (value.placements, value.stride()) == (wanted.placements, wanted.stride())
        return put_together and placed and same(value.to_local(), wanted.to_local())
    if isinstance(wanted, dict):
        parts = [_alike(value[key], entry, held) for key, entry in wanted.items()]
        return all(parts) and value.keys() == wanted.keys()
    if isinstance(wanted, list):
        parts = [_alike(*pair, held) for pair in zip(value, wanted, strict=True)]
        return all(parts)
    return same(value, wanted)
