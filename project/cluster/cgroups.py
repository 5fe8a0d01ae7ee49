"""Finds the limits of this process's cgroup, as they are visible from here, and reads /proc. Standard library only.

In a container the path in /proc/self/cgroup is often one outside of it, and what is mounted is the container's own part of the
tree: /proc/self/mountinfo shows which.
"""

from contextlib import suppress
from pathlib import Path


def field(file: Path, name: str) -> str:
    """Returns what follows a name at the beginning of a line of a file like /proc/meminfo; '' where there is none."""
    with suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(name) and not line[len(name) :][:1].strip(" \t:"):
                return line[len(name) :].strip(" \t:")
    return ""


def folders(controller: str, proc: Path = Path("/proc/self")) -> list[tuple[Path, int]]:
    """Returns the folders of this process's cgroup and of those above it, each with the version (1 or 2) of its cgroups.

    Version 2 has one tree for all controllers, of which it may have this one; both versions can be there side by side.
    """
    try:
        groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [line.split(" - ", 1) for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return []
    paths = {name: path for _, names, path in groups for name in names.split(",")}  # version 2 has no name
    cgroup_folders: list[tuple[Path, int]] = []
    for place, system in mounts:
        kind, _, options = system.split(" ", 2)
        version = {"cgroup": 1, "cgroup2": 2}.get(kind, 0)
        path = paths.get("" if version == 2 else controller)
        if not version or path is None or (version == 1 and controller not in options.rpartition(" ")[2].split(",")):
            continue
        root, mounted = (_plain(part) for part in place.split(" ")[3:5])
        folder, top = Path(mounted) / _below(root, path), Path(mounted)
        above = [part for part in (folder, *folder.parents) if part.is_relative_to(top) and part.is_dir()]
        cgroup_folders += [(part, version) for part in above]
    return cgroup_folders


def _below(root: str, path: str) -> str:
    """Returns the part of a cgroup's path that lies below what is mounted; '' where another part of the tree is mounted."""
    inside = root.rstrip("/")
    return path[len(inside) :].strip("/") if f"{path}/".startswith(f"{inside}/") and ".." not in path else ""


def _plain(text: str) -> str:
    """Decodes a path of mountinfo, which writes blanks and the like in octal."""
    return text.encode().decode("unicode_escape")


def two_numbers(*files: Path) -> tuple[int | None, int | None]:
    """Returns the numbers in a cgroup's files; None where that is no limit ('max', -1, v1's huge number), or a file missing."""
    texts = list[str]()
    for file in files:
        with suppress(OSError):
            texts += file.read_text().split()
    first, second = (int(text) if text.isdigit() and int(text) < 1 << 60 else None for text in [*texts, "", ""][:2])
    return first, second


def quota(proc: Path = Path("/proc/self")) -> float | None:
    """Returns the tightest limit of CPU time, in cores."""
    limits = []
    for folder, version in folders("cpu", proc):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        time, period = two_numbers(*(folder / name for name in names))
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
        most, taken = two_numbers(folder / limit, folder / used)
        if most is not None and taken is not None:
            left.append(max(0, most - taken + int(field(folder / "memory.stat", cache) or 0)))
    return min(left, default=None)
