"""An examination: the run, its ranks, and the findings so far: a row for each check, shown as a table and written as JSON.

Every check measures on all ranks at once, and rank 0 judges: a row with a verdict, the hosts and ranks it is about, and what
to do. What raises on one rank becomes a finding about that rank; the others don't wait for it.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, TypeVar, cast

import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from project.cluster.environment import named
from project.cluster.interfaces import Route
from project.cluster.place import host
from project.cluster.rendezvous import Rendezvous
from project.doctor.examined import ExaminedRun
from project.errors import UserError
from project.untrusted import printable, write_text

log = logging.getLogger(__name__)

Value = TypeVar("Value")

_WIDE = 150  # columns, where no terminal says how many there are
_NARROW = 110  # columns, of which a text of its own leaves the other one too few

Verdict = Literal["good", "warning", "bad", "skipped"]
_COLOURS = {"good": "green", "warning": "yellow", "bad": "bold red", "skipped": "dim"}
_WORST: tuple[Verdict, ...] = ("bad", "warning", "good", "skipped")


@dataclass
class Trouble:
    """A problem on some ranks."""

    text: str
    ranks: list[int]
    bad: bool = True
    """Else a warning: the run will work, but not as well as it could."""


@dataclass
class Finding:
    """A row of the table."""

    check: str
    verdict: Verdict
    text: str
    fix: str = ""
    where: list[dict[str, int | str]] = field(default_factory=list)
    """The ranks that it is about, each with its host."""
    figures: dict[str, object] = field(default_factory=dict)


def in_bytes(number: float) -> str:
    """Returns a number of bytes as people read it."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if number >= 10 or unit == "B" else f"{number:.1f} {unit}"


def verdict(findings: Sequence[Finding]) -> Verdict:
    return next((level for level in _WORST if any(finding.verdict == level for finding in findings)), "good")


def show(findings: Sequence[Finding], console: Console) -> None:
    """Prints the table: a row for each check."""
    if not console.is_terminal:
        console.width = _WIDE
    beside = console.width > _NARROW
    table = Table("check", "verdict", *(("what was found", "what to do") if beside else ("what was found, and what to do",)))
    for finding in findings:
        texts = [escape(printable(text)) for text in (finding.text, finding.fix)]
        texts = texts if beside else ["\n".join(filter(None, texts))]
        table.add_row(finding.check, f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]", *texts)
    console.print(table)


def write(findings: Sequence[Finding], file: Path, seconds: float) -> None:
    """Writes the findings for programs, with all figures."""
    content = {
        "verdict": verdict(findings),
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "findings": [asdict(finding) for finding in findings],
    }
    write_text(file, json.dumps(content, indent=2, default=str) + "\n")


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
            kind = "" if isinstance(raised, UserError) else f"{type(raised).__name__}: "
            error = f"{kind}{str(raised).strip().partition(chr(10))[0]}"
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
