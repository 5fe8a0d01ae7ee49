"""Watches a rank from a small process that outlives it: kills a rank that can no longer end itself, and reports how a killed
one ended, for rank 0 also in the run's report.

A process that is stopped (SIGSTOP), or that holds Python's lock in code which waits for ever, can't end itself; on its own host
there may be no other rank that could. And a process that is killed, for its memory say, can't report it: its warden does, here
and to the ranks that are left.

Run as a script, and without PyTorch: python warden.py PID STARTED DUMP NAME LAUNCHER. The launcher is what the rank ends
with, in words, 'quiet' where another reports it, or ''. On standard input come lines: JSON, when the ranks know each other; a
number, the seconds that the rank may be silent; 'end', before it ends.

Seconds are counted by looks, not by the clock: where everything was stopped (Ctrl-Z), none was missed.
"""

import ctypes
import fcntl
import hmac
import itertools
import json
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

DUMP = int(getattr(signal, "SIGRTMIN", signal.SIGUSR1)) + 7
"""The signal on which a rank writes its stacks: from C, and so also when no Python code can run in it."""


LARGEST_MESSAGE = 1 << 20  # bytes, when it is unpacked
_HEADER = struct.Struct(">8sQ")
SEAL = 32


def sealer(secret: str) -> Callable[[Mapping[str, object]], bytes]:
    """Returns a function that makes a datagram of a message: a signature of all that follows, sender, counter, message."""
    sender, counter, key = os.urandom(8), itertools.count(1), bytes.fromhex(secret)

    def seal(message: Mapping[str, object]) -> bytes:
        data = _HEADER.pack(sender, next(counter)) + zlib.compress(json.dumps(message).encode(), 1)
        return hmac.digest(key, data, "sha256") + data

    return seal


class Facts(TypedDict, total=False):
    """Holds the facts that a rank sends its warden."""

    rank: int
    secret: str
    addresses: list[tuple[str, int]]
    file: str
    """Where the stacks of a rank go that does not answer."""
    life: str
    step: int
    why: str
    where: str
    traceback: str


class Opener:
    """Reads datagrams that are signed with the secret, each once. Parses nothing before the signature is verified."""

    def __init__(self, secret: str) -> None:
        self._key = bytes.fromhex(secret)
        self._newest: dict[bytes, tuple[int, int]] = {}  # of each sender: its newest counter, and a bit for each before it

    def open(self, datagram: bytes) -> dict[str, object] | None:
        """Returns the message; None if the signature is wrong, or the datagram has been received before."""
        seal, data = datagram[:SEAL], datagram[SEAL:]
        if len(data) < _HEADER.size or not hmac.compare_digest(seal, hmac.digest(self._key, data, "sha256")):
            return None
        sender, counter = _HEADER.unpack_from(data)
        if not self._is_new(sender, counter):
            return None
        message: dict[str, object] = json.loads(zlib.decompressobj().decompress(data[_HEADER.size :], LARGEST_MESSAGE))
        return message

    def _is_new(self, sender: bytes, counter: int) -> bool:
        """Returns whether a datagram has not been seen. Datagrams may overtake each other: the last 64 of a sender are
        remembered.
        """
        newest, seen = self._newest.get(sender, (0, 0))
        if counter > newest:
            seen = (seen << (counter - newest) if counter - newest < 64 else 0) & 0xFFFF_FFFF_FFFF_FFFF
            newest = counter
        elif newest - counter >= 64 or seen >> (newest - counter) & 1:
            return False
        self._newest[sender] = newest, seen | 1 << (newest - counter)
        return True


def _status_fields(pid: int | str) -> list[str]:
    """Returns what the kernel says of a process (proc_pid_stat(5)), from its state on; nothing where it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def start_time(pid: int | str) -> str:
    """Returns when a process was started, in ticks since boot, or '' where that can't be known or it has ended."""
    return "".join(_status_fields(pid)[19:20])


def read_dump(pid: int, path: str, wake: bool = False) -> str:
    """Makes a process on this host write its stacks into a file, and returns them, or ''.

    `wake`: it may be stopped (SIGSTOP); it is continued for that moment, and stopped again.
    """
    try:
        if not _handles_dump_signal(pid):
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


def _handles_dump_signal(pid: int) -> bool:
    """Returns whether the process handles our signal, which would otherwise end it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (DUMP - 1) & 1)
    return False


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


def _rank_of(pid: int) -> bytes:
    """Returns the local rank that a process was started with: of a loader process, that of its rank."""
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next((variable for variable in variables if variable.startswith(b"LOCAL_RANK=")), b"")
    return b""


def _memory(pid: int) -> int:
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


# How a process ended --------------------------------------------------------------------------------------------------


OOM_KILL = "reports an OOM kill"
TO_LOWER = (
    "HINT: it would be killed again: set data.num_workers or data.batch_size lower, give the job more memory, or see by the "
    "curve run/memory_gb whether something grows from step to step."
)


class OomKills:
    """Counts the OOM kills in a process's cgroup, to tell whether there was one since this object was made."""

    def __init__(self, pid: int | str = "self") -> None:
        self._pid = pid
        self._counter = self._last = _oom_counter(pid)
        self._count_before = self._count()

    def follow_cgroup(self) -> None:
        """Follows the process into another cgroup: one that it is seen in twice. A process that ends is in none."""
        now, last = _oom_counter(self._pid), self._last
        self._last = now
        if now == last != self._counter and not _is_exiting(self._pid) and not ended(self._pid, start_time(self._pid), None)[0]:
            self._counter, self._count_before = now, 0

    def _count(self) -> int:
        """Returns how many OOM kills the kernel has counted in the cgroup so far."""
        with suppress(OSError, ValueError):
            words = self._counter[0].read_text().split()
            return int(words[words.index("oom_kill") + 1])
        return 0

    def __str__(self) -> str:
        """Returns the end of the sentence 'was killed by signal 9' if there was an OOM kill, or ''."""
        self.follow_cgroup()
        self.follow_cgroup()
        return f", and its {self._counter[1]} {OOM_KILL}" if self._count() > self._count_before else ""

    @property
    def limit(self) -> int | None:
        """Returns the bytes that the cgroup may hold; None where it has no limit of its own."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                limit = int((self._counter[0].parent / name).read_text())
                return limit if limit < 1 << 60 else None
        return None


def _oom_counter(pid: int | str) -> tuple[Path, str]:
    """Returns where the kernel counts: in the cgroup's memory.events (v2) or memory.oom_control (v1), or for the whole host."""
    root = Path("/sys/fs/cgroup")
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, kinds, group = line.split(":", 2)
            folder, name = (root / "memory", "memory.oom_control") if kinds else (root, "memory.events")
            if kinds and "memory" not in kinds.split(","):
                continue
            for place in (folder / group.lstrip("/"), folder):  # in a container the path may be that outside of it
                if (place / name).is_file():
                    return place / name, "cgroup"
    return Path("/proc/vmstat"), "host"


_PF_EXITING = 0x4


def _is_exiting(pid: int | str) -> bool:
    """Returns whether a process has begun to end. Until its memory is free, which takes long where it was much, it can't be
    seen to have ended, and it is in no cgroup of version 1 any more.
    """
    fields = _status_fields(pid)
    return bool(fields) and bool(int(fields[6]) & _PF_EXITING)


_INFO, _INFO_EXIT = 0xC040FF0B, 1 << 3  # PIDFD_GET_INFO and PIDFD_INFO_EXIT, Linux 6.15


def ended(pid: int | str, began: str, handle: int | None) -> tuple[bool, int | None]:
    """Returns whether a process has ended, and its wait status, which the kernel reports to others only as long as nobody has
    asked for it, or, from Linux 6.15 on, to the holder of a `handle` (a pidfd).
    """
    fields = _status_fields(pid)
    if fields and fields[19] == began:
        return fields[0] in "ZX", int(fields[-1])
    if handle is not None:
        with suppress(OSError):
            info = bytearray(struct.pack("Q56x", _INFO_EXIT))
            fcntl.ioctl(handle, _INFO, info)
            if struct.unpack_from("Q", info)[0] & _INFO_EXIT:
                return True, struct.unpack_from("i", info, 60)[0]
    return True, None


# Signals that request a process to end: that it did needs no report.
_REQUESTED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)


_ABORTED = 75  # see abort.py; who ends with it by itself has said so


def _was_aborted(status: int) -> bool:
    """Returns whether a wait status is that of a process that received SIGABRT, with or without the handler of abort.py."""
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) == signal.SIGABRT
    return os.WEXITSTATUS(status) == _ABORTED


QUIET = "quiet"
SUPERVISED = "supervised"
"""The launcher of a rank whose end a supervisor reports and records."""


class WatchedRank:
    """Represents the rank that this warden watches."""

    def __init__(self, pid: int, began: str, dump: str, name: str, launcher: str) -> None:
        self.pid, self.began, self.dump, self.name, self.launcher = pid, began, dump, name, launcher
        self.handle: int | None = None
        with suppress(OSError, AttributeError):
            self.handle = os.pidfd_open(pid)
        self.oom_kills = OomKills(pid)
        parent = int("".join(_status_fields(pid)[1:2]) or 0)
        self.parent = parent, start_time(parent)
        """The rank's launcher: its process id and start time."""
        self.silent, self.allowed = 0, float("inf")
        self.ending = False
        self.facts: Facts = {}
        self._held = (0, 0, 0)
        """Bytes of the rank, bytes of its loader processes and their number, when they were seen last."""
        self._incomplete_line = b""

    def read(self, data: bytes) -> None:
        """Reads lines that the rank has written to the warden's standard input."""
        *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                self.facts |= json.loads(line)
            elif line == b"end":
                self.ending = True
            else:
                self.silent, self.allowed = 0, float(line)

    def look_at_memory(self) -> None:
        """Notes what the rank and its loader processes hold, for the case that they are killed for it."""
        rank, started = _rank_of(self.pid), [child for child in children(self.pid, f"{self.pid}") if child != os.getpid()]
        loaders = [held for child in started if _rank_of(child) == rank and (held := _memory(child))]
        if own := _memory(self.pid):
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
        if not over or self.launcher == SUPERVISED:
            return ""
        if self.launcher and ended(*self.parent, None)[0]:  # which takes its ranks along: see orphans.py
            return "" if self.launcher == QUIET else f"{self.launcher} was killed, and its ranks with it{self.oom_kills}."
        if status is None:
            return "" if self.ending else f"{self.name} has ended without a word: killed, or crashed{self.oom_kills}."
        if _was_aborted(status) and not self.ending:
            return f"{self.name} was ended by SIGABRT: NCCL or another library gave up{self.oom_kills}."
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) in _REQUESTED:
            return ""
        return f"{self.name} was killed by signal {os.WTERMSIG(status)}{self.oom_kills}{self._filled()}."

    def advise(self, text: str) -> str:
        """Returns a text with what to do after that end, from rank 0's warden: it knows the run's folder."""
        if OOM_KILL not in text or "life" not in self.facts:
            return text
        newest = sorted(Path(self.facts["life"]).parent.glob("checkpoints/step-*.ckpt"))[-1:]
        saved = f"Then it resumes from {newest[0]}." if newest else "There is no checkpoint yet: it will begin anew."
        return f"{text} {TO_LOWER} {saved}"

    def _print(self, text: str) -> None:
        """Prints a text, and writes rank 0's into the run's log, which it can't any more."""
        print(text, file=sys.stderr, flush=True)
        if "life" in self.facts:
            add_to_log(Path(self.facts["life"]), "ERROR", text)

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
            _write_whole(Path(file), f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n\n{dump}\n")
        kill_with_children(self.pid)

    def record_end(self, how: str) -> None:
        """Records the end in the run's file of starts and stops, where the rank could not, and starts `project report`."""
        if self.launcher == SUPERVISED:
            return
        life = Path(self.facts.get("life", ""))
        why = self.facts.get("why")
        line = {"event": "stop", "time": round(time.time(), 3), "step": self.facts.get("step")}
        line |= {"state": "failed" if why else "killed", "why": why or how or None}
        details = {"where": self.facts.get("where"), "traceback": self.facts.get("traceback")}
        line |= {name: value for name, value in details.items() if value}
        try:
            if not add_stop(life, self.pid, json.dumps(line)):
                return  # it has said so itself, or the run goes on elsewhere
            start_report(life)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return  # no training was begun, or there is no room


# In the run's folder others may write, too: no link is followed, and no pipe is waited for. See project/untrusted.py.

_LAST = 1 << 16  # bytes, in which the last line is


def _write_whole(file: Path, text: str) -> None:
    """Writes a file under another name and renames it, so that it is never half written."""
    part = file.with_name(f".{os.urandom(4).hex()}.{file.name}")
    try:
        with part.open("x") as opened:
            opened.write(text)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def start_report(life: Path) -> None:
    """Starts `project report` for the run that has this file of starts and stops, where no rank is left that writes it."""
    words = [sys.executable, "-m", "project", "report", str(life.parent)]
    subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def add_to_log(life: Path, level: str, text: str) -> None:
    """Writes a line into the log of the run that has this file of starts and stops."""
    now = time.time()
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now % 1 * 1000):03} {level:<7} {text}\n"
    with suppress(OSError):
        log = os.open(life.with_name("log.txt"), os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(log, "w") as file:
            file.write(line)


def add_stop(life: Path, pid: int, line: str) -> bool:
    """Adds a line to a run's file of starts and stops, if this process's life is the last and has no stop; returns whether."""
    with os.fdopen(os.open(life, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK), "r+b", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return False
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST))
        last = json.loads(file.read(_LAST).splitlines()[-1])
        if last["event"] == "stop" or last["pid"] != pid:
            return False
        file.write(f"{line}\n".encode())
        return True


class WardenProcess:
    """Represents the warden in its rank, as a child process. Does nothing where it could not be started or has ended."""

    def __init__(self, pid: int, began: str, dump: str, name: str, launcher: str) -> None:
        self._words = [sys.executable, "-I", "-S", __file__, str(pid), began, dump, name, launcher]
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent: list[str] | None = []  # lines for a warden that has not been started

    def start(self) -> None:
        """Starts the warden, if it has not been started."""
        if self._unsent is not None:
            with suppress(OSError):
                self._process = subprocess.Popen(self._words, stdin=subprocess.PIPE)
            lines, self._unsent = self._unsent, None
            for line in lines:
                self._write_line(line)

    def _write_line(self, line: str) -> None:
        if self._unsent is not None:
            self._unsent.append(line)
        elif self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(f"{line}\n".encode())
                self._process.stdin.flush()

    def send(self, **facts: object) -> None:
        """Sends facts that the warden needs to report or record the end of this rank, such as the path of a file."""
        self._write_line(json.dumps(facts))

    def allow_silence(self, seconds: float) -> None:
        """Restarts the countdown after which the warden kills this rank."""
        self._write_line(f"{seconds:g}")

    def announce_exit(self) -> None:
        """Announces that this process is about to exit and reports the reason itself."""
        self._write_line("end")

    def stop(self, seconds: float) -> None:
        """Ends the warden, and waits for that. This process continues without it."""
        self.announce_exit()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired, OSError):
                self._process.communicate(timeout=seconds)


def main(pid: int, began: str, dump: str, name: str, launcher: str) -> None:
    """Watches a rank until it ends or is silent for too long, then reports and records that."""
    # They go to the whole group, and the rank knows what to do.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch = WatchedRank(pid, began, dump, name, launcher)
    inputs = [0] if watch.handle is None else [0, watch.handle]
    while watch.silent <= watch.allowed:
        ready = select.select(inputs, [], [], 1.0)[0]
        if 0 in ready:
            if data := os.read(0, 1 << 16):
                watch.read(data)
                watch.look_at_memory()
                continue
            inputs.remove(0)  # the rank has let go of its warden, or is about to end
            if watch.ending and "why" not in watch.facts:
                return
        elif ready or watch.has_ended():
            break
        else:
            watch.silent += 1
            watch.oom_kills.follow_cgroup()
            watch.look_at_memory()
    text = ""
    if not watch.has_ended() and watch.silent > watch.allowed:
        watch.kill_silent_rank()
    elif text := watch.describe_end():
        watch.report(text)
    watch.record_end(text)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:6])
