"""Watches a rank from a small process that outlives it: kills a rank that can no longer end itself, and reports how a killed
one ended, here and to the ranks that are left, for rank 0 also in the run's report.

A process that is stopped (SIGSTOP), or that holds Python's lock in code which waits for ever, can't end itself; on its own host
there may be no other rank that could. Needs the standard library alone, and has the rank's environment. On standard input come
lines of JSON: facts about the rank, as `WardenProcess.send` lists them.

Seconds are counted by looks, not by the clock: where everything was stopped (Ctrl-Z), none was missed.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from math import inf
from pathlib import Path

from project.cluster.oom import OOM_KILL, TO_LOWER, OomKills
from project.cluster.place import host
from project.cluster.processes import children, ended, kill_with_children, memory_of, read_dump, start_time
from project.cluster.signed import Message, sealer
from project.launch.agent import Agent
from project.launch.orphans import ends_with_parent, is_first_of_agent, is_supervised
from project.survive.life import add_stop, add_to_log, start_report
from project.survive.signals import ENDING, EXIT_CODES

_ROOT = Path(__file__).parents[3]
COMMAND = [
    *(sys.executable, "-I", "-S", "-c"),
    f"import sys; sys.path.append({str(_ROOT)!r}); from project.survive.hang.warden import main; main(*sys.argv[1:])",
]
"""The command line of a warden, but for the arguments of `main`: without site-packages, a Python starts in a moment."""


def _rank_of(pid: int) -> bytes:
    """Returns the local rank that a process was started with: of a loader process, that of its rank."""
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next((variable for variable in variables if variable.startswith(b"LOCAL_RANK=")), b"")
    return b""


class WatchedRank:
    """Represents the rank that this warden watches."""

    def __init__(self, pid: int, began: str, dump: str, name: str, parent: int) -> None:
        self.pid, self.began, self.dump, self.name = pid, began, dump, name
        self.handle: int | None = None
        with suppress(OSError, AttributeError):
            self.handle = os.pidfd_open(pid)
        self.oom_kills = OomKills(pid)
        self.parent = parent, start_time(parent)
        """The rank's launcher: its process id and start time."""
        self.agent = Agent(parent)
        """The same, where that is torchrun's agent."""
        self.silent = 0
        self.facts: Message = {}
        """What the rank has sent by `WardenProcess.send`."""
        self._held = (0, 0, 0)
        """Bytes of the rank, bytes of its loader processes and their number, when they were seen last."""
        self._incomplete_line = b""

    def read(self, data: bytes) -> None:
        """Reads lines that the rank has written to the warden's standard input."""
        *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
        for line in lines:
            sent = json.loads(line)
            self.facts |= sent
            self.silent = 0 if "allowed" in sent else self.silent

    @property
    def ending(self) -> bool:
        """Returns whether the rank is about to end, and reports that itself."""
        return "ending" in self.facts

    @property
    def is_silent(self) -> bool:
        """Returns whether the rank was silent for longer than it may be."""
        return bool(self.silent > self.facts.get("allowed", inf))

    def look_at_memory(self) -> None:
        """Notes what the rank and its loader processes hold, for the case that they are killed for it."""
        rank, started = _rank_of(self.pid), [child for child in children(self.pid, f"{self.pid}") if child != os.getpid()]
        loaders = [held for child in started if _rank_of(child) == rank and (held := memory_of(child))]
        if own := memory_of(self.pid):
            self._held = own, sum(loaders), len(loaders)

    def _filled(self) -> str:
        """Returns what filled the memory, in parentheses; '' where the kernel has killed nobody for it."""
        if OOM_KILL not in str(self.oom_kills) or not self._held[0]:
            return ""
        own, loaders, count = self._held
        parts = [f"seen last: {own / 2**30:.1f} GiB of its own"]
        parts += [f"{loaders / 2**30:.1f} GiB of its {count} loader processes"] if count else []
        parts += (
            [f"the limit of all processes in its cgroup: {limit / 2**30:.1f} GiB"] if (limit := self.oom_kills.limit) else []
        )
        return f" ({', '.join(parts)})"

    def has_ended(self) -> bool:
        return ended(self.pid, self.began, self.handle)[0]

    def describe_end(self) -> str:
        """Returns how the rank ended, in a sentence; '' where it lives, or where it or another process reports that."""
        over, status = ended(self.pid, self.began, self.handle)
        if not over or is_supervised():
            return ""
        if ends_with_parent() and ended(*self.parent)[0]:  # rank 0 of plain Python has a warden of its own
            agent = f"torchrun's agent on {host()} was killed, and its ranks with it{self.oom_kills}."
            return agent if is_first_of_agent() else ""
        if status is None:
            return "" if self.ending else f"{self.name} has ended without a word: killed, or crashed{self.oom_kills}."
        if not os.WIFSIGNALED(status) or (number := os.WTERMSIG(status)) in ENDING:
            return ""
        if number == signal.SIGABRT:
            return "" if self.ending else f"{self.name} was ended by SIGABRT: NCCL or another library gave up{self.oom_kills}."
        return f"{self.name} was killed by signal {number}{self.oom_kills}{self._filled()}."

    def advise(self, text: str) -> str:
        """Returns a text with what to do after that end, from rank 0's warden: it knows the run's folder."""
        if OOM_KILL not in text or "life" not in self.facts:
            return text
        newest = sorted(Path(self.facts["life"]).parent.glob("checkpoints/step-*.ckpt"))[-1:]
        saved = f"Then it resumes from {newest[0]}." if newest else "There is no checkpoint yet: it will begin anew."
        return f"{text} {TO_LOWER} {saved}"

    def _print(self, text: str, level: str = "ERROR") -> None:
        """Prints a text, if there is one, and writes rank 0's into the run's log, which it can't any more."""
        if text:
            print(text, file=sys.stderr, flush=True)
        if text and "life" in self.facts:
            add_to_log(Path(self.facts["life"]), level, text)

    def report(self, text: str) -> None:
        """Prints a text, and sends it to the other ranks."""
        self._print(self.advise(text))
        if "secret" not in self.facts:
            return
        seal = sealer(self.facts["secret"])
        data = seal({"kind": "died", "rank": self.facts.get("rank"), "text": text})
        for address in self.facts.get("addresses", ()):
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sender:
                sender.sendto(data, tuple(address))

    def kill_silent_rank(self) -> None:
        """Kills a rank that was silent for too long, and writes its stacks into the run's folder."""
        text = f"{self.name} shows no sign of life for {self.silent} s, not even its watchdog: it is ended."
        file = self.facts["file"]
        self._print(f"{text} Its stacks: {file}")
        dump = read_dump(self.pid, self.dump, wake=True)
        with suppress(OSError):
            Path(file).unlink(missing_ok=True)
            with open(file, "x") as opened:  # which follows no link, and waits for no pipe
                opened.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n\n{dump}\n")
        kill_with_children(self.pid)

    def record_end(self, how: str) -> None:
        """Records the end in the run's file of starts and stops, where the rank could not, and starts `project report`."""
        if is_supervised():
            return
        life, why = Path(self.facts.get("life", "")), self.facts.get("why")
        details = {name: self.facts.get(name) for name in ("where", "traceback", "kind")}
        details["kind"] = details["kind"] if why else "hang" if self.is_silent else "lost"
        state = "failed" if why else "killed"
        if add_stop(life, self.pid, self.facts.get("step"), state, why or how or None, **details):
            start_report(life)  # else it has said so itself, or the run goes on elsewhere

    def look_at_agent(self) -> None:
        """Warns if torchrun's agent is stopped; the first of its ranks does that."""
        if is_first_of_agent():
            self._print(self.agent.report_stop(), "WARNING")

    def release_agent(self) -> None:
        """Ends what could make torchrun's agent wait without an end, after the rank."""
        if is_first_of_agent():
            self._print(self.agent.wake(), "WARNING")
        if "agent_seconds" in self.facts:
            self._print(self.agent.end(self.facts["agent_seconds"], self.pid))

    def wait_for_end(self) -> bool:
        """Waits until the rank ends or is silent for too long. Returns False where it lets go of its warden before."""
        inputs = [0] if self.handle is None else [0, self.handle]
        while not self.is_silent:
            ready = select.select(inputs, [], [], 1.0)[0]
            self.look_at_agent()
            if 0 in ready:
                if data := os.read(0, 1 << 16):
                    self.read(data)
                    self.look_at_memory()
                    continue
                inputs.remove(0)  # the rank has let go of its warden, or is about to end
                if self.ending and "why" not in self.facts:
                    return False
            elif ready or self.has_ended():
                break
            else:
                self.silent += 1
                self.look_at_memory()
        return True


class WardenProcess:
    """Represents the warden in its rank, as a child process. Does nothing where it could not be started or has ended."""

    def __init__(self, pid: int, began: str, dump: str, name: str, parent: int) -> None:
        self._words = [*COMMAND, str(pid), began, dump, name, str(parent)]
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent: list[dict[str, object]] | None = []  # facts for a warden that has not been started

    def start(self) -> None:
        """Starts the warden, if it has not been started."""
        if self._unsent is not None:
            with suppress(OSError):
                self._process = subprocess.Popen(self._words, stdin=subprocess.PIPE)
            unsent, self._unsent = self._unsent, None
            for facts in unsent:
                self.send(**facts)

    def send(self, **facts: object) -> None:
        """Sends facts that the warden needs to report or record the end of this rank: its `rank`, `secret` and the others'
        `addresses`, the `file` for its stacks, the run's `life`, the `step`, the `kind` of failure, `why` and `where` it ends,
        with a `traceback`.

        `allowed`: seconds from now on after which the warden kills this rank. `ending`: this process is about to exit and
        reports the reason itself. `agent_seconds`: how long torchrun's agent has to end by itself, where it may not.
        """
        if self._unsent is not None:
            self._unsent.append(facts)
        elif self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(f"{json.dumps(facts)}\n".encode())
                self._process.stdin.flush()

    def stop(self, seconds: float) -> None:
        """Ends the warden, and waits for that. This process continues without it."""
        self.send(ending=True)
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired, OSError):
                self._process.communicate(timeout=seconds)


def main(pid: str, began: str, dump: str, name: str, parent: str) -> None:
    """Watches a rank until it ends or is silent for too long, then reports and records that."""
    # They go to the whole group, and the rank knows what to do.
    for number in EXIT_CODES:
        signal.signal(number, signal.SIG_IGN)
    watch = WatchedRank(int(pid), began, dump, name, int(parent))
    if watch.wait_for_end():
        text = ""
        if not watch.has_ended() and watch.is_silent:
            watch.kill_silent_rank()
        elif text := watch.describe_end():
            watch.report(text)
        watch.record_end(text)
    watch.release_agent()
