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
import time
from datetime import datetime, timedelta, tzinfo
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

from project.cluster import reachability
from project.cluster.interfaces import resolve
from project.cluster.place import host
from project.cluster.rendezvous import reach, store_at, store_on_loopback
from project.errors import UserError

_PAUSE = 0.5  # seconds until another look for the agents' store
_LISTENER = "listener of the agents"  # its port is in the store
_listeners: list[reachability.Listener] = []  # as long as the process
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


class RunClock(datetime):
    """The time of the run: the same on all hosts, and never set."""

    ahead = time.time() - time.monotonic()

    @classmethod
    def seconds(cls) -> float:
        return cls.ahead + time.monotonic()

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.fromtimestamp(cls.seconds(), tz)


def _store(address: str, port: int, is_master: bool = False, **settings: Any) -> TCPStore:
    """Stands for what torch's module knows as `TCPStore`. The agent that makes it tells others the time, if there are any."""
    alone = is_master and address == "127.0.0.1"
    settings["is_master"] = is_master
    store = store_on_loopback(0, port, settings["timeout"]) if alone else TCPStore(address, port, **settings)
    if is_master:
        _listeners.append(reachability.Listener(address if alone else "", lambda: f"{RunClock.seconds()!r} {host()}"))
        store.set(_LISTENER, str(_listeners[-1].port))
    return store


def guard() -> None:
    """Makes the agent of this process keep to these rules, from here on."""
    dynamic_rendezvous.pickle = _StatePickle  # type: ignore[attr-defined, assignment]
    dynamic_rendezvous.datetime = RunClock  # type: ignore[attr-defined]
    c10d_rendezvous_backend.TCPStore = _store  # type: ignore[attr-defined, assignment]


def join(address: str, port: int, seconds: float) -> None:
    """Checks, on the other hosts, that packets of any size arrive at the store's host, and takes the time from there. Raises an
    error with the cause where it can't.
    """
    end = time.monotonic() + seconds
    while True:
        reach(address, port, seconds)
        try:
            listener = int(store_at(address, port, timedelta(seconds=seconds)).get(_LISTENER))
            break
        except dist.DistError:  # the store of the roll call, perhaps, which was about to go
            if time.monotonic() > end:
                raise
            time.sleep(_PAUSE)
    answer = reachability.probe_any(resolve(address), listener)
    now, _, name = answer.name.partition(" ")
    if answer.limit is not None:
        raise UserError(f"{reachability.lost(answer, host(), name)}. HINT: {reachability.HINT}")
    if now:  # else that port is closed, and the ranks will say which hosts can't reach each other
        RunClock.ahead = float(now) - answer.heard
