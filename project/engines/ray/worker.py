"""What each of Ray's workers does: it runs `python -m project fit` as torchrun would, and says how that ended."""

import os
import secrets
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.collective import broadcast_from_rank_zero

from project.cluster.cores import cores
from project.engines.ray.child import Child

_TURN = 1.0  # seconds from one look for a preemption to the next


def layout(rank: int, nodes: list[str], visible: str | None) -> dict[str, str]:
    """torchrun's variables for a worker, and its GPUs. Where hosts have different numbers of workers, each worker counts as a
    node of its own: a launcher's nodes are all alike.
    """
    each = [nodes.count(node) for node in dict.fromkeys(nodes)]
    local = [other for other, node in enumerate(nodes) if node == nodes[rank]].index(rank)
    found = {"RANK": str(rank), "WORLD_SIZE": str(len(nodes))}
    if len(set(each)) == 1 and nodes == sorted(nodes, key=nodes.index):
        group = list(dict.fromkeys(nodes)).index(nodes[rank])
        found |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(each[0])}
        return found | {"GROUP_RANK": str(group), "GROUP_WORLD_SIZE": str(len(each))}
    found |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": str(len(nodes))}
    if visible:
        found["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local]
    return found


def newest(checkpoints: str) -> str:
    """The name of the newest checkpoint in a folder."""
    return max((one.name for one in Path(checkpoints).glob("step-*.ckpt")), default="none")


def place() -> tuple[str, int, str]:
    """An address of this host, a port that is free there, and a name that no other start has."""
    with socket.socket() as one:
        one.bind(("", 0))
        return ray.util.get_node_ip_address(), one.getsockname()[1], secrets.token_hex(4)


def environment_of(own: dict[str, str], local: int) -> dict[str, str]:
    """This process's, but for what Ray sets in it: threads by the CPUs that were asked for."""
    found = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    found["OMP_NUM_THREADS"] = str(cores(local))
    return found | own


def at_usual_priority() -> None:
    """Ray starts its workers at nice 15 where its own setting does not say otherwise."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def work(config: dict[str, Any], environment: dict[str, str]) -> None:
    """Ray calls this in each worker; an exception asks it to start all of them again."""
    context, office = ray.train.get_context(), config["office"]
    rank, world = context.get_world_rank(), context.get_world_size()
    at_usual_priority()
    address, port, name = broadcast_from_rank_zero(place() if rank == 0 else None)
    node = ray.get_runtime_context().get_node_id()
    nodes = ray.get(office.comes.remote(name, rank, world, socket.gethostname(), node, newest(config["checkpoints"])))
    if not nodes:
        return
    environment = environment_of(environment, nodes.count(node))
    environment |= layout(rank, nodes, os.environ.get("CUDA_VISIBLE_DEVICES"))
    environment |= {"TORCHELASTIC_RUN_ID": config["run"], "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    child = Child(config["words"], environment, Path(config["cwd"]), lambda number, text: office.says.remote(number, text))
    threading.Thread(target=_obey, args=(child, office, name, config["grace"]), daemon=True).start()
    threading.Thread(target=_look_for_preemption, args=(child, office, name), daemon=True).start()
    if ray.get(office.ends.remote(name, rank, child.wait())):
        raise RuntimeError("start all workers again")


def _obey(child: Child, office: Any, name: str, grace: float) -> None:
    """Passes on what the driver says, and ends a child that does not."""
    heard = 0
    while not child.ended.is_set() and (number := ray.get(office.word.remote(name, heard))) is not None:
        child.signal(number)
        heard += 1
        if heard == 1 and not child.ended.wait(grace):
            child.signal(signal.SIGKILL)


def _look_for_preemption(child: Child, office: Any, name: str) -> None:
    """Ray's answer is the same on all workers, who ask in step; one that has ended does not ask, and then the others wait."""
    while not child.ended.wait(_TURN):
        info = ray.train.get_preemption_info()
        if info is not None:
            ray.get(office.preempted.remote(name, info.preempted_ranks))
            return
