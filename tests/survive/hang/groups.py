"""Four ranks in groups of two, as tensor parallelism has them: rank 1 hangs before a collective of a group."""

import json
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import init_device_mesh

from project.step.flight_recorder import recorded_collectives
from project.survive.hang.flights import progress_by_group
from project.survive.hang.heartbeats import Flight, Heartbeat
from tests.cluster.machine import wait_until

LATE = 1


def main() -> None:
    """Writes each rank's heartbeat to beat-RANK.json when all wait, and ends."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "layers"))
    threading.Thread(target=_speak, args=(rank,)).start()
    value = torch.ones(3)
    dist.all_reduce(value)
    for step in range(3):
        if step == 2 and rank == LATE:
            threading.Event().wait()
        dist.all_reduce(value, group=mesh["layers"].get_group())
        dist.all_reduce(value, group=mesh["data"].get_group())


def _speak(rank: int) -> None:
    files = [Path(f"beat-{number}.json") for number in range(dist.get_world_size()) if number != LATE]

    def settled() -> bool:
        if rank == LATE:
            return all(file.exists() for file in files)
        return any(
            flight.number == 3 and flight.stage == Flight.STARTED
            for flight in progress_by_group(recorded_collectives()).values()
        )

    wait_until(settled, 60, f"rank {rank} is not where it should be")
    beat = Heartbeat(
        (9, 0, 2), "forward", 8, 0, time.time() - 20, 20.0, 10.0, 10.0, flights=progress_by_group(recorded_collectives())
    )
    unfinished = Path(f"{rank}.unfinished")
    unfinished.write_text(json.dumps(asdict(beat)))
    unfinished.rename(f"beat-{rank}.json")
    wait_until(Path(f"beat-{LATE}.json").exists, 60, "a rank is missing")
    os._exit(0)
