"""The facts about a rank: versions, hardware, limits. The doctor compares them, and so does a run on several hosts."""

import hashlib
import json
import os
import platform
import resource
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import lightning
import torch

import project
from project.cluster.cgroups import field, memory_left
from project.cluster.code import commit, sources
from project.cluster.cores import cores
from project.cluster.place import image
from project.cluster.settings import flat

SAME = ("Python", "torch", "CUDA", "NCCL", "lightning", "project", "commit", "sources", "image", "configuration")
"""Facts that must be the same on every rank: otherwise they train different things, or can't talk to each other."""
ALIKE = ("device", "devices", "memory", "driver", "CPU", "cores")
"""Facts that should be: otherwise the fastest wait for the slowest."""
Value = TypeVar("Value")


class Gather(Protocol):
    """Returns what every rank contributes, by rank; all of them call it."""

    def __call__(self, value: Value, /) -> list[Value]: ...


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "none"
    return next((part for part in text.split() if part[0].isdigit() and "." in part), "unknown")


def _cpu() -> str:
    return field(Path("/proc/cpuinfo"), "model name") or platform.machine()


def hardware(device: torch.device) -> str:
    """Returns the name of the hardware on which a rank computes."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()


def of_this_rank(device: torch.device, configuration: Mapping[str, object]) -> dict[str, str | int]:
    """Returns the facts about this rank; `configuration` is the resolved one."""
    facts: dict[str, str | int] = {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else "none",
        "lightning": lightning.__version__,
        "project": project.__version__,
        "commit": commit(),
        "sources": sources(),
        "image": image(),
        "configuration": digest(configuration),
        "CPU": _cpu(),
        "cores": cores(),
        "device": device.type,
        "devices": 0,
        "memory": "none",
        "driver": _driver(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "devices": torch.cuda.device_count(),
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        }
    return facts


def limits(folder: Path) -> dict[str, int | None]:
    """Returns the limits of a process on this host: a number of files, the rest in bytes."""
    return {
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "/dev/shm": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        "disk": shutil.disk_usage(folder).free if folder.is_dir() else None,
        "memory": _available_memory(),
    }


def _available_memory() -> int | None:
    """Returns the bytes of memory that are left on this host, or in the cgroup where that allows less."""
    left, available = memory_left(), field(Path("/proc/meminfo"), "MemAvailable")  # "123 kB"
    amounts = [] if left is None else [left]
    return min([*amounts, int(available.split()[0]) * 1024] if available else amounts, default=None)


def odd_ones(facts: Sequence[Mapping[str, object]], name: str) -> tuple[str, dict[int, object]]:
    """Returns the value of most ranks under a name, and the ranks with another one. A version may not know the name."""
    values = [rank_facts.get(name, "none") for rank_facts in facts]
    common = Counter(map(str, values)).most_common(1)[0][0]
    return common, {rank: value for rank, value in enumerate(values) if str(value) != common}


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Returns ranks and their hosts as text: 'rank 2 on h2', 'ranks 2 and 3 on h2, rank 5 on h4'."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    parts = []
    for host, members in by_host.items():
        shown = " and ".join(", ".join(map(str, members)).rsplit(", ", 1))
        parts.append(f"rank{'s' if len(members) > 1 else ''} {shown} on {host}")
    return ", ".join(parts)


def different(facts: Sequence[Mapping[str, object]], hosts: Sequence[str], names: Sequence[str]) -> dict[str, list[int]]:
    """Returns sentences about what differs between the ranks, each with the ranks that it is about."""
    sentences = {}
    for name in names:
        common, odd = odd_ones(facts, name)
        for value in dict.fromkeys(map(str, odd.values())):
            ranks = [rank for rank, other in odd.items() if str(other) == value]
            sentences[f"{named(ranks, hosts)}: {name} {value}, elsewhere {common}"] = ranks
    return sentences


def differing_keys(configurations: Sequence[Mapping[str, object]], hosts: Sequence[str]) -> dict[str, list[int]]:
    """Returns the same as `different`, for configurations: by key."""
    levels = [flat(configuration) for configuration in configurations]
    names = list(dict.fromkeys(name for level in levels for name in level))
    return different([{name: level.get(name, "not set") for name in names} for level in levels], hosts, names)


def digest(configuration: object) -> str:
    """Returns a short hash of a resolved configuration."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True, default=str).encode()).hexdigest()[:12]


def compare(
    facts: Mapping[str, object], configuration: Mapping[str, object], hosts: Sequence[str], gather: Gather
) -> dict[str, list[int]]:
    """Returns sentences about facts that must be equal on all ranks and are not. All ranks call it; `gather` is collective."""
    all_facts = gather(facts)
    odd = different(all_facts, hosts, [name for name in SAME if name != "configuration"])
    if different(all_facts, hosts, ["configuration"]):  # only now the whole of it is sent around
        odd |= differing_keys(gather(configuration), hosts)
    return odd
