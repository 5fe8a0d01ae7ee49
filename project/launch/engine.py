"""The engine that launched a process: its rank, the nodes, the processes on each, and a name that stays when it restarts them.

One YAML serves all engines: where one set the number of nodes and of processes on each, that is what is used, whatever the
YAML says; plain Python uses the YAML's. A new engine is one file with a subclass of `Launch`, and a line in `launcher.py`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from project.errors import UserError


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
