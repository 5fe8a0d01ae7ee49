"""The verb `runs`: `python -m project runs` lists the runs in lightning_logs, and removes runs.

It reads the files in the runs' folders alone, and no curves, so that a thousand runs are listed in seconds. What it removes it
lists first, and asks; it never touches a run in training.
"""

import fcntl
import json
import math
import os
import re
import secrets
import shutil
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from project.config_files import RUNS
from project.step.monitored import chosen_metric
from project.tables import fit_table
from project.untrusted import LARGEST_COUNT, as_count, printable, read_end, read_json, read_yaml
from project.watch.charts import number
from project.watch.history import FILE, held, lives_of, shows_life

_ABOUT = f"""Lists the runs in {RUNS}/: their state, the time since the last sign of life, ranks, steps, the best value of the
metric that is monitored, size on disk and hosts. Exit code 1: none is there, or matches."""
_CLEAN = """remove what nobody needs, after asking: runs that have trained nothing, or, with names, --state or --older, those
that match. Never a run in training, nor one that has shown a sign of life within the hour"""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SILENT = 3600.0
"""Seconds without a sign of life after which a run may be removed: one that is about to start holds nothing yet."""
STATES = ("running", "finished", "stopped", "failed", "lost", "empty")
"""A run that was killed is lost: nobody has written down how it ended. An empty one has never begun to train."""
_SIGNS = (".lock", FILE, "config.yaml", "log.txt", "checkpoints")
_DISPOSABLE = (
    *(".lock", "config*.yaml", "*.log", "log*.txt", "hang-rank*.txt", "events.out.*", "*.jsonl", "loggers.json"),
    *("notified.json", "report.html", "summary.json", "checkpoints"),
)
"""The files of a run that has trained nothing; a folder with others in it holds a result."""
_OF_READERS = (".lock", "report.html", "summary.json", "validate-*", "test-*", "predict-*", "doctor-*", "export-*")
"""What is written, too, where a run is only read."""
_LAST = 1 << 16  # bytes, in which the last line of a file is
_STEP = re.compile(r'"step":\s?(\d{1,16})\b')


@dataclass(frozen=True)
class Listed:
    """A run, as a list shows it."""

    folder: Path
    state: str
    seen: float
    """When its folder showed a sign of life last, in seconds since 1970."""
    ranks: int | None
    step: int
    of: int | None
    """The steps that were planned."""
    metric: tuple[str, float] | None
    """The best value of the monitored metric."""
    mode: str
    """Whether the highest (max) or the lowest (min) value of it is the best."""
    size: int
    """Bytes on the disk."""
    hosts: tuple[str, ...]
    checkpoints: int
    disposable: bool
    """It has taken no step and holds nothing but the traces of a start."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def age(self) -> float:
        return max(0.0, time.time() - self.seen)


def listed(runs: Path) -> Iterator[Listed]:
    """Yields the runs in a folder, sorted by name; skips everything else."""
    with suppress(FileNotFoundError):
        for folder in sorted(runs.iterdir()):
            with suppress(OSError):  # it is being removed, or may not be read
                signs = {sign for sign in _SIGNS if (folder / sign).exists()}
                evaluates = "config.yaml" in signs and not signs & {FILE, "checkpoints"}  # which a fit has as well
                if signs and not evaluates and not folder.name.startswith("."):
                    yield read_run(folder)


def read_run(folder: Path) -> Listed:
    """Reads one run's folder."""
    size, newest = _size_and_newest(folder)
    lives = lives_of(folder / FILE)
    life = lives[-1] if lives else None
    fresh = life is not None and life.badge == "lost" and shows_life(life, time.time() - newest)
    running = fresh or held(folder / ".lock")
    state = "running" if running else "empty" if life is None else life.badge
    manifests = _manifests(folder)
    step = max([_last_step(folder), *(life.end_step for life in lives[-1:]), *manifests])
    of: int | None = life.known.get("of") if life else None
    names = {path.name for path in folder.iterdir()}
    figures = not (folder / FILE).exists() and any(folder.glob("events.out.*"))  # an evaluation's are in there alone
    traces = all(any(fnmatch(name, pattern) for pattern in _DISPOSABLE) for name in names)
    metric, mode = _best(folder, manifests)
    return Listed(
        folder=folder,
        state=state,
        seen=newest,
        ranks=life.ranks if life else None,
        step=step,
        of=of,
        metric=metric,
        mode=mode,
        size=size,
        hosts=tuple(life.known.get("hosts", ())) if life else (),
        checkpoints=len([*folder.glob("checkpoints/*.ckpt")]),
        disposable=not running and not step and traces and not any(folder.glob("checkpoints/*")) and not figures,
    )


def _size_and_newest(folder: Path) -> tuple[int, float]:
    """Returns the bytes of all files below a folder, and when the newest was written of those that training writes."""
    size, newest = 0, 0.0
    for place, _, files in os.walk(folder):
        for path in (Path(place, file) for file in files):
            with suppress(OSError):
                status = path.lstat()
                size += status.st_size
                newest = max(newest, 0.0 if is_of_readers(path.relative_to(folder).parts[0]) else status.st_mtime)
    return size, newest or folder.stat().st_mtime


def is_of_readers(name: str) -> bool:
    """Returns whether a file or folder in a run's folder is no sign of life of the run."""
    return any(fnmatch(name, pattern) for pattern in _OF_READERS)


def _manifests(folder: Path) -> dict[int, dict[str, object]]:
    """Returns the metrics that each checkpoint was saved with, by its step."""
    metrics: dict[int, dict[str, object]] = {}
    for path in folder.glob("checkpoints/step-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            manifest = read_json(path, follow=False)
            metrics[as_count(manifest["position"]["global_step"])] = dict(manifest.get("metrics") or {})
    return metrics


def _last_step(folder: Path) -> int:
    """Returns the last step that has left a fingerprint; 0 without any."""
    with suppress(OSError):
        steps = _STEP.findall(read_end(folder / "fingerprints.jsonl", _LAST))
        return min(int(steps[-1]), LARGEST_COUNT) if steps else 0
    return 0


def _best(folder: Path, manifests: Mapping[int, Mapping[str, object]]) -> tuple[tuple[str, float] | None, str]:
    """Returns the best value of the monitored metric among the checkpoints (without any, the last one of the summary), and
    whether the highest or the lowest is the best.
    """
    entries = list(manifests.values())
    if not entries:
        with suppress(OSError, ValueError, KeyError, TypeError):
            entries = [dict(read_json(folder / "summary.json", follow=False)["metrics"])]
    try:
        settings = read_yaml(folder / "config.yaml").get("checkpoints") or {}
        monitor, mode = settings.get("monitor", "auto"), settings.get("mode", "max")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        monitor, mode = "auto", "max"
    name, mode = chosen_metric(monitor, mode, {key for entry in entries for key in entry})
    known = [entry.get(name or "") for entry in entries]
    values = [float(value) for value in known if isinstance(value, (int, float)) and math.isfinite(value)]
    return (str(name), max(values) if mode == "max" else min(values)) if values else None, mode


# The verb ------------------------------------------------------------------------------------------------------------


_ORDERS: dict[str, Callable[[Listed], tuple[bool | str, float | str]]] = {
    "name": lambda run: (False, run.name),
    "state": lambda run: (False, float(STATES.index(run.state))),
    "age": lambda run: (False, run.age),
    "ranks": lambda run: (False, float(-(run.ranks or 0))),
    "steps": lambda run: (False, float(-run.step)),
    "metric": lambda run: (run.metric[0], run.metric[1] * (-1 if run.mode == "max" else 1)) if run.metric else ("\uffff", 0.0),
    "size": lambda run: (False, float(-run.size)),
    "host": lambda run: (not run.hosts, ",".join(run.hosts)),
}


def main(words: Sequence[str]) -> int:
    """Lists the runs, or removes some, and returns the exit code."""
    parser = ArgumentParser("python -m project runs", description=_ABOUT)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only runs of these names; * and ? stand for any letters")
    parser.add_argument("--state", action="append", choices=STATES, help="only runs in this state; may be given again")
    parser.add_argument("--older", type=_seconds, metavar="TIME", help="only runs without a sign of life for 30m, 12h, 7d, 4w")
    parser.add_argument("--sort", choices=list(_ORDERS), default="age", help="newest, best, most or largest first (age)")
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
            print(json.dumps({**vars(run), "folder": str(run.folder), "name": run.name, "age": round(run.age, 3)}))
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
    console = Console(width=None if sys.stdout.isatty() else 500, highlight=False)
    console.print(fit_table(table, console, ("host", "size", "ranks", "age", "metric")))


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
    """Removes runs after the user has typed `yes`."""
    named = bool(given.names or given.state or given.older is not None)
    matching = _matching(given)
    kept = {run: _why_kept(run) for run in matching}
    runs = [run for run in matching if not kept[run] and (run.disposable or (named and run.ranks is not None))]
    for run in matching if named else ():
        if kept[run]:
            print(printable(f"{run.name}: kept: {kept[run]}"))
    if not runs:
        print("There is nothing to remove." + ("" if named else " HINT: name the runs, or select them by --state or --older."))
        return 0
    _print_table(runs)
    count = sum(run.checkpoints for run in runs)
    what = f"{len(runs)} run{'s' * (len(runs) > 1)} with {count} checkpoint{'s' * (count != 1)}"
    print(f"Remove {what}, {_size(sum(run.size for run in runs))}? There is no way back. Type yes: ", end="", flush=True)
    if sys.stdin.readline().strip() != "yes":
        print("Nothing is removed.")
        return 1
    for run in runs:
        print(printable(f"{run.name}: {_remove(run.folder)}"))
    return 0


def _why_kept(run: Listed) -> str:
    """Returns why a run may not be removed, or ''."""
    if run.folder.is_symlink() or run.folder.stat().st_uid != os.geteuid():
        return "it is a link, or belongs to another user"
    if any(map(held, (run.folder / ".lock", *run.folder.glob("*/.lock")))):
        return "it is in training, or in use by another verb"
    return "" if run.age >= _SILENT else "it has shown a sign of life within the hour"


def _remove(folder: Path) -> str:
    """Removes a run's folder, unless training in it has begun since it was listed; returns a line that reports it."""
    if why := _why_kept(read_run(folder)):
        return f"kept: {why}"
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
