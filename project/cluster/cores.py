"""How many cores this process really has: affinity, cgroup and Slurm each may say less than the machine does."""

import os
from pathlib import Path


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The CPU limit of this process's cgroup or of one above it (v2 and v1), in cores."""
    quotas: list[float] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "cpu", _quota_v1
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if (quota := read(place)) is not None:
                quotas.append(quota)
            if place == base:
                break
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if quota < 0 else quota / period


def cores(processes: int = 1) -> int:
    """Cores for each of `processes` on this host that share what this one is allowed to use; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shared: list[float] = [allowed / processes]
    if (quota := _cgroup_quota()) is not None:
        shared.append(quota / processes)
    if task := os.environ.get("SLURM_CPUS_PER_TASK"):
        shared.append(int(task))  # Slurm counts by task, and a task is one process
    return max(1, int(min(shared)))
