"""Detects who launched this process: torchrun, srun or plain Python; and its rank, the nodes, the processes on each, and a name
that stays when the launcher starts them again.

One YAML serves all launchers: where one set the number of nodes and of processes on each, that is what is used, whatever the
YAML says; plain Python uses the YAML's. A new one is a subclass of `Launch`, and a line in `detect`.
"""

import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from project.cluster.interfaces import resolve
from project.cluster.place import process_started
from project.cluster.slurm import field, hostnames, job_name, query
from project.errors import FaultError, UserError
from project.launch.orphans import launcher_pid
from project.launch.supervisor import SUPERVISED

log = logging.getLogger(__name__)


class LaunchError(UserError):
    """Raised when the launcher's setup can't work. Every rank detects the same, and rank 0 reports it."""


def number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Returns the number that an environment variable holds."""
    value = environment.get(name, "")
    try:
        return int(value) if value else default
    except ValueError:
        raise UserError(f"The environment variable {name} must be a number, and is {value!r}.") from None


@dataclass(frozen=True)
class Launch:
    """Plain Python, and what every engine has."""

    kind: ClassVar[str] = "python"
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
        """Returns the host that a rank should be on, where the launcher knows it."""
        return None

    def environment(self) -> ClusterEnvironment:
        """Returns Lightning's view of this launcher; chosen here, because Lightning's own guess goes by the job's name."""
        return LightningEnvironment()

    def check(self, trainer: Mapping[str, object]) -> None:
        """Raises an error where the Trainer's arguments and this launcher can't work together."""
        nodes = trainer.get("num_nodes")
        if isinstance(nodes, int) and nodes > 1 and not {"NODE_RANK", "MASTER_ADDR"} <= os.environ.keys():
            raise UserError(
                f"trainer.num_nodes={nodes}, and nothing says which of the nodes this is. HINT: start scripts/launch.sh "
                f"on every node (NNODES={nodes} NODE_RANK=... MASTER_ADDR=...), or use srun (scripts/slurm.sbatch)."
            )

    def settle(self, trainer: Mapping[str, object]) -> tuple[dict[str, int | None], list[str]]:
        """Returns the Trainer's arguments that follow from the launcher, and a line for each that differs in the YAML."""
        self.check(trainer)
        settled = {"num_nodes": self.nodes, "devices": self.processes} if self.world_size else {}
        lines = []
        for name, value in settled.items():
            wanted = trainer.get(name)
            if wanted not in (None, "auto", -1, "-1", value, str(value)) and not (name == "num_nodes" and wanted == 1):
                lines.append(f"trainer.{name}={value}, from {self.kind}, instead of the configuration's {wanted}")
        return settled, lines


# torchrun, which Ray's supervisors also stand for: what its agent sets in a worker's environment ---------------------


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
        with suppress(FileExistsError), file.open("x") as new:
            new.write(name)
        return file.read_text() or name
    return name


# Slurm's srun: what it sets in a task's environment, and what in it can't work ---------------------------------------


class SrunEnvironment(SLURMEnvironment):
    """A SLURMEnvironment of Lightning's without its checks: they refuse `srun -n 2`, and `Srun` has better ones. It also
    finds a first node whose name only Slurm knows.
    """

    def __init__(self) -> None:  # Lightning's does nothing more than this and its checks
        self.auto_requeue, self.requeue_signal = False, None

    @property
    def main_address(self) -> str:
        if "MASTER_ADDR" not in os.environ:
            os.environ["MASTER_ADDR"] = _reachable(self.resolve_root_node_address(os.environ["SLURM_STEP_NODELIST"]))
        return os.environ["MASTER_ADDR"]

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass


@dataclass(frozen=True)
class Srun(Launch):
    """A task of srun."""

    kind: ClassVar[str] = "srun"

    def host_of(self, rank: int) -> str | None:
        names, node = hostnames(os.environ.get("SLURM_STEP_NODELIST", "")), rank // (self.processes or 1)
        return names[node] if node < len(names) else None

    def environment(self) -> SrunEnvironment:
        return SrunEnvironment()

    def check(self, trainer: Mapping[str, object]) -> None:
        """Checks that a task is a process is a device: if Slurm's tasks, its GPUs and the YAML's devices differ, some would
        idle."""
        nodes, tasks = self.nodes or 1, self.processes or 1
        devices, gpus = trainer.get("devices"), number(os.environ, "SLURM_GPUS_ON_NODE", 0)
        if isinstance(devices, str) and devices.isdigit():
            devices = int(devices)
        if isinstance(devices, (list, tuple)):
            devices = len(devices)
        if isinstance(devices, int) and devices > 0 and devices != tasks:
            raise LaunchError(
                f"trainer.devices={devices}, and srun started {tasks} task(s) on each of {nodes} node(s); a task is one "
                f"process on one device. HINT: leave trainer.devices at auto, or write{_sbatch(nodes, devices, gpus)}"
            )
        if not gpus or trainer.get("accelerator") == "cpu":
            return
        if gpus != tasks:
            raise LaunchError(
                f"Slurm gave this job {gpus} GPU(s) on each node, and srun started {tasks} task(s) there; a task is one "
                f"process on one GPU. HINT: write{_sbatch(nodes, gpus, gpus)}\n"
                "(or trainer.accelerator=cpu, for a run without GPUs)"
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if visible and visible.count(",") + 1 < tasks:
            raise LaunchError(
                f"Each task sees {visible.count(',') + 1} of its node's {gpus} GPUs (--gpus-per-task or --gpu-bind), and its "
                f"process must see all and takes its own. HINT: write{_sbatch(nodes, tasks, gpus)}"
            )


def detect_srun(environment: Mapping[str, str]) -> Srun | None:
    """Returns what srun has set; None outside of Slurm, and in a job of one task. Refuses what can't work."""
    job, step = environment.get("SLURM_JOB_ID"), "SLURM_STEP_ID" in environment
    if (components := number(environment, "SLURM_HET_SIZE", 1)) > 1:
        # Slurm's numbers of nodes, tasks and GPUs may be one component's, or those of all.
        lists = "; ".join(environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{index}", "?") for index in range(components))
        raise LaunchError(
            f"Slurm job {job} is a heterogeneous job of {components} components ({lists}), and a run needs "
            "nodes that are alike. HINT: take '#SBATCH hetjob' out of the batch script, or the ':' out of sbatch's and srun's "
            "words (or, to train in one of the components: srun --het-group=1 env -u SLURM_HET_SIZE python -m project ...)"
        )
    if not step:
        tasks, nodes = number(environment, "SLURM_NTASKS", 1), number(environment, "SLURM_NNODES", 1)
        if job is not None and (tasks > 1 or nodes > 1):  # one of its tasks would run, and wait for the others forever
            raise LaunchError(
                f"Slurm job {job} has {tasks} tasks on {nodes} node(s), and this process was started "
                "without srun, alone. HINT: write 'srun python -m project ...' in the batch script (see "
                "scripts/slurm.sbatch)."
            )
        return None
    tasks, gpus = number(environment, "SLURM_STEP_NUM_TASKS", 1), number(environment, "SLURM_GPUS_ON_NODE", 0)
    allocated = number(environment, "SLURM_JOB_NUM_NODES", 1)
    nodes = number(environment, "SLURM_STEP_NUM_NODES", allocated)
    if nodes < allocated:  # `srun -n 1` on two nodes is one process on one, with a warning
        each = gpus or number(environment, "SLURM_NTASKS_PER_NODE", 1)
        raise LaunchError(
            f"srun started {environment.get('SLURM_STEP_NUM_TASKS')} task(s) on {nodes} of the {allocated} nodes of Slurm job "
            f"{job}: the others would idle. HINT: write{_sbatch(allocated, each, gpus)}\n"
            "and srun without -n and -N (or, if that is what you want: "
            "srun ... env -u SLURM_JOB_NUM_NODES python -m project ...)"
        )
    if tasks == 1:
        return None
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    if tasks % nodes or "," in per_node:
        raise LaunchError(
            f"srun placed {tasks} tasks on {nodes} nodes ({per_node}): every node must have the same number. "
            f"HINT: write{_sbatch(nodes, gpus or -(-tasks // nodes), gpus)}\nand srun without -n and -N"
        )
    return Srun(number(environment, "SLURM_PROCID", 0), nodes, tasks // nodes, slurm_name(environment))


def slurm_name(environment: Mapping[str, str]) -> str | None:
    """Returns the number of a job, or of a task of an array, which stays when Slurm requeues it. A command that is typed into a
    shell within a job has no name: each of these is another run.
    """
    batch = environment.get("ENVIRONMENT") == "BATCH"
    if not batch and ("SLURM_STEP_ID" not in environment or "SLURM_PTY_PORT" in environment):
        return None
    return job_name(environment) if "SLURM_JOB_ID" in environment else None


def _sbatch(nodes: int, tasks: int, gpus: int = 0) -> str:
    """Returns the matching lines of a batch script, one option on each line."""
    lines = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", *([f"--gpus-per-node={tasks}"] if gpus else [])]
    return "".join(f"\n#SBATCH {line}" for line in lines)


def _reachable(node: str) -> str:
    """Returns a node's name if it resolves, else the address that Slurm has for it."""
    if resolve(node):
        return node
    address = field("NodeAddr", query("scontrol", "show", "node", node))
    if address in ("", node):
        raise FaultError(
            f"The name of the job's first node, {node}, does not resolve here, and Slurm names no address for it. "
            "HINT: export MASTER_ADDR=... before srun."
        )
    log.info("MASTER_ADDR=%s: the name %s does not resolve, and that is the address that Slurm has for it", address, node)
    return address


# Who it was ----------------------------------------------------------------------------------------------------------


def detect(environment: Mapping[str, str] = os.environ) -> Launch:
    """Reads the launcher's environment variables. Raises a ValueError that names the right command if the setup can't work."""
    for name in ("MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        number(environment, name, 0)
    if (launch := detect_torchrun(environment) or detect_srun(environment)) is not None:
        return launch
    # Rank 0 is all that matters before Lightning has made the other processes.
    rank = number(environment, "NODE_RANK", 0) + number(environment, "LOCAL_RANK", 0)
    return Launch(rank, name=slurm_name(environment) or environment.get(SUPERVISED))


def rank_said(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the rank that the launcher gave this process, also where the rest of its variables can't work."""
    rank = environment.get("RANK") or environment.get("SLURM_PROCID") or "0"
    return int(rank) if rank.isdigit() else 0
