"""Counts the cores that this process may use: affinity, cgroup and Slurm each may allow fewer than the machine has."""

import os

from project.cluster.cgroups import quota


def cores(processes: int = 1) -> int:
    """Returns the cores for each of `processes` on this host that share what this process may use; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own = min(allowed, quota() or allowed) / processes
    by_slurm = int(os.environ.get("SLURM_CPUS_PER_TASK") or allowed)  # Slurm counts by task, and a task is one process
    return max(1, int(min(own, by_slurm)))
