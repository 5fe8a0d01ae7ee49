"""The nodes of a run and the ranks on each; where torchrun was started with a range of nodes, the run can do without some."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STORE = "PROJECT_STORE"
"""The environment variable with the address of the store in which torchrun's agents meet, or `HERE` on its host."""
HERE = "here"

_PATIENCE = 1.5  # seconds for the store's host to answer

Address = tuple[str, int]


def nodes_file(error_file: str) -> Path:
    """Returns the file that has the number of the nodes that are left, beside the one in which torchrun expects an error."""
    return Path(error_file).with_name("nodes")


def store_address() -> Address | None:
    """Returns the address of the agents' store, where scripts/launch.sh has named it; later, names may not resolve."""
    name, _, port = os.environ.get(STORE, "").rpartition(":")
    with suppress(OSError, ValueError):
        if name:
            address = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)[0][4]
            return str(address[0]), int(address[1])
    return None


def store_answers(address: Address | None) -> bool:
    """Returns whether the agents' store can be reached from here. Where the hosts of a run are cut apart, one part can: only
    that one resumes.
    """
    with suppress(OSError):
        if address is not None:
            socket.create_connection(address, _PATIENCE).close()
            return True
    return os.environ.get(STORE) == HERE


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run. Its ranks are numbered node by node."""

    ranks: int
    ranks_per_node: int = 1
    least: int = 0
    """The number of nodes that the run needs at least; 0: all that it has."""

    @classmethod
    def of_environment(cls, ranks: int) -> "Nodes":
        """Returns the nodes as scripts/launch.sh and torchrun describe them."""
        least, _, most = os.environ.get("PROJECT_NODES", "").partition(":")
        return cls(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(least) if most else 0)

    def with_all_of_their_nodes(self, ranks: set[int]) -> set[int]:
        """Returns these ranks, and those on the same nodes."""
        nodes = {rank // self.ranks_per_node for rank in ranks}
        return {rank for rank in range(self.ranks) if rank // self.ranks_per_node in nodes}

    def can_spare(self, ranks: set[int]) -> bool:
        """Returns whether these are all ranks of their nodes, and enough other nodes are left."""
        left = (self.ranks - len(ranks)) // self.ranks_per_node
        return ranks == self.with_all_of_their_nodes(ranks) and 0 < self.least <= left

    def without(self, ranks: set[int]) -> tuple["Nodes", dict[int, int]]:
        """Returns the nodes that are left without these ranks, and the new number of each rank that is left."""
        left = [rank for rank in range(self.ranks) if rank not in ranks]
        return Nodes(len(left), self.ranks_per_node, self.least), {rank: number for number, rank in enumerate(left)}

    def environment(self, rank: int) -> dict[str, str]:
        """Returns the variables of a rank's environment that depend on how many there are, as torchrun sets them."""
        node, nodes = rank // self.ranks_per_node, self.ranks // self.ranks_per_node
        numbers = {"RANK": rank, "WORLD_SIZE": self.ranks, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": self.ranks}
        return {name: str(number) for name, number in {**numbers, "GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes}.items()}
