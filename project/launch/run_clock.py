"""A common clock for the torchrun agents of several hosts, whose own clocks need not agree.

torchrun's agents write into their common store when they were last alive, each by its own clock, and believe that one whose
time is long past is dead. So a clock that is wrong, or is set right in the middle of a run, ends the run. Here all agents take
the time from the one that holds the store, when they start, and count on from there with a clock that nobody sets.

That is also the first time that this host talks to that one: packets that are too long for the way are found here.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timedelta, tzinfo

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from project.cluster import reachability
from project.cluster.interfaces import resolve
from project.cluster.place import host
from project.cluster.rendezvous import reach, store_at
from project.errors import UserError

_TICK = 0.5  # seconds between two times that the host of the store publishes


class RunClock(datetime):
    """The time of the run: the same on all hosts, and never set."""

    ahead = time.time() - time.monotonic()

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.fromtimestamp(cls.ahead + time.monotonic(), tz)


def _store(address: str, port: int, seconds: float) -> PrefixStore:
    return PrefixStore("run clock", store_at(address, port, timedelta(seconds=seconds)))


def _publish(port: int, seconds: float, over: threading.Event) -> None:
    """Publishes the time on the store's host, beside its agent, which makes the store."""
    with closing(reachability.Listener("", host())) as listener, suppress(dist.DistError):
        store = _store("127.0.0.1", port, seconds)
        store.set("listener", str(listener.port))
        while not over.wait(_TICK):
            store.set("now", f"{RunClock.ahead + time.monotonic()!r}")


def _join(address: str, port: int, seconds: float) -> None:
    """Checks, on the other hosts, that packets of any size arrive at the store's host, and reads its time."""
    end = time.monotonic() + seconds
    while True:
        reach(address, port, seconds)
        try:
            _greet(address, _store(address, port, seconds))
            return
        except dist.DistError:  # the store of the roll call, perhaps, which was about to go
            if time.monotonic() > end:
                raise
            time.sleep(_TICK)


def _greet(address: str, store: PrefixStore) -> None:
    port = int(store.get("listener"))
    answer = reachability.probe_any(resolve(address), port)
    if answer.limit is not None:
        raise UserError(f"{reachability.lost(answer, host(), answer.name)}. HINT: {reachability.HINT}")
    before = store.get("now")
    while (now := store.get("now")) == before:  # it is new at the moment when it changes
        time.sleep(_TICK / 50)
    RunClock.ahead = float(now) - time.monotonic()


@contextmanager
def run_clock(is_host: bool, address: str, port: int, seconds: float) -> Iterator[None]:
    """Makes torchrun use that clock within the context. `is_host`: this agent makes the store. Raises a UserError with the
    cause."""
    dynamic_rendezvous.datetime = RunClock  # type: ignore[attr-defined]
    if not is_host:
        _join(address, port, seconds)
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_publish, args=(port, seconds, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * _TICK)
