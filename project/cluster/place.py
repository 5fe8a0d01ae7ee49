"""Where this process is, in names: its host, and in a container also the node and the image, which whoever starts it says.

A container's host name is a random id or a pod's name, which leads nobody to a machine, and no image knows its own digest.
Standard library only.
"""

import os
import re
import shutil
import socket
from collections.abc import Mapping

NODE, IMAGE = "PROJECT_NODE", "PROJECT_IMAGE"
"""Environment variables."""

_WITH_NODE = re.compile(r"(?P<host>\S+) \(on (?P<node>.+)\)(#\d+)?")


def host(environment: Mapping[str, str] = os.environ) -> str:
    """The name of this host in what is said to people: 'h1', or 'train-1 (on node-7)' in a container whose node is known."""
    name, node = socket.gethostname(), environment.get(NODE, "").strip()
    return f"{name} (on {node})" if node not in ("", name) else name


def short(host: str) -> str:
    """The name without its node: for the names of figures."""
    found = _WITH_NODE.fullmatch(host)
    return found["host"] if found else host


def node_of(host: str) -> str:
    """The machine that a host is on, as far as its name says. A container that is started again has another name there."""
    found = _WITH_NODE.fullmatch(host)
    return found["node"] if found else host


MORE_SHARED_MEMORY = (
    "give it more (docker run --shm-size=8g or --ipc=host; in a pod, an emptyDir of medium: Memory on /dev/shm), or set "
    "data.num_workers or data.batch_size lower."
)
"""What to do where /dev/shm is too small for what a loader's processes send; a container has 64 MB unless it is told."""


def shared_memory() -> str:
    """/dev/shm and its size, in words."""
    try:
        return f"/dev/shm ({shutil.disk_usage('/dev/shm').total >> 20:,} MiB)"
    except OSError:
        return "/dev/shm"


def image(environment: Mapping[str, str] = os.environ) -> str:
    """The image that this process runs in, name@digest; 'none' where nobody has said it."""
    return environment.get(IMAGE, "").strip() or "none"
