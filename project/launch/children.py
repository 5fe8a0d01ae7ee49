"""The processes below a supervisor: the ranks, the spare ranks, the fork server, and what they leave behind."""

import ctypes
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from project.cluster.oom import OomKills
from project.cluster.processes import children, kill_with_children
from project.errors import TRY_AGAIN
from project.survive.signals import ENDING, code_of_rank

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_LAST_WAIT = 60.0  # seconds for killed ranks to end


@dataclass
class Rank:
    """Represents a rank that was started, and how it ended."""

    number: int
    pid: int
    oom_kills: OomKills
    status: int | None = None

    @property
    def code(self) -> int:
        """Returns the exit code, as a shell has it; 0 while the rank lives."""
        code = 0 if self.status is None else code_of_rank(os.waitstatus_to_exitcode(self.status))
        return code if code >= 0 else 128 - code

    @property
    def killed_by(self) -> int:
        """Returns the signal that killed the rank, or 0."""
        return self.code - 128 if self.status is not None and os.WIFSIGNALED(self.status) and self.code > 128 else 0

    def describe_loss(self, host: str, reason: str = "") -> str:
        """Returns how the rank was lost, in a sentence; '' if it ended normally or on request.

        `reason`: why all ranks end, where they have reported that.
        """
        if self.killed_by and self.killed_by not in ENDING:
            return f"rank {self.number} on {host} was killed by signal {self.killed_by}{self.oom_kills}."
        if self.status is not None and os.WIFSIGNALED(self.status) and self.code == TRY_AGAIN:
            return f"rank {self.number} on {host} was ended by SIGABRT: NCCL or another library gave up{self.oom_kills}."
        if self.code != TRY_AGAIN:
            return ""
        return reason or f"rank {self.number} on {host} can't go on (exit code {TRY_AGAIN}): see its last message."


class Children:
    """Starts the fork server, and ends the ranks. All that they start becomes this process's child when its parent ends."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.spares: list[int] = []
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)

    def start_server(self, command: Sequence[str], environment: dict[str, str], sockets: Sequence[int]) -> None:
        self.server = subprocess.Popen(command, env=environment, pass_fds=sockets)

    @property
    def alive(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.status is None]

    @property
    def living_numbers(self) -> str:
        return ", ".join(str(rank.number) for rank in self.alive)

    def add_ranks(self, pids: Sequence[int], first: int) -> None:
        """Takes the processes of the ranks of a new start, of which spares may be some."""
        self.spares = []
        self.ranks = [Rank(number, pid, OomKills(pid)) for number, pid in enumerate(pids, first)]

    def signal(self, number: int) -> None:
        """Sends a signal to the ranks; before there are any, to the fork server."""
        for pid in [rank.pid for rank in self.alive] or [self.server.pid]:
            with suppress(OSError):
                os.kill(pid, number)

    def reap(self) -> list[Rank]:
        """Returns the ranks that have ended. Orphans of ranks are reaped, too."""
        alive, ended = {rank.pid: rank for rank in self.alive}, []
        with suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                self.spares = [pid for pid in self.spares if pid != child[0]]  # which is another process's from here on
                if child[0] in alive:
                    alive[child[0]].status = child[1]
                    ended.append(alive[child[0]])
        return ended

    def kill(self) -> bool:
        """Kills all ranks, with their wardens, loader processes and what they left behind, and waits for their end. Returns
        whether all have ended: one that waits in the kernel may not.
        """
        until = time.monotonic() + _LAST_WAIT
        while (left := {*children(os.getpid())} - {self.server.pid, *self.spares}) or self.alive:
            for pid in left:
                kill_with_children(pid)
            self.reap()
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def end_spares(self) -> None:
        """Ends the spares, and waits for that: the fork server forks others when they are needed."""
        for pid in self.spares:
            kill_with_children(pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.spares = []
