"""Ends a process from another thread, while its main thread waits in a call that does not end.

Gloo's connections are closed with the process that had them, and the main thread gets an error. A device that waits in a
collective of NCCL waits on, and so does the main thread that waits for the device.

Nothing here waits for anything for long: a disk or a terminal may be what hangs.
"""

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from project.cluster.processes import kill_with_children
from project.errors import Cause
from project.launch.launcher import detect
from project.survive.exit import flush_streams
from project.survive.failure import EXITING, LOST_RANKS, WHOLE, advice
from project.survive.hang import stacks
from project.survive.hang.heartbeats import Heartbeat, Member
from project.survive.hang.warden import WardenProcess

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
    warden: WardenProcess | None

    def is_reporter(self, silent: Container[int]) -> bool:
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
    flush_streams()


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
    if launch.kind == "torchrun" and agent_seconds is not None and context.warden is not None:
        context.warden.start()
        context.warden.send(agent_seconds=agent_seconds)
    if context.me.rank == 0:
        time.sleep(_FINAL_WRITES)
    elif launch.kind == "python" and context.local_rank > 0 and 0 not in ranks:
        time.sleep(2 * _FINAL_WRITES)  # rank 0 is the parent: it ends last, and the rest with it
    for member in ranks.values():
        kill_with_children(member.pid)
    os._exit(code)


def exit_after_loss(context: RankContext) -> None:
    """Reports which rank is lost, once on each host, and ends this process, whose main thread has not noticed."""
    cause = LOST_RANKS.cause
    assert cause is not None
    if (warden := context.warden) is not None:
        details = {"where": cause.where, "traceback": cause.traceback, "kind": cause.kind}
        warden.send(why=cause.text, **details, step=context.beat.step, ending=True)
    if context.is_reporter({*(LOST_RANKS.failures or LOST_RANKS.deaths)}):
        run_with_timeout(_PATIENCE, lambda: _report_loss(cause, context.folder))
    run_with_timeout(_PATIENCE, flush)
    exit_process(context, LOST_RANKS.exit_code)


def _report_loss(cause: Cause, folder: Path | None) -> None:
    hint = "HINT: see the error of that rank." if LOST_RANKS.failures else advice(folder)
    lost = f"lost another rank: {cause.text.rstrip('.')}."
    text = f"{lost} This rank's main thread waits for it without an end: it is ended here. {hint}"
    log.error(text, extra={WHOLE: f"{text}\n{cause.traceback}"})
