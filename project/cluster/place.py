"""Names where this process is: its host, and in a container also the node and the image, which the launcher sets.

A container's host name is a random id or a pod's name, which leads nobody to a machine, and no image knows its own digest.
Standard library only.
"""

import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from project.cluster.cgroups import field
from project.cluster.processes import start_time

NODE, IMAGE = "PROJECT_NODE", "PROJECT_IMAGE"
MEMORY = "PROJECT_MEMORY"
"""Environment variables: the node, the image, and the folder in memory where ranks keep copies of the run's state."""
ATTEMPT = "PROJECT_ATTEMPT"
"""The environment variable in which a supervisor counts its starts of the ranks, from 0."""


def restarts() -> int:
    """Returns how often a supervisor has started the ranks of this run again."""
    return int(os.environ.get(ATTEMPT, "0"))


def host(environment: Mapping[str, str] = os.environ) -> str:
    """Returns this host's name for messages: 'h1', or 'train-1 (on node-7)' in a container whose node is known."""
    name, node = socket.gethostname(), environment.get(NODE, "").strip()
    return f"{name} (on {node})" if node not in ("", name) else name


def short(host: str) -> str:
    """Returns the name without its node: for the names of figures."""
    return host.partition(" (on ")[0]


def node_of(host: str) -> str:
    """Returns the machine that a host is on, as far as its name tells. A restarted container has another name there."""
    return host.partition(" (on ")[2].rpartition(")")[0] or host


MORE_SHARED_MEMORY = (
    "give it more (docker run --shm-size=8g or --ipc=host; in a pod, an emptyDir of medium: Memory on /dev/shm), or set "
    "data.num_workers or data.batch_size lower."
)
"""What to do where /dev/shm is too small for what a loader's processes send; a container has 64 MB unless it is told."""


def shared_memory() -> str:
    """Returns /dev/shm and its size, as text."""
    try:
        return f"/dev/shm ({shutil.disk_usage('/dev/shm').total >> 20:,} MiB)"
    except OSError:
        return "/dev/shm"


def process_started(pid: int) -> float:
    """Returns when a process was started, in seconds since 1970, to a second: the same whoever asks."""
    return float(field(Path("/proc/stat"), "btime")) + _started_after_boot(pid)


def process_age(pid: int) -> float:
    """Returns the seconds since a process was started; 0 where the system does not tell."""
    with suppress(OSError, ValueError):
        return float(Path("/proc/uptime").read_text().split()[0]) - _started_after_boot(pid)
    return 0.0


def _started_after_boot(pid: int) -> float:
    return int(start_time(pid)) / os.sysconf("SC_CLK_TCK")


def image(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the image of this process, name@digest; 'none' where the environment names none."""
    return environment.get(IMAGE, "").strip() or "none"
