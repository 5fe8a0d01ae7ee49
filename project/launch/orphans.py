"""A worker ends with the process that launched it: torchrun's agent, or rank 0 under plain Python.

Otherwise a killed agent leaves a worker that trains on, unseen, and holds its GPU.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
LAUNCHER = "PROJECT_LAUNCHER"
"""The environment variable with the process id of what started this rank's supervisor."""


def ends_with_parent() -> bool:
    """Returns whether this process was launched for the run; rank 0 of plain Python is its user's own."""
    return "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("LOCAL_RANK", "0") != "0"


def is_first_of_agent() -> bool:
    """Returns whether this process's rank is the first that torchrun's agent has launched on this host."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK") == "0"


def launcher_pid() -> int:
    """Returns the process id of what launched this process, or its supervisor."""
    return int(os.environ.get(LAUNCHER) or os.getppid())


def is_supervised() -> bool:
    """Returns whether a supervisor reports and records the end of this process's rank."""
    return LAUNCHER in os.environ


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends."""
    parent = os.getppid()
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0 and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # it ended in between
