"""The exit of a process whose main thread can't take it: it waits in a call that does not end.

Nothing here waits for anything for long: a disk or a terminal may be what hangs.
"""

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project.cluster.launcher import detect
from project.survive.agent import agent
from project.survive.hang import stacks
from project.survive.hang.heartbeats import Heartbeat, Member
from project.survive.hang.warden import end_with_children, started

_GRACE = 2.0  # seconds in which the others write their last words before rank 0 ends, which may be their parent


@dataclass(frozen=True)
class Scene:
    """What a rank knows when the run ends: all ranks, which of them it is, and the run's folder, if they were connected."""

    members: Sequence[Member]
    me: Member
    beat: Heartbeat
    folder: Path | None
    local_rank: int

    def speaks(self, silent: set[int]) -> bool:
        """One rank on each host; before the ranks are connected, the one that does not just wait for others, too."""
        if self.folder is None:
            return self.local_rank == 0 or not stacks.in_collective(stacks.main_frames())
        here = [one.rank for one in self.members if one.machine == self.me.machine and one.rank not in silent]
        return self.me.rank == min(here, default=self.me.rank)


def flush() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()


def within(seconds: float, act: Callable[[], Any]) -> threading.Thread:
    """Does something that may hang, and waits for it only so long; the thread in which it goes on, if it does."""

    def attempt() -> None:
        with suppress(Exception):
            act()

    thread = threading.Thread(target=attempt, daemon=True, name="watchdog's report")
    thread.start()
    thread.join(seconds)
    return thread


def leave(scene: Scene, code: int, here: Iterable[Member] = (), agent_ends: float | None = None) -> None:
    """Ends this process. `here`: processes on this host that can't end themselves. `agent_ends`: seconds that torchrun's
    agent has to end by itself."""
    for child in multiprocessing.active_children():  # a loader process that hangs does not notice that it is alone
        child.kill()
    launch, ranks = detect(), {one.rank: one for one in here}
    agent().wake()
    if launch.kind == "torchrun" and agent_ends is not None:
        end_agent_later(os.getppid(), agent_ends)
    if scene.me.rank == 0:
        time.sleep(_GRACE)
    elif launch.kind == "python" and scene.local_rank > 0 and 0 not in ranks:
        time.sleep(2 * _GRACE)  # rank 0 is the parent: it ends last, and the rest with it
    for one in ranks.values():
        end_with_children(one.pid)
    os._exit(code)


_END = """
import os, signal, sys, time
pid, started, rank, last, seconds = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "last", float(sys.argv[5])
def stat(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    except OSError:
        return []
def lives():
    return stat(pid)[19:20] == [started]
def waits():
    return last or stat(rank)[:2] == ["Z", str(pid)]  # it has not even noticed that its rank is dead
end = time.monotonic() + seconds
while lives() and time.monotonic() < end:
    time.sleep(0.2)
if lives() and waits():
    print("torchrun waits for a host that it can't talk to, for a quarter of an hour or longer: it is ended.", file=sys.stderr)
    os.kill(pid, signal.SIGKILL)
"""


def end_agent_later(pid: int, seconds: float) -> None:
    """Leaves a process behind that ends torchrun's agent if that has neither ended by itself nor started its ranks again.

    An agent that is cut off from its store asks it in a call that neither a signal nor a timeout ends, for 15 minutes.
    """
    starts = [os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    last = "last" if starts[0] == starts[1] else ""
    with suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _END, str(pid), started(pid), str(os.getpid()), last, str(seconds)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
