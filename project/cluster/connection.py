"""Connects the ranks of a run before anything else is set up, and closes their connections at its end."""

import atexit
import gc
import os
import signal
import threading
from pathlib import Path
from typing import cast

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore

from project.cluster import environment, shared_folder
from project.cluster.interfaces import Route, use, use_loopback
from project.cluster.place import restarts
from project.cluster.rendezvous import Rendezvous, store_at, store_on_loopback
from project.typed import TypedTrainer

FAILED = threading.Event()
"""Set when the run has failed: NCCL's connections are aborted then."""
_closing: list[threading.Thread] = []


def _strategy(trainer: TypedTrainer) -> DDPStrategy:
    """Returns the strategy of a run with several ranks: all that are taken are DDP's."""
    return cast(DDPStrategy, trainer.strategy)


def _is_hosted() -> bool:
    """Returns whether torchrun listens at the address where the ranks meet."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(trainer: TypedTrainer, seconds: float) -> tuple[Rendezvous, Route | None]:
    """Connects the ranks when all have come and every host reaches every other, and returns the route."""
    place = _strategy(trainer).cluster_environment
    assert place is not None
    rendezvous = Rendezvous(
        *(trainer.global_rank, trainer.world_size, place.main_address, place.main_port, seconds, trainer.host_of),
        hosted=_is_hosted(),
        one_host=trainer.num_nodes == 1,
    )
    trainer.host_names = rendezvous.hosts
    route = rendezvous.find_route()
    if route is None:
        use_loopback()
    else:
        use(route)
    _connect(trainer, PrefixStore("ranks", rendezvous.store), trainer.global_rank)
    return rendezvous, route


def connect_hosts(trainer: TypedTrainer, seconds: float) -> None:
    """Connects the ranks of several hosts, and ends the run where one would train something else than the others."""
    if dist.is_initialized():
        return
    rendezvous, _ = meet(trainer, seconds)
    facts = environment.of_this_rank(trainer.strategy.root_device, trainer.configuration)
    place = Path(trainer.default_root_dir), trainer.global_rank, rendezvous.hosts, rendezvous.exchange
    problems = []
    if differing := environment.compare(facts, trainer.configuration, rendezvous.hosts, rendezvous.exchange):
        problems.append(f"{'; '.join(differing)}. HINT: every rank needs the same versions, code and configuration.")
    if not (trainer.shared_folder or trainer.rank_0_may_move) and (moved := shared_folder.moved(*place)):
        problems.append(f"{moved[0]}. HINT: {shared_folder.MOVE}")
    if trainer.shared_folder and (unseen := shared_folder.folder_problem(*place)):
        problems.append(f"{unseen[0]}. HINT: {shared_folder.SHARE}")
    if problems:
        rendezvous.end("\n".join(problems))


def connect_on_loopback(trainer: TypedTrainer) -> None:
    """Connects the ranks of one host on loopback, with no port open to other hosts; uses torchrun's store if it exists.

    An agent's store outlives the ranks: those that their supervisors have started again have keys of their own there.
    """
    use_loopback()
    attempt = restarts()
    if dist.is_initialized():
        return
    atexit.register(disconnect)
    if _is_hosted() and not attempt:
        return  # Lightning connects them
    strategy = _strategy(trainer)
    assert strategy.cluster_environment is not None
    rank, port, timeout = strategy.local_rank, strategy.cluster_environment.main_port, strategy._timeout or default_pg_timeout
    if _is_hosted():
        store = store_at(strategy.cluster_environment.main_address, port, timeout)
    else:
        store = store_on_loopback(rank, port, timeout)
    _connect(trainer, PrefixStore(f"ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{attempt}", store), rank)


def _connect(trainer: TypedTrainer, store: PrefixStore, rank: int) -> None:
    """Connects the ranks as Lightning does, by a store that exists already."""
    strategy, device = _strategy(trainer), trainer.strategy.root_device
    trainer.accelerator.setup_device(device)
    backend = strategy.process_group_backend or dist.get_default_backend_for_device(device)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=trainer.world_size,
        timeout=strategy._timeout,
        device_id=None if device.type == "cpu" else device,
    )
    atexit.register(disconnect)


def close_connections(seconds: float = 10) -> bool:
    """Closes the connections to the other ranks, which notice that; returns whether they are closed.

    Gloo's threads hold Python's tensors for a moment longer than an operation takes. A thread that gives one back when Python
    has ended aborts the process. One that waits for a dead rank is given up after so many seconds, and this is False.

    NCCL's are aborted where the run has failed: to destroy them is agreed on with ranks that may be gone. They leave threads
    and memory behind for the process to end with, and so this is False, too. (By torch's sources; not run on a GPU.)
    """
    if not dist.is_initialized():
        return True
    gc.collect()  # what holds a connection in a circle of references lets go of it
    aborts = FAILED.is_set() and "nccl" in dist.get_backend()
    close = dist.group.WORLD.abort if aborts and dist.group.WORLD else dist.destroy_process_group
    name = "abort" if aborts else "hang up"
    if not _closing or _closing[-1].name != name or not (aborts or _closing[-1].is_alive()):
        _closing.append(threading.Thread(target=close, name=name, daemon=True))
        _closing[-1].start()
    _closing[-1].join(seconds)
    return not (aborts or _closing[-1].is_alive())


def disconnect() -> None:
    """Disconnects at the end of the program, undisturbed by Ctrl-C: NCCL warns of connections that are left open, and a thread
    of gloo's that outlives Python may abort the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    close_connections(10 if dist.is_initialized() and "nccl" in dist.get_backend() else 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
