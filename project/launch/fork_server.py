"""The fork server: a process that has loaded all libraries and resolved the configuration, and forks ranks from there.

It is the first child of a supervisor (`launch/supervisor.py`), and has started no thread and no device: who has must not fork.
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
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from project.cluster.place import ATTEMPT, MEMORY, restarts
from project.errors import TRY_AGAIN, UserError
from project.launch.orphans import end_with_parent
from project.launch.supervisor import SOCKET, receive
from project.survive.signals import ENDING

Built = TypeVar("Built")

_SMALL = 64 << 20  # bytes
_SUPERVISOR: list[socket.socket] = []  # this rank's way to its supervisor
_THREADS: list[int] = []  # of a rank's operations, where the fork server has one


def is_fork_server() -> bool:
    """Returns whether a supervisor has started this process to fork ranks."""
    return SOCKET in os.environ


def compute_alone() -> None:
    """Has this process, if it is to fork ranks, compute in one thread: forks lack OpenMP's threads, and would wait for them."""
    if is_fork_server():
        import torch  # which the supervisor, that reads this file, must not load

        _THREADS.append(torch.get_num_threads())
        torch.set_num_threads(1)


def serve(ranks: int, build: Callable[[], None]) -> None:
    """Forks ranks whenever the supervisor asks for them. Returns in each rank, and nowhere else.

    Asked for spares, it forks them before they are needed: each waits for its orders here.

    `ranks`: how many; 0: the one that an engine has started, and given its number. `build`: makes the objects of the
    configuration, in a spare that does so before it is needed.
    """
    import torch

    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        raise UserError(
            f"recover.restarts forks the ranks from one process, and something that the configuration names has started "
            f"threads when it was imported ({names}). HINT: start them in setup(), or set recover.restarts=0."
        )
    if _has_used_cuda():
        raise UserError(
            "recover.restarts forks the ranks from one process, and something that the configuration names has used CUDA when "
            "it was imported. HINT: use devices in setup() or later, or set recover.restarts=0."
        )
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    gc.collect()
    gc.freeze()  # what is here already is not looked through, and so not copied, by a rank's own collections
    supervisor, facts = (socket.socket(fileno=int(number)) for number in os.environ.pop(SOCKET).split())
    parent = os.getppid()
    with suppress(ConnectionError):
        supervisor.send(b'{"ready": true}')
    spares: dict[int, tuple[int, int]] = {}  # of each rank to come: its process, and the pipe at which it waits for its orders
    while order := receive(supervisor):
        _flush()
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
                if ranks > 1:
                    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(ranks)}
                torch.set_num_threads(_THREADS.pop())
                release = _build_in_silence(build) if order.get("build") else None
                if not (own := os.read(pipe, 1 << 12)):
                    os._exit(TRY_AGAIN)  # the fork server has ended
                for number, handler in before.items():
                    signal.signal(number, handler)
                _become(ranks, **json.loads(own))
                os.close(pipe)
                _SUPERVISOR.append(facts)
                if release is not None:
                    release()
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


def _has_used_cuda() -> bool:
    """Returns whether CUDA has been used here, after which no fork of this process can use it: a fork tells."""
    import torch

    if pid := os.fork():
        return bool(os.waitpid(pid, 0)[1])
    is_refused = False
    try:
        if torch.cuda.device_count():
            torch.cuda.init()
    except RuntimeError as error:
        is_refused = "forked" in str(error)
    finally:
        os._exit(is_refused)


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


def _become(ranks: int, attempt: int, port: int, numbers: Mapping[str, str]) -> None:
    """Gives this process what a rank's environment has of the start that it belongs to."""
    os.environ |= {ATTEMPT: str(attempt), **numbers}
    if ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _build_in_silence(build: Callable[[], None]) -> Callable[[], None]:
    """Makes the objects of the configuration, and returns what prints the output of that, when this spare becomes a rank.

    An error ends the spare: the rank that is forked in its place, when it is needed, reports it.
    """
    try:
        outputs = [(number, os.dup(number), os.memfd_create("output")) for number in (1, 2)]
        for number, _, memory in outputs:
            os.dup2(memory, number)
        build()
        _flush()
    except BaseException:
        os._exit(TRY_AGAIN)

    def release() -> None:
        _flush()
        for number, output, memory in outputs:
            os.dup2(output, number)
            with suppress(OSError):  # whoever read it is gone
                os.write(number, os.pread(memory, os.fstat(memory).st_size, 0))
            os.close(output)
            os.close(memory)

    return release


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


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


def tell_supervisor(**facts: object) -> None:
    """Sends facts about the run to the supervisor, where there is one."""
    for supervisor in _SUPERVISOR:
        with suppress(OSError):
            supervisor.send(json.dumps({**facts, "attempt": restarts()}).encode())
