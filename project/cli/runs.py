"""The verb `runs`: `python -m project runs` lists the runs of lightning_logs, and removes those that nobody needs.

It reads the files in the runs' folders alone. What it removes it lists first, and asks; it never touches a run in training.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from project.cli.listing import STATES, Listed, listed, read_run
from project.config_files import RUNS
from project.untrusted import printable
from project.watch.charts import number
from project.watch.history import held

_ABOUT = f"""Lists the runs in {RUNS}/: their state, the time since the last sign of life, ranks, steps, the best value of the
metric that is monitored, size on disk and hosts. Exit code 1: none is there, or matches."""
_CLEAN = """remove what nobody needs, after asking: runs that have trained nothing, or, with names, --state or --older, those
that match. Never a run in training, nor one that has shown a sign of life within the hour"""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SILENT = 3600.0
"""Seconds without a sign of life after which a run may be removed: one that is about to start holds nothing yet."""
_ORDERS: dict[str, Callable[[Listed], tuple[bool, float | str]]] = {
    "name": lambda run: (False, run.name),
    "state": lambda run: (False, float(STATES.index(run.state))),
    "age": lambda run: (False, run.age),
    "ranks": lambda run: (False, float(-(run.ranks or 0))),
    "steps": lambda run: (False, float(-run.step)),
    "metric": lambda run: (run.metric is None, -run.metric[1] if run.metric else 0.0),
    "size": lambda run: (False, float(-run.size)),
    "host": lambda run: (not run.hosts, ",".join(run.hosts)),
}


def main(words: Sequence[str]) -> int:
    """Lists the runs, or removes some, and returns the exit code."""
    parser = ArgumentParser("python -m project runs", description=_ABOUT)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only runs of these names; * and ? stand for any letters")
    parser.add_argument("--state", action="append", choices=STATES, help="only runs in this state; may be given again")
    parser.add_argument("--older", type=_seconds, metavar="TIME", help="only runs without a sign of life for 30m, 12h, 7d, 4w")
    parser.add_argument("--sort", choices=list(_ORDERS), default="age", help="newest, most or largest first (age)")
    parser.add_argument("--reverse", action="store_true", help="the other way round")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each run, for programs")
    parser.add_argument("--clean", action="store_true", help=_CLEAN)
    given = parser.parse_args(words)
    return _clean(given) if given.clean else _list(given)


def _seconds(text: str) -> float:
    if match := re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smhdw])", text):
        return float(match[1]) * _SECONDS[match[2]]
    raise ArgumentTypeError(f"a time is written as in 30m, 12h, 7d or 4w, and {text!r} is not")


def _matching(given: Namespace) -> list[Listed]:
    runs = [
        run
        for run in listed(Path(RUNS))
        if (not given.names or any(fnmatch(run.name, pattern) for pattern in given.names))
        and (not given.state or run.state in given.state)
        and (given.older is None or run.age >= given.older)
    ]
    return sorted(runs, key=_ORDERS[given.sort], reverse=given.reverse)


def _list(given: Namespace) -> int:
    runs = _matching(given)
    if given.json:
        for run in runs:
            entry = {**vars(run), "folder": str(run.folder), "name": run.name, "age": round(run.age, 3)}
            print(json.dumps(entry))
    elif runs:
        _print_table(runs)
    else:
        print(f"No run in {Path(RUNS).absolute()}" + (" matches." if given.names or given.state or given.older else "."))
    return int(not runs)


def _print_table(runs: Sequence[Listed]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "state", "age", "ranks", "step", "metric", "size", "host"):
        table.add_column(name, justify="right" if name in ("age", "ranks", "step", "size") else "left", no_wrap=True)
    for run in runs:
        step = f"{run.step:,}/{run.of:,}" if run.of else f"{run.step:,}"
        metric = f"{run.metric[0]} {number(run.metric[1])}" if run.metric else ""
        hosts = run.hosts[0] + (f" +{len(run.hosts) - 1}" if len(run.hosts) > 1 else "") if run.hosts else ""
        cells = (run.name, run.state, _age(run.age), str(run.ranks or ""), step, metric, _size(run.size), hosts)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    # What is read by a program is not cut to the width of a terminal that is not there.
    Console(width=None if sys.stdout.isatty() else 500, highlight=False).print(table)


def _age(seconds: float) -> str:
    unit, size = max(((unit, size) for unit, size in _SECONDS.items() if size <= max(1.0, seconds)), key=lambda item: item[1])
    return f"{seconds / size:.0f} {unit}"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _clean(given: Namespace) -> int:
    """Removes runs, when somebody has typed yes."""
    named = bool(given.names or given.state or given.older is not None)
    runs = [run for run in _matching(given) if _may_go(run) and (run.disposable or (named and run.ranks is not None))]
    if not runs:
        print("There is nothing to remove." + ("" if named else " HINT: names, --state or --older say which runs are meant."))
        return 0
    _print_table(runs)
    kept = sum(run.checkpoints for run in runs)
    what = f"{len(runs)} run{'s' * (len(runs) > 1)} with {kept} checkpoint{'s' * (kept != 1)}"
    print(f"Remove {what}, {_size(sum(run.size for run in runs))}? There is no way back. Type yes: ", end="", flush=True)
    if sys.stdin.readline().strip() != "yes":
        print("Nothing is removed.")
        return 1
    for run in runs:
        print(printable(f"{run.name}: {_remove(run.folder)}"))
    return 0


def _may_go(run: Listed) -> bool:
    own = not run.folder.is_symlink() and run.folder.stat().st_uid == os.geteuid()
    return own and run.state != "running" and run.age >= _SILENT and not any(map(held, run.folder.glob("*/.lock")))


def _remove(folder: Path) -> str:
    """Removes a run's folder, unless somebody has begun to train in it since it was listed; returns what was done."""
    if not _may_go(read_run(folder)):
        return "kept: it has shown a sign of life"
    try:
        with os.fdopen(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600), "r+b") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Under another name: who starts a run of this name now makes a folder of its own.
            gone = folder.rename(folder.with_name(f".{secrets.token_hex(4)}.{folder.name}"))
    except BlockingIOError:
        return "kept: it is in training"
    except OSError as error:
        return f"kept: {error}"
    try:
        shutil.rmtree(gone)
    except OSError as error:
        return f"not all of it can be removed: {error}. What is left lies in {gone}"
    return "removed"
