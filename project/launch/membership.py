"""The ranks that take part in a run: whose supervisors answer, which ranks the run can do without, and their new numbers."""

import os
import time
from contextlib import suppress

from project.cluster import place
from project.cluster.slurm import slurm_node
from project.launch.nodes import Nodes, nodes_file, store_address, store_answers
from project.launch.peers import Peers

_ROLL, _DEATH = 1.5, 1.0  # seconds that a supervisor has to answer; seconds that the processes of a host take to die


class Membership:
    """Knows the ranks of a run by their supervisors, its `peers`."""

    def __init__(self, world_size: int, peers: Peers) -> None:
        self.nodes, self._peers, self._store = Nodes.of_environment(world_size), peers, store_address()
        self._host = place.host()

    def slurm_node(self, host: str) -> str:
        """Returns Slurm's name of a host, or ''."""
        names = {first["host"]: first["node"] for first in self._peers.joined.values()}
        return names.get(host) or (slurm_node() if host == self._host else "")

    def can_lose(self, rank: int) -> bool:
        """Returns whether the run can do without a rank and the others on its node."""
        return rank in self._peers.hosts and self.nodes.can_spare(self.nodes.with_all_of_their_nodes({rank}))

    def call_roll(self, attempt: int) -> tuple[set[int], list[tuple[str, str]]]:
        """Returns the ranks whose supervisors are missing, and killed ranks that were reported meanwhile, with their hosts."""
        seconds, until = _ROLL if self.nodes.least else 0.0, time.monotonic() + _DEATH
        missing, reports = self._peers.call_roll(attempt, seconds)
        while self.nodes.with_all_of_their_nodes(missing) != missing and self.nodes.least and time.monotonic() < until:
            time.sleep(0.1)  # where a host goes down, one of its processes may outlive the other
            missing, more = self._peers.call_roll(attempt, seconds)
            reports += more
        return missing, reports

    def has_enough(self, missing: set[int]) -> bool:
        """Returns whether the supervisors of all ranks that a restart needs have answered."""
        if self.nodes.ranks <= 1:
            return True
        if self._peers.is_any_done or not self._peers.hosts:
            return False
        return not missing or (self.nodes.can_spare(missing) and store_answers(self._store))

    def ranks_to_leave_out(self, host: str, missing: set[int]) -> set[int]:
        """Returns the ranks of a host, if the run can do without it; none where another node may have its name."""
        ranks = {rank for rank, name in self._peers.hosts.items() if name == host}
        if not ranks or any(self._peers.joined[rank]["needed"] for rank in ranks):
            return set()
        is_one_node = ranks == self.nodes.with_all_of_their_nodes({min(ranks)})
        return ranks if is_one_node and self.nodes.can_spare(missing | ranks) else set()

    def renumber(self, missing: set[int], rank: int) -> tuple[int, dict[str, str]]:
        """Takes ranks out of the run. Returns the new number of `rank`, and the variables of its environment that change."""
        self.nodes, numbers = self.nodes.without(missing)
        self._peers.renumber(numbers)
        environment = self.nodes.environment(numbers[rank])
        with suppress(OSError):  # for torchrun's agent, which would wait for all nodes at the end
            nodes_file(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(environment["GROUP_WORLD_SIZE"])
        return numbers[rank], environment
