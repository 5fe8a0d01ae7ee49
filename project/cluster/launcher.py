"""Who launched this process (plain Python, torchrun or srun), and what that says about hosts and processes.

One YAML serves all launchers: where one set the number of nodes and of processes on each, that is what is used, whatever the
YAML says; plain Python uses the YAML's.
"""

import logging
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

log = logging.getLogger(__name__)


class SrunEnvironment(SLURMEnvironment):
    """Lightning's, without its checks: they refuse `srun -n 2`, and `detect` has made better ones."""

    @staticmethod
    def _validate_srun_used() -> None:
        pass

    @staticmethod
    def _validate_srun_variables() -> None:
        pass

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass


@dataclass(frozen=True)
class Launch:
    """What the launcher decided: nodes and processes on each, and which of them this process is."""

    kind: Literal["python", "torchrun", "srun"]
    rank: int = 0
    nodes: int | None = None
    """None: the launcher leaves it to the YAML."""
    processes: int | None = None
    """Processes on each node; None: the launcher leaves it to the YAML."""

    name: str | None = None
    """What stays the same when this launcher starts its processes again: a job's number, say."""

    @property
    def world_size(self) -> int | None:
        return self.nodes * self.processes if self.nodes and self.processes else None

    def host_of(self, rank: int) -> str | None:
        """The host that a rank should be on, where the launcher knows."""
        names = _slurm_hosts(os.environ.get("SLURM_STEP_NODELIST", "")) if self.kind == "srun" else []
        node = rank // (self.processes or 1)
        return names[node] if node < len(names) else None

    def environment(self) -> ClusterEnvironment:
        """Lightning's view of this launcher; chosen here, because Lightning's own guess goes by the job's name."""
        if self.kind == "torchrun":
            return TorchElasticEnvironment()
        if self.kind == "srun":
            return SrunEnvironment(auto_requeue=False)
        return LightningEnvironment()

    def settle(self, trainer: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The Trainer's arguments that follow from the launcher, and a line for each that the YAML has otherwise."""
        if self.kind == "python":
            self._check_plain(trainer)
            return {}, []
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in os.environ:
            log.warning(
                "torchrun may restart the workers, and a restart can hang. HINT: start it with "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, as scripts/launch.sh does."
            )
        settled: dict[str, Any] = {"num_nodes": self.nodes, "devices": self.processes}
        lines = []
        for name, value in settled.items():
            wanted = trainer.get(name)
            if wanted not in (None, "auto", -1, "-1", value, str(value)) and not (name == "num_nodes" and wanted == 1):
                lines.append(f"trainer.{name}={value}, from {self.kind}, instead of the configuration's {wanted}")
        return settled, lines

    def _check_plain(self, trainer: Mapping[str, Any]) -> None:
        nodes = trainer.get("num_nodes") or 1
        if nodes > 1 and not {"NODE_RANK", "MASTER_ADDR"} <= os.environ.keys():
            raise ValueError(
                f"trainer.num_nodes={nodes}, and nothing says which of the nodes this is. HINT: start scripts/launch.sh "
                f"on every node (NNODES={nodes} NODE_RANK=... MASTER_ADDR=...), or use srun (scripts/slurm.sbatch)."
            )


def detect(environment: Mapping[str, str] = os.environ) -> Launch:
    """Reads the launcher's environment variables. What can't work is a ValueError that says what to run instead."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return _torchrun(environment)
    if "SLURM_STEP_ID" in environment and _number(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _srun(environment)
    if "SLURM_JOB_ID" in environment:
        _refuse_forgotten_srun(environment)
    node_rank, local_rank = _number(environment, "NODE_RANK", 0), _number(environment, "LOCAL_RANK", 0)
    # Rank 0 is all that matters before Lightning has made the other processes.
    return Launch("python", rank=node_rank + local_rank)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, "")
    try:
        return int(value) if value else default
    except ValueError:
        raise ValueError(f"The environment variable {name} must be a number, and is {value!r}.") from None


def _parent_started() -> datetime:
    """When the process that launched this one was started."""
    ticks = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return datetime.fromtimestamp(boot + ticks / os.sysconf("SC_CLK_TCK"))


def _torchrun(environment: Mapping[str, str]) -> Launch:
    world, local = _number(environment, "WORLD_SIZE", 1), _number(environment, "LOCAL_WORLD_SIZE", 1)
    groups = _number(environment, "GROUP_WORLD_SIZE", world // local)
    if local * groups != world:
        raise ValueError(
            f"torchrun started {world} processes on {groups} nodes, {local} of them here: every node must have the same "
            "number. HINT: give the same --nproc-per-node on every node."
        )
    # Agents that meet under an id of the user's have that in common; otherwise the agent of rank 0 outlives its workers.
    run_id = environment["TORCHELASTIC_RUN_ID"]
    given = run_id not in ("", "none") and not re.fullmatch(r"[0-9a-f-]{36}", run_id)
    name = re.sub(r"[^\w.-]", "_", run_id) if given else f"{_parent_started():%Y%m%d-%H%M%S}"
    return Launch("torchrun", _number(environment, "RANK", 0), groups, local, name)


def _srun(environment: Mapping[str, str]) -> Launch:
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", 1)
    nodes = _number(environment, "SLURM_STEP_NUM_NODES", 1)
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    if tasks % nodes or "," in per_node:
        raise ValueError(
            f"srun placed {tasks} tasks on {nodes} nodes ({per_node}): every node must have the same number. "
            f"HINT: #SBATCH --nodes={nodes} --ntasks-per-node={max(1, tasks // nodes)}"
        )
    return Launch("srun", _number(environment, "SLURM_PROCID", 0), nodes, tasks // nodes, environment["SLURM_JOB_ID"])


def _refuse_forgotten_srun(environment: Mapping[str, str]) -> None:
    """Inside a job but started without srun: only one of its tasks would run, and wait for the others for ever."""
    if "SLURM_STEP_ID" in environment:
        return
    tasks, nodes = _number(environment, "SLURM_NTASKS", 1), _number(environment, "SLURM_NNODES", 1)
    if tasks > 1 or nodes > 1:
        raise ValueError(
            f"Slurm job {environment['SLURM_JOB_ID']} has {tasks} tasks on {nodes} node(s), and this process was started "
            "without srun, alone. HINT: write 'srun python -m project ...' in the batch script (see "
            "scripts/slurm.sbatch)."
        )


@cache
def _slurm_hosts(names: str) -> list[str]:
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", names], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split()


def host() -> str:
    return socket.gethostname()
