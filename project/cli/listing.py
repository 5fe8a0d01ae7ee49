"""Reads what a list of runs shows of each: its state, age, ranks, steps, metric, size and hosts, from its folder alone.

No curves are read, so that a thousand runs are listed in seconds. Nothing is imported that a login node would have to wait for.
"""

import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import yaml

from project.step.monitored import chosen_metric
from project.untrusted import LARGEST_COUNT, as_count, read_end, read_json, read_yaml
from project.watch.history import FILE, held, lives_of

STATES = ("running", "finished", "stopped", "failed", "lost", "empty")
"""A run that was killed is lost: nobody has written down how it ended. An empty one has never begun to train."""
FRESH = 120.0
"""Seconds without a sign of life, after which a run that nobody here holds is taken for dead."""
_SIGNS = (".lock", FILE, "config.yaml", "log.txt", "checkpoints")
_DISPOSABLE = (
    *(
        ".lock",
        "config*.yaml",
        "*.log",
        "log*.txt",
        "hang-rank*.txt",
        "events.out.*",
        "*.jsonl",
        "loggers.json",
        "notified.json",
    ),
    *("report.html", "summary.json", "checkpoints"),
)
"""The files of a run that has trained nothing; a folder with others in it holds a result."""
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
    """Yields the runs in a folder, in the order of their names; what is no run is passed over."""
    with suppress(FileNotFoundError):
        for folder in sorted(runs.iterdir()):
            with suppress(OSError):  # it is being removed, or may not be read
                if not folder.name.startswith(".") and any((folder / sign).exists() for sign in _SIGNS):
                    yield read_run(folder)


def read_run(folder: Path) -> Listed:
    """Reads one run's folder."""
    size, newest = _size_and_newest(folder)
    lives = lives_of(folder / FILE)
    life = lives[-1] if lives else None
    running = held(folder / ".lock") or (life is not None and life.state == "killed" and time.time() - newest < FRESH)
    state = "running" if running else "empty" if life is None else "lost" if life.state == "killed" else life.state
    manifests = _manifests(folder)
    step = max([_last_step(folder), *(life.end_step for life in lives[-1:]), *manifests])
    of: int | None = life.known.get("of") if life else None
    names = {path.name for path in folder.iterdir()}
    figures = not (folder / FILE).exists() and any(folder.glob("events.out.*"))  # an evaluation's are in there alone
    traces = all(any(fnmatch(name, pattern) for pattern in _DISPOSABLE) for name in names)
    return Listed(
        folder=folder,
        state=state,
        seen=newest,
        ranks=life.ranks if life else None,
        step=step,
        of=of,
        metric=_best(folder, manifests),
        size=size,
        hosts=tuple(life.known.get("hosts", ())) if life else (),
        checkpoints=len([*folder.glob("checkpoints/*.ckpt")]),
        disposable=not running and not step and traces and not any(folder.glob("checkpoints/*")) and not figures,
    )


def _size_and_newest(folder: Path) -> tuple[int, float]:
    """Returns the bytes of all files below a folder, and when the newest of them was written."""
    size, newest = 0, folder.stat().st_mtime
    for place, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                status = os.lstat(os.path.join(place, file))
                size += status.st_size
                newest = max(newest, status.st_mtime)
    return size, newest


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


def _best(folder: Path, manifests: Mapping[int, Mapping[str, object]]) -> tuple[str, float] | None:
    """Returns the best value of the monitored metric among the checkpoints; without any, the last one of the summary."""
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
    return (str(name), max(values) if mode == "max" else min(values)) if values else None
