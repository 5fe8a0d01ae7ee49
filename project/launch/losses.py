"""Counts lost ranks: of a run, which is given up when it makes no progress, and of each host, which may be left out."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from project.cluster.oom import OOM_KILL
from project.cluster.place import node_of
from project.untrusted import open_to_append, read_end

STRIKES = 3
"""The default of `recover.strikes`."""

_WITHOUT_PROGRESS, _OUT_OF_MEMORY = 3, 2  # starts in a row that come no further, before the supervisor gives up
_WINDOW = 3600.0  # seconds for which a host's lost ranks count
_AHEAD = 60.0  # seconds by which another host's clock may be ahead
_TAIL = 1 << 16  # bytes of the file that are read, from its end


class Losses:
    """Records how often ranks were lost, and decides whether another start is worth while."""

    def __init__(self, restarts: int) -> None:
        self._restarts = restarts
        self._known: list[tuple[str, bool]] = []  # of each: the newest state in memory, and whether memory had run out

    def __str__(self) -> str:
        return f"{len(self._known)} of {self._restarts}"

    @property
    def is_repeated(self) -> bool:
        """Returns whether the run made no progress before the last loss: then code is more likely at fault than a host."""
        return len(self._known) > 1 and self._known[-1][0] == self._known[-2][0]

    def add(self, loss: str, newest: str) -> str:
        """Records a loss, and returns why the ranks are not started again, or ''.

        `newest`: the newest state in memory, by which it is known whether the run has made progress in between.
        """
        self._known.append((newest, OOM_KILL in loss))
        alike = [out_of_memory for state, out_of_memory in self._known if state == newest]
        if len(self._known) > self._restarts:
            return f"It was restarted {self._restarts} times (recover.restarts)"
        if sum(alike) >= _OUT_OF_MEMORY:
            return f"Memory ran out {sum(alike)} times within the same steps"
        if len(alike) >= _WITHOUT_PROGRESS:
            return f"Ranks were lost {len(alike)} times within the same steps"
        return ""


class Strikes:
    """Counts the ranks that each host has lost within an hour, in a file of the run: it outlives the supervisors."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def add(self, hosts: Sequence[str], life: Path | None) -> dict[str, int]:
        """Records a lost rank on each of the hosts. Returns those that have had too many, and how many. `life`: the file of the
        run's starts and stops, beside which they are kept.
        """
        if not hosts or life is None:
            return {}
        machines = {node_of(host): host for host in hosts}  # a pod that is started again has another name there
        since, now = time.time() - _WINDOW, round(time.time(), 3)
        counts: Counter[str] = Counter()
        file, lines = life.with_name("strikes.jsonl"), list[str]()
        with suppress(OSError):
            with open_to_append(file) as opened:
                opened.write("".join(json.dumps({"time": now, "host": machine}) + "\n" for machine in machines))
            lines = read_end(file, _TAIL).splitlines()
        for line in lines:
            with suppress(ValueError, TypeError, KeyError, RecursionError, OverflowError):  # cut off, or somebody's
                strike = json.loads(line)
                counts[str(strike["host"])] += since < float(strike["time"]) < now + _AHEAD
        return {host: counts[machine] for machine, host in machines.items() if counts[machine] >= self._limit}
