"""The ranks that are slow again and again, their hosts, and whether data or compute is the cause: their peers wait for them.

`Throughput` measures, and hands over each window's times of all ranks; here they are compared. A rank's own work is what it
does not wait for others in: getting its data, and computing.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Literal

from project.cluster.place import short

log = logging.getLogger(__name__)

Cause = Literal["data", "compute"]
_SLOW = 1.3  # times the median of the ranks' own work
_IN_A_ROW, _AT_LEAST = 3, 1.0  # windows, seconds: less is chance
_AGAIN = 100  # windows until a warning is repeated
_CURVES = 8  # ranks with curves of their own
_HINTS = {
    "data": "data.num_workers, and the disk or network that this host reads its data from.",
    "compute": "what else runs on this host; is it throttled (temperature, power, a limit on its cores)?",
}


@dataclass(frozen=True)
class Times:
    """The seconds that a rank spent in a step, on the average of a window."""

    data: float
    compute: float
    sync: float
    other: float = 0.0
    """Between two steps: logging, say."""
    forward: float = 0.0
    """A part of `compute`, as are the next two."""
    backward: float = 0.0
    optimizer: float = 0.0

    @property
    def own(self) -> float:
        return self.data + self.compute

    @property
    def total(self) -> float:
        return self.own + self.sync + self.other

    @property
    def rest(self) -> float:
        return max(0.0, self.compute - self.forward - self.backward - self.optimizer) + self.other


def excess(ranks: Sequence[Times], cause: Cause) -> list[float]:
    """Returns each rank's own work, relative to the median rank's, if it differed in this alone: 1.0 is no slower."""
    reference, typical = _median_own(ranks), median_low(getattr(times, cause) for times in ranks)
    return [1 + (getattr(times, cause) - typical) / reference for times in ranks]


def _median_own(ranks: Sequence[Times]) -> float:
    return median_low(times.own for times in ranks) or 1e-9


@dataclass
class Streak:
    """The windows in a row in which a rank was slow for one reason, or not slow."""

    cause: Cause | None = None
    windows: int = 0
    seconds: float = 0.0
    factors: deque[float] = field(default_factory=lambda: deque(maxlen=_IN_A_ROW))


class Stragglers:
    """Names a rank, with its host, when it has been slow for some windows of steps, and again when that has changed, or after
    a long time.
    """

    def __init__(self, hosts: Sequence[str], steps: int) -> None:
        self.hosts, self.steps = hosts, steps
        self._streaks = [Streak() for _ in hosts]
        self._named: dict[int, Cause] = {}

    def by_rank(self, ranks: Sequence[Times]) -> dict[str, float]:
        """Returns curves of each rank's own work, with its host in their names; of many ranks those of the slowest now."""
        slowest = sorted(range(len(ranks)), key=lambda rank: -ranks[rank].own)[:_CURVES]
        named = {f"{rank}.{short(self.hosts[rank])}": ranks[rank] for rank in sorted(slowest)}
        data = {f"ranks/data_ms/{name}": 1e3 * times.data for name, times in named.items()}
        return data | {f"ranks/compute_ms/{name}": 1e3 * times.compute for name, times in named.items()}

    def compare(self, ranks: Sequence[Times]) -> list[str]:
        """Compares the times of one window, by rank, and returns a text for each rank that is reported as slow."""
        named = []
        reference, by_data, by_compute = _median_own(ranks), excess(ranks, "data"), excess(ranks, "compute")
        for rank, times in enumerate(ranks):
            cause: Cause | None = "data" if by_data[rank] > by_compute[rank] else "compute"
            if times.own / reference < _SLOW:
                cause = None
            if self._streaks[rank].cause != cause:
                self._streaks[rank] = Streak(cause)
            streak = self._streaks[rank]
            streak.windows += 1
            streak.seconds += times.total * self.steps
            streak.factors.append(times.own / reference)
            if streak.windows >= _IN_A_ROW and streak.seconds >= _AT_LEAST:
                named += self._report(rank, streak, ranks)
        return named

    def _report(self, rank: int, streak: Streak, ranks: Sequence[Times]) -> list[str]:
        cause = streak.cause
        if cause is None:
            if self._named.pop(rank, None):
                log.info("Rank %d, %s, keeps pace again.", rank, self.hosts[rank])
        elif cause != self._named.get(rank) or streak.windows % _AGAIN == 0:
            self._named[rank] = cause
            log.warning(
                "Rank %d, %s, is slow, and all wait for it: its own work is %.1f times the usual rank's, because of its %s "
                "(%.3g ms a step, usually %.3g), and was for %d steps. HINT: %s",
                *(rank, self.hosts[rank], median(streak.factors), cause, 1e3 * getattr(ranks[rank], cause)),
                *(1e3 * median_low(getattr(times, cause) for times in ranks), streak.windows * self.steps, _HINTS[cause]),
            )
            return [f"rank {rank}, {self.hosts[rank]}, is slow because of its {cause}, and all wait for it"]
        return []
