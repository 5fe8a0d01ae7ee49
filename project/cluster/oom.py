"""Tells whether the kernel has killed a process for its memory. Standard library only."""

from pathlib import Path

from project.cluster.cgroups import field, folders, two_numbers
from project.cluster.processes import is_ending

OOM_KILL = "reports an OOM kill"
TO_LOWER = (
    "HINT: it would be killed again: set data.num_workers or data.batch_size lower, give the job more memory, or see by the "
    "curve run/memory_gb whether something grows from step to step."
)


class OomKills:
    """Counts the OOM kills in a process's cgroup, to tell whether there was one since this object was made."""

    def __init__(self, pid: int | str = "self") -> None:
        self._pid = pid
        self._counter = self._last = _oom_counter(pid)
        self._count_before = self._count()

    def follow_cgroup(self) -> None:
        """Follows the process into another cgroup: one that it is seen in twice. A process that ends is in none."""
        now, last = _oom_counter(self._pid), self._last
        self._last = now
        if now == last != self._counter and not is_ending(self._pid):
            self._counter, self._count_before = now, 0

    def _count(self) -> int:
        """Returns how many OOM kills the kernel has counted in the cgroup so far."""
        return int(field(self._counter[0], "oom_kill") or 0)

    def __str__(self) -> str:
        """Returns the end of the sentence 'was killed by signal 9' if there was an OOM kill, or ''."""
        self.follow_cgroup()
        self.follow_cgroup()
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
