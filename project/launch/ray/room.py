"""The room that a Ray cluster has for the workers of a run, and the nodes on which it places none."""

import argparse
import time
from collections.abc import Container, Iterable

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from project.errors import UserError

_LEFT_OUT = 3600.0  # seconds for which a host is left out


def resources(options: argparse.Namespace) -> dict[str, float]:
    """Returns what each worker needs."""
    total = ray.cluster_resources().get("GPU", 0)
    gpus = float(total >= 1) if options.gpus is None else options.gpus
    if gpus > total and options.address is None:
        raise UserError(f"--gpus {gpus:g}: this machine has {total:g}. HINT: --address of a Ray cluster that has.")
    return {name: value for name, value in (("CPU", options.cpus), ("GPU", gpus)) if value} or {"CPU": 0.001}


class Room:
    """The hosts of the cluster on which the workers of a run may be placed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.needs = resources(options)
        self._least, self._most, self._placement = options.min_workers, options.workers, options.placement
        self._left_out: dict[str, float] = {}  # hosts on which no worker is placed, and until when
        self._has_spare = True

    def _nodes(self) -> list[tuple[str, str, dict[str, float]]]:
        """Returns the host, the id and the resources of each node that is there, and is not about to be taken away."""
        draining, nodes = draining_nodes(), ray.nodes()
        alive = [node for node in nodes if node["Alive"] and node["NodeID"] not in draining]
        return [(str(node["NodeManagerHostname"]), str(node["NodeID"]), node["Resources"]) for node in alive]

    def _places(self, without: Container[str]) -> int:
        """Returns how many workers the hosts could take, without some."""
        nodes = [resources for host, _, resources in self._nodes() if host not in without]
        return sum(min(int(node.get(name, 0) // each) for name, each in self.needs.items()) for node in nodes)

    def _now_left_out(self) -> set[str]:
        """Returns the hosts that are left out."""
        return {host for host, until in self._left_out.items() if time.monotonic() < until}

    def workers(self) -> int:
        """Returns how many workers the hosts could take, within what is wanted."""
        return int(min(max(self._places(self._now_left_out()), self._least), self._most))

    def can_spare(self, host: str) -> bool:
        """Returns whether the other hosts could take the workers, if nothing else takes their room."""
        return self._has_spare and self._places({*self._now_left_out(), host}) >= self._least

    def leave_out(self, hosts: Iterable[str]) -> None:
        """Places no worker on these hosts for an hour, if there is room without them."""
        self._left_out |= dict.fromkeys(hosts, time.monotonic() + _LEFT_OUT)

    def readmit(self) -> set[str]:
        """Takes back all hosts that are left out, for good: there is no room without them. Returns them."""
        hosts = self._now_left_out()
        self._left_out.clear()
        self._has_spare = self._has_spare and not hosts
        return hosts

    def reserve(self, count: int) -> PlacementGroup:
        """Requests places for so many workers."""
        hosts = self._now_left_out()
        nodes = ",".join(sorted(node for host, node, _ in self._nodes() if host in hosts))
        selector = {"ray.io/node-id": f"!in({nodes})"} if nodes else {}
        return placement_group([self.needs] * count, strategy=self._placement, bundle_label_selector=[selector] * count)


def draining_nodes() -> dict[str, int]:
    """Returns the nodes that are about to be taken away."""
    nodes: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return nodes
