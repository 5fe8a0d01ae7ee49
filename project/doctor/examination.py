"""An examination: the run, its ranks, and the findings so far. The doctor's checks take one.

Every check measures on all ranks at once, and rank 0 judges: a row with a verdict, the hosts and ranks it is about, and what
to do. What raises on one rank becomes a finding about that rank; the others don't wait for it.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist

from project.cluster.environment import named
from project.cluster.interfaces import Route
from project.cluster.place import host
from project.cluster.rendezvous import Rendezvous
from project.doctor.examined import ExaminedRun
from project.doctor.findings import Finding, Trouble

log = logging.getLogger(__name__)

Value = TypeVar("Value")


def _new_group(timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(backend=backend, timeout=timeout))


class Examination:
    """An examination of a run, on all its ranks; `findings` is complete on rank 0. `fast` leaves out slow checks."""

    def __init__(self, run: ExaminedRun, rendezvous: Rendezvous | None, route: Route | None, fast: bool) -> None:
        self.run, self.rendezvous, self.route, self.fast = run, rendezvous, route, fast
        self.findings: list[Finding] = []
        self.hosts = rendezvous.hosts if rendezvous else [host()]
        # Its own groups, with a deadline: a collective that hangs must not take the default half hour.
        limit = timedelta(seconds=30)
        self.control = _new_group(limit, "gloo") if rendezvous else None
        self.group = _new_group(limit) if rendezvous else None
        self.all_reduce: dict[int, float] = {}
        """Seconds of an all-reduce by the message's bytes, once they are measured."""
        self.sample_bytes, self.has_data = 0, False

    def gather(self, value: Value) -> list[Value]:
        """Returns what every rank contributes, by rank."""
        if self.control is None:
            return [value]
        answers = [value] * self.run.world_size
        dist.all_gather_object(answers, value, group=self.control)
        return answers

    def measure(self, check: str, measure: Callable[[], Value], fix: str = "", bad: bool = True) -> list[Value] | None:
        """Returns the measurements of all ranks; None when one of them failed, which is then a finding."""
        own, error = list[Value](), ""
        try:
            own.append(measure())
        except Exception as raised:
            log.debug("doctor: %s", check, exc_info=True)
            error = f"{type(raised).__name__}: {str(raised).strip().partition(chr(10))[0]}"
        answers = self.gather((own, error))
        errors = [text for _, text in answers]
        if any(errors):
            ranks_of = {text: [rank for rank, other in enumerate(errors) if other == text] for text in errors if text}
            self.add(check, [self.trouble(ranks, text, bad) for text, ranks in ranks_of.items()], "", fix)
            return None
        return [value for values, _ in answers for value in values]

    def trouble(self, ranks: Sequence[int], text: str, bad: bool = True) -> Trouble:
        """Returns a problem of these ranks, which its text begins with."""
        return Trouble(f"{named(ranks, self.hosts)}: {text}", list(ranks), bad)

    def add(self, check: str, troubles: Sequence[Trouble], good: str, fix: str = "", **figures: object) -> None:
        """Adds a row to the table: the troubles and what to do, or, where there are none, what is good."""
        ranks = sorted({rank for trouble in troubles for rank in trouble.ranks})
        where: list[dict[str, int | str]] = [{"rank": rank, "host": self.hosts[rank]} for rank in ranks]
        if not troubles:
            self.findings.append(Finding(check, "good", good, "", where, figures))
        else:
            text, bad = "; ".join(trouble.text for trouble in troubles), any(trouble.bad for trouble in troubles)
            self.findings.append(Finding(check, "bad" if bad else "warning", text, fix, where, figures))
