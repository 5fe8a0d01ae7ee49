"""Ends a process from another thread, while its main thread waits in a call that does not end.

Gloo's connections are closed with the process that had them, and the main thread gets an error. A device that waits in a
collective of NCCL waits on, and so does the main thread that waits for the device.

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

from project.errors import Cause
from project.launch.agent import agent
from project.launch.launcher import detect
from project.launch.orphans import launcher_pid
from project.survive.failure import EXITING, LOST_RANKS, WHOLE, advice
from project.survive.hang import stacks
from project.survive.hang.heartbeats import Heartbeat, Member
from project.survive.hang.warden import WardenProcess, kill_with_children, start_time

log = logging.getLogger(__name__)

_FINAL_WRITES = 2.0  # seconds in which the others write their last words before rank 0 ends, which may be their parent
_PATIENCE = 1.0  # seconds for a terminal or a disk


@dataclass(frozen=True)
class RankContext:
    """Holds what a rank knows of the run when it ends it: all ranks, itself, and the run's folder, if they were connected."""

    members: Sequence[Member]
    me: Member
    beat: Heartbeat
    folder: Path | None
    local_rank: int

    def is_reporter(self, silent: set[int]) -> bool:
        """Returns whether this rank reports: one on each host does; before the ranks are connected, also each that does not
        wait for others. `silent`: the ranks that can't.
        """
        if self.folder is None:
            return self.local_rank == 0 or not stacks.in_collective(stacks.main_frames())
        here = [member.rank for member in self.members if member.machine == self.me.machine and member.rank not in silent]
        return self.me.rank == min(here, default=self.me.rank)


def flush() -> None:
    """Flushes the log and the standard streams."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()


def run_with_timeout(seconds: float, action: Callable[[], object]) -> threading.Thread:
    """Runs in a thread what may hang, and waits at most so many seconds; returns the thread, which may still be running."""

    def run_action() -> None:
        with suppress(Exception):
            action()

    thread = threading.Thread(target=run_action, daemon=True, name="watchdog's report")
    thread.start()
    thread.join(seconds)
    return thread


def exit_process(
    context: RankContext, code: int, unresponsive: Iterable[Member] = (), agent_seconds: float | None = None
) -> None:
    """Ends this process, its loader processes and the unresponsive ranks on its host.

    Args:
        context: what this rank knows of the run.
        code: the exit code.
        unresponsive: ranks on this host that can't end themselves.
        agent_seconds: seconds that torchrun's agent has to end by itself; None: it is left alone.
    """
    EXITING.set()
    for child in multiprocessing.active_children():  # a loader process that hangs does not notice that it is alone
        child.kill()
    launch, ranks = detect(), {member.rank: member for member in unresponsive}
    agent().wake()
    if launch.kind == "torchrun" and agent_seconds is not None:
        end_agent_later(launcher_pid(), agent_seconds)
    if context.me.rank == 0:
        time.sleep(_FINAL_WRITES)
    elif launch.kind == "python" and context.local_rank > 0 and 0 not in ranks:
        time.sleep(2 * _FINAL_WRITES)  # rank 0 is the parent: it ends last, and the rest with it
    for member in ranks.values():
        kill_with_children(member.pid)
    os._exit(code)


def exit_after_loss(context: RankContext, warden: WardenProcess | None) -> None:
    """Reports which rank is lost, once on each host, and ends this process, whose main thread has not noticed."""
    cause = LOST_RANKS.cause
    assert cause is not None
    if warden is not None:
        warden.send(why=cause.text, where=cause.where, traceback=cause.traceback, step=context.beat.step)
        warden.announce_exit()
    if context.is_reporter({*(LOST_RANKS.failures or LOST_RANKS.deaths)}):
        run_with_timeout(_PATIENCE, lambda: _report_loss(cause, context.folder))
    run_with_timeout(_PATIENCE, flush)
    exit_process(context, LOST_RANKS.exit_code)


def _report_loss(cause: Cause, folder: Path | None) -> None:
    hint = "HINT: see the error of that rank." if LOST_RANKS.failures else advice(folder)
    lost = f"lost another rank: {cause.text.rstrip('.')}."
    text = f"{lost} This rank's main thread waits for it without an end: it is ended here. {hint}"
    log.error(text, extra={WHOLE: f"{text}\n{cause.traceback}"})


_AGENT_KILLER = """
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
            [sys.executable, "-I", "-S", "-c", _AGENT_KILLER, str(pid), start_time(pid), str(os.getpid()), last, str(seconds)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
