"""Finds the limits of this process's cgroup, as they are visible from here. Standard library only.

In a container the path in /proc/self/cgroup is often one outside of it, and what is mounted is the container's own part of the
tree: /proc/self/mountinfo shows which.
"""

from contextlib import suppress
from pathlib import Path


def folders(controller: str, proc: Path = Path("/proc/self")) -> list[tuple[Path, int]]:
    """Returns the folders of this process's cgroup and of those above it, each with the version (1 or 2) of its cgroups.

    Version 2 has one tree for all controllers, of which it may have this one; both versions can be there side by side.
    """
    try:
        groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [line.split(" - ", 1) for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return []
    cgroup_folders: list[tuple[Path, int]] = []
    for place, system in mounts:
        kind, _, options = system.split(" ", 2)
        if kind == "cgroup2":
            version, path_in_tree = 2, next((path for _, names, path in groups if names == ""), None)
        elif kind == "cgroup" and controller in options.rpartition(" ")[2].split(","):
            version, path_in_tree = 1, next((path for _, names, path in groups if controller in names.split(",")), None)
        else:
            continue
        root, mounted = (_plain(part) for part in place.split(" ")[3:5])
        if path_in_tree is not None:
            cgroup_folders += [(folder, version) for folder in _upwards(Path(mounted), _below(root, path_in_tree))]
    return cgroup_folders


def _below(root: str, path: str) -> str:
    """Returns the part of a cgroup's path that lies below what is mounted; '' where another part of the tree is mounted."""
    inside = root.rstrip("/")
    return path[len(inside) :].strip("/") if f"{path}/".startswith(f"{inside}/") and ".." not in path else ""


def _upwards(mounted: Path, below: str) -> list[Path]:
    folder = mounted / below
    return [path for path in (folder, *folder.parents) if path.is_relative_to(mounted) and path.is_dir()]


def _plain(text: str) -> str:
    """Decodes a path of mountinfo, which writes blanks and the like in octal."""
    return text.encode().decode("unicode_escape")


def number(file: Path, first: bool = True) -> int | None:
    """Returns the number in a cgroup's file; None if there is no such file, or no limit ('max', -1, v1's huge number)."""
    with suppress(OSError, ValueError, IndexError):
        value = int(file.read_text().split()[0 if first else 1])
        return value if 0 <= value < 1 << 60 else None
    return None


def quota(proc: Path = Path("/proc/self")) -> float | None:
    """Returns the tightest limit of CPU time, in cores."""
    limits = []
    for folder, version in folders("cpu", proc):
        if version == 2:
            time, period = number(folder / "cpu.max"), number(folder / "cpu.max", first=False)
        else:
            time, period = number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")
        if time and period:
            limits.append(time / period)
    return min(limits, default=None)


def memory_left(proc: Path = Path("/proc/self")) -> int | None:
    """Returns the bytes that the tightest memory limit leaves. The kernel reclaims unused pages of the file cache."""
    left = []
    for folder, version in folders("memory", proc):
        limit, used, cache = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        most, taken = number(folder / limit), number(folder / used)
        if most is not None and taken is not None:
            left.append(max(0, most - taken + _stat(folder / "memory.stat", cache)))
    return min(left, default=None)


def _stat(file: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        words = file.read_text().split()
        return int(words[words.index(name) + 1])
    return 0
