"""The room that a Ray cluster has for the workers of a run, and the nodes on which it places none."""

import argparse

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from project.errors import UserError


def resources(options: argparse.Namespace) -> dict[str, float]:
    """Returns what each worker needs."""
    total = ray.cluster_resources().get("GPU", 0)
    gpus = float(total >= 1) if options.gpus is None else options.gpus
    if gpus > total and options.address is None:
        raise UserError(f"--gpus {gpus:g}: this machine has {total:g}. HINT: --address of a Ray cluster that has.")
    return {name: value for name, value in (("CPU", options.cpus), ("GPU", gpus)) if value} or {"CPU": 0.001}


class Room:
    """The nodes of the cluster on which the workers of a run may be placed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.needs = resources(options)
        self._least, self._most, self._placement = options.min_workers, options.workers, options.placement
        self.left_out: set[str] = set()
        """Nodes on which no worker is placed again."""

    def _places(self, without: set[str]) -> int:
        """Returns how many workers the nodes could take, without some."""
        without = without | draining_nodes().keys()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in without]
        return sum(min(int(node.get(name, 0) // each) for name, each in self.needs.items()) for node in nodes)

    def workers(self) -> int:
        """Returns how many workers the nodes could take, within what is wanted."""
        return int(min(max(self._places(self.left_out), self._least), self._most))

    def can_spare(self, node: str) -> bool:
        """Returns whether the other nodes could take the workers."""
        return bool(self._places({*self.left_out, node}) >= self._least)

    def leave_out(self, node: str) -> bool:
        """Places no worker on a node again, if there is room without it. Returns whether there is."""
        spare = self.can_spare(node)
        self.left_out |= {node} if spare else set()
        return spare

    def reserve(self, count: int) -> PlacementGroup:
        """Requests places for so many workers."""
        selector = {"ray.io/node-id": f"!in({','.join(sorted(self.left_out))})"} if self.left_out else {}
        return placement_group([self.needs] * count, strategy=self._placement, bundle_label_selector=[selector] * count)


def draining_nodes() -> dict[str, int]:
    """Returns the nodes that are about to be taken away."""
    nodes: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return nodes
