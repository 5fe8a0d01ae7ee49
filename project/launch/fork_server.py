"""The fork server: a process that has loaded PyTorch and this project, and forks ranks from there.

It is the first child of a supervisor (`launch/supervisor.py`), and has loaded nothing of the user's: each rank imports that
after its fork, as ranks of any launcher do. A file that is opened there, a thread, or what is read of the environment is the
rank's own.
"""

import gc
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from project.cluster.place import ATTEMPT, MEMORY, restarts
from project.errors import TRY_AGAIN
from project.launch.orphans import end_with_parent
from project.launch.supervisor import SOCKET, receive
from project.survive.exit import flush_streams
from project.survive.signals import ENDING

Built = TypeVar("Built")

_SMALL = 64 << 20  # bytes
_SUPERVISOR: list[socket.socket] = []  # this rank's way to its supervisor
_SPARE: list["_Spare"] = []  # in a process that is not a rank yet


def is_fork_server() -> bool:
    """Returns whether a supervisor has started this process to fork ranks."""
    return SOCKET in os.environ


class _Spare(NamedTuple):
    """Holds what a process needs that is to become a rank."""

    orders: int  # the pipe at which it gets them
    facts: socket.socket  # its way to the supervisor
    ranks: int  # that the supervisor starts; 0: one, which has its number
    builds: bool  # whether it makes the objects of the configuration before it is needed
    release: Callable[[], None]  # prints what it has printed before it is needed


def serve(ranks: int) -> None:
    """Forks ranks whenever the supervisor asks for them. Returns in each rank, and nowhere else.

    Asked for spares, it forks them before they are needed: each makes itself ready, and waits in `await_orders`.

    `ranks`: how many; 0: the one that an engine has started, and given its number.
    """
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    gc.collect()
    gc.freeze()  # what is here already is not looked through, and so not copied, by a rank's own collections
    supervisor, facts = (socket.socket(fileno=int(number)) for number in os.environ.pop(SOCKET).split())
    parent = os.getppid()
    with suppress(ConnectionError):
        supervisor.send(b'{"ready": true}')
    spares: dict[int, tuple[int, int]] = {}  # of each rank to come: its process, and the pipe at which it waits for its orders
    while order := receive(supervisor):
        flush_streams()
        drawn = random.getstate()
        for rank in range(ranks or 1):
            if rank in spares and not _is_closed(spares[rank][1]):
                continue
            if rank in spares:
                os.close(spares[rank][1])
            pid, pipe = _fork(parent)
            if pid == 0:
                supervisor.close()  # which hears so when the fork server has ended
                random.setstate(drawn)  # Python seeds it anew in a fork
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                if ranks > 1:
                    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(ranks)}
                os.environ |= order["numbers"]
                release = _hide_output() if "spares" in order else flush_streams
                _SPARE.append(_Spare(pipe, facts, ranks, bool(order.get("build")), release))
                if "spares" not in order:
                    await_orders()
                return
            spares[rank] = pid, pipe
        pids = [pid for pid, _ in spares.values()]
        if "spares" in order:
            supervisor.send(json.dumps({"spares": pids}).encode())
            continue
        for _, pipe in spares.values():
            with suppress(OSError):  # it was killed
                os.write(pipe, json.dumps(order).encode())
            os.close(pipe)
        spares.clear()
        supervisor.send(json.dumps({"pids": pids}).encode())
    if memory := os.environ.get(MEMORY):  # the supervisor was killed, and its ranks with it
        shutil.rmtree(memory, ignore_errors=True)
    os._exit(0)


def is_forked() -> bool:
    """Returns whether this process is a rank that was forked, or a spare."""
    return bool(_SPARE or _SUPERVISOR)


def is_spare() -> bool:
    """Returns whether this process is not needed as a rank yet."""
    return bool(_SPARE)


def builds_early() -> bool:
    """Returns whether this process is a spare that is to make the objects of the configuration before it is needed."""
    return any(spare.builds for spare in _SPARE)


def await_orders() -> None:
    """Waits, in a spare, until it is needed: then it is a rank."""
    spare = _SPARE.pop()
    import torch  # which the supervisor, that reads this file, must not load

    if torch.cuda.is_initialized() and not _is_readable(spare.orders):
        os._exit(TRY_AGAIN)  # it would hold a GPU's memory beside the rank that trains
    if not (orders := os.read(spare.orders, 1 << 12)):
        os._exit(TRY_AGAIN)  # the fork server has ended
    os.close(spare.orders)
    order = json.loads(orders)
    os.environ |= {ATTEMPT: str(order["attempt"]), **order["numbers"]}
    if spare.ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(order["port"])}
    _SUPERVISOR.append(spare.facts)
    spare.release()


def report_as_rank() -> None:
    """Makes a spare that has failed a rank, which reports that, if it is needed as one; else the spare ends in silence."""
    if _SPARE and not _is_readable(_SPARE[0].orders):
        os._exit(TRY_AGAIN)
    if _SPARE:
        await_orders()


def _is_readable(pipe: int) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])


def _is_closed(pipe: int) -> bool:
    """Returns whether nothing reads a pipe any more."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


def _fork(supervisor: int) -> tuple[int, int]:
    """Forks a child of the supervisor: returns its process id and a pipe to it; in the child 0, and the pipe's other end."""
    reader, writer = os.pipe()
    orders, pipe = os.pipe()
    between = os.fork()
    if between:
        os.close(writer)
        os.close(orders)
        os.waitpid(between, 0)
        with os.fdopen(reader) as file:
            return int(file.read()), pipe
    os.close(reader)
    os.close(pipe)
    middle = os.getpid()
    if pid := os.fork():
        os.write(writer, str(pid).encode())
        os._exit(0)  # and the rank gets another parent: the supervisor
    os.close(writer)
    while (parent := os.getppid()) == middle:
        time.sleep(0.001)
    end_with_parent()
    if parent != supervisor:
        os._exit(TRY_AGAIN)  # it has ended meanwhile
    return 0, orders


def _hide_output() -> Callable[[], None]:
    """Hides what this process prints from here on, and returns what prints it."""
    outputs = [(number, os.dup(number), os.memfd_create("output")) for number in (1, 2)]
    for number, _, memory in outputs:
        os.dup2(memory, number)

    def release() -> None:
        flush_streams()
        for number, output, memory in outputs:
            os.dup2(output, number)
            with suppress(OSError):  # whoever read it is gone
                os.write(number, os.pread(memory, os.fstat(memory).st_size, 0))
            os.close(output)
            os.close(memory)

    return release


def report_small_build(build: Callable[[], Built]) -> Built:
    """Makes the objects of the configuration, and tells the supervisor if that took little: spares can make theirs early."""
    memory, start = _most_memory(), time.monotonic()
    built = build()
    if _most_memory() - memory < _SMALL and time.monotonic() - start < 1:
        tell_supervisor(small=os.environ.get("LOCAL_RANK", "0"))
    return built


def _most_memory() -> int:
    """Returns the most bytes that this process has had in memory at once."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def tell_supervisor(flags: int = 0, **facts: object) -> None:
    """Sends facts about the run to the supervisor, where there is one. `flags`: those of the socket's `send`."""
    for supervisor in _SUPERVISOR:
        with suppress(OSError):
            supervisor.send(json.dumps({**facts, "attempt": restarts()}).encode(), flags)
