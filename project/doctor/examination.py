"""An examination: the run, its ranks, and the findings so far. The doctor's checks take one.

Every check measures on all ranks at once, and rank 0 judges: a row with a verdict, the hosts and ranks it is about, and what
to do. What raises on one rank becomes a finding about that rank; the others don't wait for it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from project.cluster.environment import named
from project.cluster.interfaces import Route
from project.cluster.place import host
from project.cluster.rendezvous import Rendezvous
from project.doctor.findings import Finding, Trouble, row
from project.doctor.network import NetworkCost

log = logging.getLogger(__name__)

_PAGES = 1 << 16  # bytes of /dev/shm that a micro-batch takes besides: each of its tensors, and each lock, has pages of its own


@dataclass
class ExaminedRun:
    """The examined run, as far as the doctor needs to know it."""

    rank: int
    world_size: int
    local_rank: int
    processes: int
    """On this host."""
    device: torch.device
    folder: Path
    """The run's folder, the same on all ranks."""
    shared: bool
    """Whether all hosts must see it."""
    environment: dict[str, Any]
    configuration: Mapping[str, Any]
    accumulation: int
    gradient_bytes: int
    checkpoint_bytes: int
    checkpoints: int
    """How many will be kept."""
    compute: Callable[[int], None]
    """Puts a micro-batch of so many samples through the network and back."""
    load: Callable[[], Iterator[int]]
    """The training loader: yields the samples of each micro-batch."""
    prepare: Callable[[], None]
    """Puts the data on this host where it isn't there; called by its first rank."""
    fingerprint: Callable[[], dict[str, Any]]
    """Opens the data, and says what it is: counts, and a hash of a few samples."""
    sizes: Callable[[], tuple[int, int]]
    """Samples in a micro-batch and processes of its loader, of data that was opened."""
    global_batch: int | None
    global_batch_key: str
    """The setting of the global batch."""
    shared_by: int
    """Neighbouring ranks that see the same samples."""
    micro_batch: int = 1
    workers: int = 0

    @property
    def disk_needed(self) -> int:
        """Returns the bytes of the checkpoints that are on disk at once: those kept, and the one being written."""
        return self.checkpoint_bytes * (self.checkpoints + 1)

    def shared_memory_needed(self, sample_bytes: int) -> int:
        """Returns the bytes of /dev/shm on this host: each loader worker is two micro-batches ahead, and one is in use."""
        if not self.workers:
            return 0
        return (self.micro_batch * sample_bytes + _PAGES) * (self.workers * 2 + 1) * self.processes


class Examination:
    """An examination of a run, on all its ranks; `findings` is complete on rank 0. `fast` leaves out slow checks."""

    def __init__(self, run: ExaminedRun, rendezvous: Rendezvous | None, route: Route | None, fast: bool) -> None:
        self.run, self.rendezvous, self.route, self.fast = run, rendezvous, route, fast
        self.findings: list[Finding] = []
        self.hosts = rendezvous.hosts if rendezvous else [host()]
        # Its own groups, with a deadline: a collective that hangs must not take the default half hour.
        limit = timedelta(seconds=30)
        self.control: Any = dist.new_group(backend="gloo", timeout=limit) if rendezvous else None
        self.group: Any = dist.new_group(timeout=limit) if rendezvous else None
        self.network_cost = NetworkCost(0.0, float("inf"))
        self.sample_bytes, self.has_data = 0, False

    def gather(self, value: Any) -> list[Any]:
        """Returns what every rank contributes, by rank."""
        if self.control is None:
            return [value]
        answers: list[Any] = [None] * self.run.world_size
        dist.all_gather_object(answers, value, group=self.control)
        return answers

    def measure(self, check: str, measure: Callable[[], Any], fix: str = "", bad: bool = True) -> list[Any] | None:
        """Returns the measurements of all ranks; None when one of them failed, which is then a finding."""
        try:
            own, error = measure(), None
        except Exception as raised:
            log.debug("doctor: %s", check, exc_info=True)
            own, error = None, f"{type(raised).__name__}: {str(raised).strip().splitlines()[0] if str(raised) else ''}"
        answers = self.gather((own, error))
        failed = {rank: text for rank, (_, text) in enumerate(answers) if text}
        if failed:
            texts = {text: [rank for rank in failed if failed[rank] == text] for text in failed.values()}
            troubles = [Trouble(f"{named(ranks, self.hosts)}: {text}", ranks, bad) for text, ranks in texts.items()]
            self.add(check, troubles, "", fix)
            return None
        return [value for value, _ in answers]

    def add(self, check: str, troubles: Sequence[Trouble], good: str, fix: str = "", **figures: Any) -> None:
        """Adds a row to the table."""
        self.findings.append(row(check, troubles, self.hosts, good, fix, figures))
