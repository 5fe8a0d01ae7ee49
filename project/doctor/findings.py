"""The doctor's findings: a row for each check, shown as a table and written as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from project.untrusted import printable, write_text

_WIDE = 150  # columns, where no terminal says how many there are

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
    table = Table("check", "verdict", "what was found", "what to do")
    for finding in findings:
        texts = (escape(printable(text)) for text in (finding.text, finding.fix))
        table.add_row(finding.check, f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]", *texts)
    if not console.is_terminal:
        console.width = _WIDE
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
