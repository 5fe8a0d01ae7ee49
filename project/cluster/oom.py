"""Tells whether the kernel has killed a process for its memory. Standard library only."""

from pathlib import Path

from project.cluster.cgroups import field, folders, two_numbers

OOM_KILL = "reports an OOM kill"
TO_LOWER = (
    "HINT: it would be killed again: set data.num_workers or data.batch_size lower, give the job more memory, or see by the "
    "curve run/memory_gb whether something grows from step to step."
)


class OomKills:
    """Counts the OOM kills in a process's cgroup, to tell whether there was one since this object was made."""

    def __init__(self, pid: int | str = "self") -> None:
        self._counter = _oom_counter(pid)
        self._count_before = self._count()

    def _count(self) -> int:
        """Returns how many OOM kills the kernel has counted in the cgroup so far."""
        return int(field(self._counter[0], "oom_kill") or 0)

    def __str__(self) -> str:
        """Returns the end of the sentence 'was killed by signal 9' if there was an OOM kill, or ''."""
        return f", and its {self._counter[1]} {OOM_KILL}" if self._count() > self._count_before else ""

    @property
    def limit(self) -> int | None:
        """Returns the bytes that the cgroup may hold; None where it has no limit of its own."""
        folder = self._counter[0].parent
        return two_numbers(folder / "memory.max", folder / "memory.limit_in_bytes")[0]


def _oom_counter(pid: int | str) -> tuple[Path, str]:
    """Returns where the kernel counts: in the cgroup's memory.events (v2) or memory.oom_control (v1), or for the whole host."""
    for folder, version in folders("memory", Path(f"/proc/{pid}")):
        file = folder / ("memory.events" if version == 2 else "memory.oom_control")
        if file.is_file():
            return file, "cgroup"
    return Path("/proc/vmstat"), "host"
