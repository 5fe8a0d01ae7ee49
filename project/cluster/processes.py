"""Reads of processes on this host what the kernel says of them (Linux), and ends them. Standard library only."""

import ctypes
import fcntl
import os
import signal
import struct
import time
from contextlib import suppress
from pathlib import Path

from project.cluster.cgroups import field

DUMP = int(getattr(signal, "SIGRTMIN", signal.SIGUSR1)) + 7
"""The signal on which a rank writes its stacks: from C, and so also when no Python code can run in it."""
_INFO, _INFO_EXIT = 0xC040FF0B, 1 << 3  # PIDFD_GET_INFO and PIDFD_INFO_EXIT, Linux 6.15


def status_fields(pid: int | str) -> list[str]:
    """Returns what the kernel says of a process (proc_pid_stat(5)), from its state on; nothing where it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def start_time(pid: int | str) -> str:
    """Returns when a process was started, in ticks since boot, or '' where that can't be known or it has ended."""
    return "".join(status_fields(pid)[19:20])


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped (Ctrl-Z, SIGSTOP)."""
    return status_fields(pid)[:1] == ["T"]


def ended(pid: int | str, began: str, handle: int | None = None) -> tuple[bool, int | None]:
    """Returns whether a process has ended, and its wait status, which the kernel reports to others only as long as nobody has
    asked for it, or, from Linux 6.15 on, to the holder of a `handle` (a pidfd).
    """
    fields = status_fields(pid)
    if fields and fields[19] == began:
        return fields[0] in "ZX", int(fields[-1])
    if handle is not None:
        with suppress(OSError):
            info = bytearray(struct.pack("Q56x", _INFO_EXIT))
            fcntl.ioctl(handle, _INFO, info)
            if struct.unpack_from("Q", info)[0] & _INFO_EXIT:
                return True, struct.unpack_from("i", info, 60)[0]
    return True, None


def _handles(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal."""
    return bool(int(field(Path(f"/proc/{pid}/status"), "SigCgt") or "0", 16) >> (number - 1) & 1)


def children(pid: int, threads: str = "*") -> list[int]:
    """Returns the processes that a process's threads have started: of a rank, its loader processes and its warden."""
    with suppress(OSError):
        files = Path(f"/proc/{pid}/task").glob(f"{threads}/children")
        return [int(child) for file in files for child in file.read_text().split() if not _is_notifier(child)]
    return []


def _is_notifier(pid: str) -> bool:
    """Returns whether a process is the one that reports the rank's end to others, after it: watch/notifier.py."""
    with suppress(OSError):
        return b"notifier.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def memory_of(pid: int) -> int:
    """Returns the bytes that a process has in memory; 0 for one that has ended."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def kill_with_children(pid: int) -> None:
    """Kills a rank and its loader processes, which may not notice that they are alone."""
    for target in (*children(pid), pid):
        if target != os.getpid():
            with suppress(OSError):
                os.kill(target, signal.SIGKILL)


def read_dump(pid: int, path: str, wake: bool = False) -> str:
    """Makes a process on this host write its stacks into a file, and returns them, or ''.

    `wake`: it may be stopped (SIGSTOP); it is continued for that moment, and stopped again.
    """
    if not _handles(pid, DUMP):  # which would end it
        return ""
    try:
        before = os.stat(path).st_size
        _signal_main_thread(pid, DUMP)
        if wake:
            os.kill(pid, signal.SIGCONT)
        size, end = before, time.monotonic() + 2
        while size == before or size != os.stat(path).st_size:  # it is written in many small pieces
            if time.monotonic() > end:
                break
            size = os.stat(path).st_size
            time.sleep(0.1)
        if wake:
            os.kill(pid, signal.SIGSTOP)
        with open(path, "rb") as file:
            file.seek(before)
            text = file.read().decode(errors="replace")
        return "\n".join(reversed(text.strip().split("\n\n")))  # the main thread comes last in it
    except OSError:
        return ""


def _signal_main_thread(pid: int, number: int) -> None:
    """Signals the main thread: the signal is pending when it is woken, and so handled before it can move on; another thread
    would let it.
    """
    try:
        ctypes.CDLL(None).tgkill(pid, pid, number)
    except AttributeError:  # an old or another C library
        os.kill(pid, number)
