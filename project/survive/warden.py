"""The last resort: a small process beside each rank that ends it when not even its watchdog's thread runs any more.

A process that is stopped (SIGSTOP), or that holds Python's lock in code which waits for ever, can't end itself; on its own host
there may be no other rank that could. Run as a script, and without PyTorch: python warden.py PID STARTED DUMP FILE NAME. On
standard input the rank says once in a while how many seconds it may be silent; the end of it is the end of the rank.

Seconds are counted by looks, not by the clock: where everything was stopped (Ctrl-Z), none was missed.
"""

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

DUMP = int(getattr(signal, "SIGRTMIN", signal.SIGUSR1)) + 7
"""The signal on which a rank writes its stacks: from C, and so also when no Python code can run in it."""


def started(pid: int) -> str:
    """When a process began, in ticks since boot, or '' where that can't be known or it is gone."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def dumped(pid: int, path: str, wake: bool = False) -> str:
    """The stacks of a process on this host that can't tell them itself, or ''. `wake`: it may be stopped, and
    runs for that moment."""
    try:
        if not _listens(pid):
            return ""
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
            found = file.read().decode(errors="replace")
        return "\n".join(reversed(found.strip().split("\n\n")))  # the main thread comes last in it
    except OSError:
        return ""


def _signal_main_thread(pid: int, number: int) -> None:
    """The signal is pending for it when it is woken, and so handled before it can move on; another thread would let it."""
    try:
        ctypes.CDLL(None).tgkill(pid, pid, number)
    except AttributeError:  # an old or another C library
        os.kill(pid, number)


def _listens(pid: int) -> bool:
    """Whether the process handles our signal, which would otherwise end it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (DUMP - 1) & 1)
    return False


def end_with_children(pid: int) -> None:
    """Kills a rank and its loader processes, which may not notice that they are alone."""
    children: list[int] = []
    with suppress(OSError):
        children = [int(one) for file in Path(f"/proc/{pid}/task").glob("*/children") for one in file.read_text().split()]
    for one in (*children, pid):
        if one != os.getpid():
            with suppress(OSError):
                os.kill(one, signal.SIGKILL)


def main(rank: int, began: str, dump: str, file: str, name: str) -> None:
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGHUP,
    ):  # to the whole group: the rank knows what to do
        signal.signal(number, signal.SIG_IGN)
    silent, allowed = 0, float("inf")
    while silent <= allowed and started(rank) == began:
        if not select.select([0], [], [], 1.0)[0]:
            silent += 1
            continue
        if not (said := os.read(0, 1 << 16)):
            return
        silent, allowed = 0, float(said.split()[-1])
    if started(rank) != began:
        return
    text = f"{name} shows no sign of life for {silent} s, not even its watchdog: it is ended."
    print(f"{text} Its stacks: {file}", file=sys.stderr, flush=True)
    found = dumped(rank, dump, wake=True)
    with suppress(OSError):
        Path(file).write_text(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n\n{found}\n")
    end_with_children(rank)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:6])
