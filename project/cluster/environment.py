"""What a rank knows of itself: versions, hardware, limits. Compared by the doctor, and before a run on several hosts."""

import hashlib
import json
import os
import platform
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch

import project
from project.cluster.cgroups import memory_left
from project.cluster.code import commit, sources
from project.cluster.cores import cores
from project.cluster.place import image
from project.cluster.settings import flat

SAME = ("Python", "torch", "CUDA", "NCCL", "lightning", "project", "commit", "sources", "image", "configuration")
"""Facts that must be the same on every rank: otherwise they train different things, or can't talk to each other."""
ALIKE = ("device", "devices", "memory", "driver", "CPU", "cores")
"""Facts that should be: otherwise the fastest wait for the slowest."""


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "none"
    return next((word for word in text.split() if word[0].isdigit() and "." in word), "unknown")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def hardware(device: torch.device) -> str:
    """The name of what a rank computes on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()


def of_this_rank(device: torch.device, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """`configuration`: the resolved one."""
    facts: dict[str, Any] = {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or "none",
        "NCCL": _nccl() if device.type == "cuda" else "none",
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


def limits(folder: Path) -> dict[str, Any]:
    """What this host lets a process have, in bytes and in numbers."""
    return {
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "/dev/shm": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        "disk": shutil.disk_usage(folder).free if folder.is_dir() else None,
        "memory": _available_memory(),
    }


def _available_memory() -> int | None:
    """Memory that is left: of this host, or of the cgroup where that allows less."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    if (left := memory_left()) is not None:
        found.append(left)
    return min(found, default=None)


def odd_ones(facts: Sequence[Mapping[str, Any]], name: str) -> tuple[Any, dict[int, Any]]:
    """What most ranks have under a name, and the ranks that have something else. Another version may not know the name."""
    usual = Counter(str(one.get(name, "none")) for one in facts).most_common(1)[0][0]
    return usual, {rank: value for rank, one in enumerate(facts) if str(value := one.get(name, "none")) != usual}


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks and their hosts in words: 'rank 2 on h2', 'ranks 2 and 3 on h2, rank 5 on h4'."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    parts = []
    for host, there in by_host.items():
        shown = " and ".join(filter(None, [", ".join(map(str, there[:-1])), str(there[-1])]))
        parts.append(f"rank{'s' if len(there) > 1 else ''} {shown} on {host}")
    return ", ".join(parts)


def different(facts: Sequence[Mapping[str, Any]], hosts: Sequence[str], names: Sequence[str]) -> dict[str, list[int]]:
    """Sentences about what differs between the ranks, each with the ranks that it is about."""
    sentences = {}
    for name in names:
        usual, odd = odd_ones(facts, name)
        for value in dict.fromkeys(map(str, odd.values())):
            ranks = [rank for rank, other in odd.items() if str(other) == value]
            sentences[f"{named(ranks, hosts)}: {name} {value}, elsewhere {usual}"] = ranks
    return sentences


def differing_keys(configurations: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> dict[str, list[int]]:
    """Like `different`, for configurations: by key."""
    levels = [flat(one) for one in configurations]
    names = list(dict.fromkeys(name for level in levels for name in level))
    return different([{name: level.get(name, "not set") for name in names} for level in levels], hosts, names)


def digest(configuration: Any) -> str:
    """A short hash of a resolved configuration."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True, default=str).encode()).hexdigest()[:12]


def compare(
    mine: Mapping[str, Any], configuration: Mapping[str, Any], hosts: Sequence[str], gather: Callable[[Any], list[Any]]
) -> dict[str, list[int]]:
    """Sentences about what must be the same on all ranks and is not. Called by all; `gather` brings their facts together."""
    odd = different(gather(mine), hosts, SAME)
    keys = [sentence for sentence in odd if ": configuration " in sentence]
    if keys:  # only now the whole of it is sent around
        for sentence in keys:
            del odd[sentence]
        odd |= differing_keys(gather(configuration), hosts)
    return odd
