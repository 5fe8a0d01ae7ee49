"""The rendezvous of torchrun's agents, made safe: a store in which nothing that a stranger writes runs code, and one clock.

torch's agents keep the state of their rendezvous in their store as a pickle, and listen to every network that the host is in.
Here only that state is taken from there, and on one host the store is on loopback.

They write into the store when they were last alive, each by its own clock, and believe that one whose time is long past is
dead. So a clock that is wrong, or is set right in the middle of a run, ends the run. Here the agents of several hosts take the
time from the one that holds the store, when they start, and count on from there with a clock that nobody sets. That is also
the first time that a host talks to that one: packets that are too long for the way are found here.
"""

import io
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timedelta, tzinfo
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

from project.cluster import reachability
from project.cluster.interfaces import resolve
from project.cluster.place import host
from project.cluster.rendezvous import reach, store_at, store_on_loopback
from project.errors import UserError

_TICK = 0.5  # seconds between two times that the host of the store publishes
_STATE = {
    (dynamic_rendezvous.__name__, "_RendezvousState"),
    (dynamic_rendezvous.__name__, "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timezone"),
    ("datetime", "timedelta"),
}


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _STATE:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a rendezvous")
        return super().find_class(module, name)


class _StatePickle:
    """Stands for what torch's module knows as `pickle`."""

    PickleError = pickle.PickleError
    dumps = staticmethod(pickle.dumps)

    @staticmethod
    def loads(data: bytes) -> object:
        try:
            return _StateUnpickler(io.BytesIO(data)).load()
        except pickle.PickleError:
            raise
        except Exception as error:  # garbage makes anything of it
            raise pickle.UnpicklingError(str(error)) from error


def _store(host: str, port: int, is_master: bool = False, **settings: Any) -> TCPStore:
    if is_master and host == "127.0.0.1":
        return store_on_loopback(0, port, settings["timeout"])
    return TCPStore(host, port, is_master=is_master, **settings)


def guard() -> None:
    """Makes the agent of this process keep to these rules, from here on."""
    dynamic_rendezvous.pickle = _StatePickle  # type: ignore[attr-defined, assignment]
    c10d_rendezvous_backend.TCPStore = _store  # type: ignore[attr-defined, assignment]


class RunClock(datetime):
    """The time of the run: the same on all hosts, and never set."""

    ahead = time.time() - time.monotonic()

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.fromtimestamp(cls.ahead + time.monotonic(), tz)


def _clock_store(address: str, port: int, seconds: float) -> PrefixStore:
    return PrefixStore("run clock", store_at(address, port, timedelta(seconds=seconds)))


def _publish(port: int, seconds: float, over: threading.Event) -> None:
    """Publishes the time on the store's host, beside its agent, which makes the store."""
    with closing(reachability.Listener("", host())) as listener, suppress(dist.DistError):
        store = _clock_store("127.0.0.1", port, seconds)
        store.set("listener", str(listener.port))
        while not over.wait(_TICK):
            store.set("now", f"{RunClock.ahead + time.monotonic()!r}")


def _join(address: str, port: int, seconds: float) -> None:
    """Checks, on the other hosts, that packets of any size arrive at the store's host, and reads its time."""
    end = time.monotonic() + seconds
    while True:
        reach(address, port, seconds)
        try:
            _greet(address, _clock_store(address, port, seconds))
            return
        except dist.DistError:  # the store of the roll call, perhaps, which was about to go
            if time.monotonic() > end:
                raise
            time.sleep(_TICK)


def _greet(address: str, store: PrefixStore) -> None:
    answer = reachability.probe_any(resolve(address), int(store.get("listener")))
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
