"""torchrun, which Ray's supervisors also stand for: what its agent sets in a worker's environment."""

import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from project.cluster.place import process_started
from project.launch.engine import Launch, LaunchError, number
from project.launch.orphans import launcher_pid

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Torchrun(Launch):
    """A worker of torchrun."""

    kind: ClassVar[str] = "torchrun"

    def environment(self) -> TorchElasticEnvironment:
        return TorchElasticEnvironment()

    def check(self, trainer: Mapping[str, object]) -> None:
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in os.environ:
            log.warning(
                "torchrun may restart the workers, and a restart can hang. HINT: start it with "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, as scripts/launch.sh does."
            )


def detect_torchrun(environment: Mapping[str, str]) -> Torchrun | None:
    """Returns what torchrun has set; None where it did not launch this process."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    world, local = number(environment, "WORLD_SIZE", 1), number(environment, "LOCAL_WORLD_SIZE", 1)
    groups = number(environment, "GROUP_WORLD_SIZE", world // local)
    if local * groups != world:
        raise LaunchError(
            f"torchrun started {world} processes on {groups} nodes, {local} of them here: every node must have the same "
            "number. HINT: give the same --nproc-per-node on every node."
        )
    # Agents that meet under an id of the user's have that in common; otherwise the agent of rank 0 outlives its workers.
    run_id, rank = environment["TORCHELASTIC_RUN_ID"], number(environment, "RANK", 0)
    if run_id not in ("", "none") and not re.fullmatch(r"[0-9a-f-]{36}", run_id):
        return Torchrun(rank, groups, local, re.sub(r"[^\w.-]", "_", run_id))
    name = f"{datetime.fromtimestamp(process_started(launcher_pid())):%Y%m%d-%H%M%S}"
    if rank == 0 and (error_file := environment.get("TORCHELASTIC_ERROR_FILE")):
        name = _first_name(name, Path(error_file).parents[2] / "run")  # AGENT/attempt_0/0/error.json
    return Torchrun(rank, groups, local, name)


def _first_name(name: str, file: Path) -> str:
    """Returns the name that the agent's first workers took: the agent's start time changes when the clock is set."""
    with suppress(OSError):
        try:
            with file.open("x") as new:
                new.write(name)
        except FileExistsError:
            return file.read_text() or name
    return name
