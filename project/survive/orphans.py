"""A worker ends with the process that launched it: torchrun's agent, or rank 0 under plain Python.

Otherwise a killed agent leaves a worker that trains on, unseen, and holds its GPU.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends (Linux; elsewhere nothing happens)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) == 0 and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # it ended in between
