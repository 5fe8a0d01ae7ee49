"""Detects who launched this process: torchrun, srun or plain Python."""

import os
from collections.abc import Mapping

from project.launch.engine import Launch, LaunchError, number
from project.launch.srun import detect_srun, slurm_name
from project.launch.supervisor import SUPERVISED
from project.launch.torchrun import detect_torchrun

__all__ = ["Launch", "LaunchError", "detect", "rank_said"]


def detect(environment: Mapping[str, str] = os.environ) -> Launch:
    """Reads the launcher's environment variables. Raises a ValueError that names the right command if the setup can't work."""
    if (launch := detect_torchrun(environment) or detect_srun(environment)) is not None:
        return launch
    # Rank 0 is all that matters before Lightning has made the other processes.
    rank = number(environment, "NODE_RANK", 0) + number(environment, "LOCAL_RANK", 0)
    return Launch(rank, name=slurm_name(environment) or environment.get(SUPERVISED))


def rank_said(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the rank that the launcher gave this process, also where the rest of its variables can't work."""
    rank = environment.get("RANK") or environment.get("SLURM_PROCID") or "0"
    return int(rank) if rank.isdigit() else 0
