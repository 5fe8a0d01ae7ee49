"""The store in which torchrun's agents meet: nothing that a stranger writes there runs code, and on one host it is on loopback.

torch's agents keep the state of their rendezvous there as a pickle, and listen to every network that the host is in.
"""

import io
import pickle
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

from project.cluster.rendezvous import store_on_loopback

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
