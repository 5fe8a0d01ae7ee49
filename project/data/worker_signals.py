"""Makes a loader's processes survive the signals that their rank survives: a signal to a whole process group, as `timeout`,
Slurm and systemd send it, stops the rank between two steps, and until then it needs them.
"""

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.queues import Queue
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType

from torch.utils.data import DataLoader

_SENT_TO_GROUPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_PATIENCE = 5.0  # seconds that a process has at the program's end, as torch gives it
_feeder_error = Queue._on_queue_feeder_error  # type: ignore[attr-defined]


def with_signals(loader: DataLoader[object]) -> None:
    """Makes the processes of a loader follow their rank, and end where they can't send a batch."""
    init = loader.worker_init_fn
    if not loader.num_workers or (isinstance(init, partial) and init.func is _begin):
        return
    loader.worker_init_fn = partial(_begin, init)
    _end_at_exit(os.getpid())


def _begin(init_fn: Callable[[int], None] | None, number: int) -> None:
    """Makes this loader process ignore the signals that its rank catches. It ends by SIGTERM where the rank no longer catches
    that: then the rank sent it, or ends by it, too."""
    for caught in _SENT_TO_GROUPS:
        if signal.getsignal(caught) is not signal.SIG_IGN:
            signal.signal(caught, _end_unless_caught)
            signal.siginterrupt(caught, False)  # a read in a library that knows no EINTR
    signal.signal(signal.SIGBUS, signal.SIG_DFL)  # torch's handler says more than there is to say
    # Python's queue prints the error and drops the batch, and the rank would wait for that one for ever.
    Queue._on_queue_feeder_error = staticmethod(_end_by_error)  # type: ignore[attr-defined]
    if init_fn is not None:
        init_fn(number)


def _end_unless_caught(number: int, frame: FrameType | None) -> None:
    rank = multiprocessing.parent_process()
    if rank is None or not _catches(rank.pid or 0, number):
        os._exit(0)


def _catches(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal (Linux)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _end_by_error(error: Exception, batch: object) -> None:
    """Ends this process by SIGBUS on a full /dev/shm, as where it is noticed later: the rank reads SIGBUS as that."""
    if getattr(error, "errno", None) == errno.ENOSPC or "allocate shared memory" in str(error):
        os.kill(os.getpid(), signal.SIGBUS)
    _feeder_error(error, batch)
    os._exit(1)


@cache
def _end_at_exit(pid: int) -> None:
    """Makes this process, once, reset its handlers before Python ends its daemonic children by SIGTERM and waits for them."""
    Finalize(None, _end_children, exitpriority=0)


def _end_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for each loader process that is killed
    if callable(signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    children = [child for child in multiprocessing.active_children() if child.daemon]
    for child in children:
        child.terminate()
    for child in children:
        child.join(_PATIENCE)
        if child.is_alive():
            child.kill()
