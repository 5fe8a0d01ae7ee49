"""How many cores this process really has: affinity, cgroup and Slurm each may say less than the machine does."""

import os

from project.cluster.cgroups import quota


def cores(processes: int = 1) -> int:
    """Cores for each of `processes` on this host that share what this one is allowed to use; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared: list[float] = [allowed / processes]
    if (limit := quota()) is not None:
        shared.append(limit / processes)
    if task := os.environ.get("SLURM_CPUS_PER_TASK"):
        shared.append(int(task))  # Slurm counts by task, and a task is one process
    return max(1, int(min(shared)))
