"""The history of a run, read from its folder: its starts and stops, its curves, its configuration, its checkpoints, its
warnings. Nothing is imported that a login node would have to wait for, and nothing is changed. The folder may be somebody
else's: no link is followed, and only so much is read of a file.
"""

import fcntl
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import accumulate
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from project.cluster.place import host, process_started
from project.cluster.settings import flat
from project.errors import SMALLER_BATCH
from project.masking import masked, masked_text
from project.step.monitored import chosen_metric
from project.untrusted import (
    LONGEST_CAUSE,
    as_count,
    as_text,
    as_time,
    dump_yaml,
    parse_json,
    parse_yaml,
    read_json,
    read_text,
)
from project.watch.curves import OURS, Curves, Picture, Point
from project.watch.run_files import LOG, READ, end_of

FILE = "life.jsonl"
BESIDE = ("run", "resume", "change", "base", "doctor", "debug")
"""The settings that do not affect what is trained."""
PHASES = {
    "data_wait": ("waiting for data", 1),
    "forward": ("forwards", 2),
    "backward": ("backwards", 0),
    "gradient_sync": ("waiting for other ranks' gradients", 4),
    "optimizer": ("the optimiser's step", 5),
    "rest": ("the rest", 7),
}
"""The phases of a step, whose shares are curves under speed/, with their names and colours in a report."""
SKIPPED = "train/skipped_steps"
"""The curve of steps that were left out, as they were not finite."""
_SAID = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (WARNING|ERROR|CRITICAL) +(.*)$", re.MULTILINE)
_STATES = ("finished", "stopped", "failed", "killed")
KEPT = 2_000  # points of a curve, about, of which a page draws some hundred
_RECENT = 1_000  # measurements that a median is of
_SETTINGS, _COMMAND = 1_000, 4_000  # names, and characters

# The newest of what a folder holds: bytes of a log and of starts and stops; starts; warnings; bytes of a configuration.
_LOG, _LIVES, _STARTS, _WARNINGS, _CONFIG = 1 << 24, 1 << 21, 1_000, 10_000, 1 << 20
_MOST_RANKS = 1_000_000
FRESH = 120.0
"""Seconds without a sign of life, after which a run of another host that nobody here holds is taken for dead."""
_CLOCK = 60.0  # seconds, by which a clock may have been set since a start
_TRACEBACK = 4_000  # characters
_STEP = re.compile(r"step-(\d{1,18})", re.ASCII)
_HINT, _NAMED = " HINT:", 80  # characters of a cause by which an entry of the log names it
_HINTS = (
    (re.compile(r"\bOutOfMemoryError\b"), SMALLER_BATCH),
    (
        re.compile(r"\bkilled by signal 9\b"),
        "a person, a scheduler, or the kernel for want of memory has killed it: see the scheduler's log, and the host's dmesg.",
    ),
)
"""The hints for causes that carry none in the log of rank 0."""
_ENTRY = re.compile(r"^(?=\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z])", re.MULTILINE)
_FAULTS = ("ERROR", "CRITICAL")


@dataclass
class Life:
    """A life of a run: from a start to the stop, or to where the trace ends."""

    time: float
    step: int
    ranks: int
    known: Mapping[str, Any]
    """The other entries of the start."""
    end: float
    """The time of the stop; of a life that was cut off, the last sign of it."""
    end_step: int
    cut_off: bool = True
    """Whether the step of its end is known only by the signs that it has left."""
    state: str = "killed"
    why: str | None = None
    where: str = ""
    """File and line of the user's code in which an error was raised."""
    traceback: str = ""
    moment: str = ""
    """Where in the run the error was raised: in which step, or after which one."""

    @property
    def began(self) -> float:
        """Returns when its first process was started: the first step comes later."""
        return min(float(self.known.get("began") or self.time), self.time)

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.time)

    @property
    def badge(self) -> str:
        """Returns the state in the words of schedulers. A run is lost when its trace ends and nothing tells why."""
        return {"going on": "running", "killed": "failed" if self.why else "lost"}.get(self.state, self.state)


@dataclass
class History:
    """The history of one run."""

    name: str
    folder: Path
    lives: list[Life]
    curves: dict[str, list[Point]]
    config: dict[str, Any]
    config_text: str
    checkpoint: Path | None
    """The newest one."""
    warnings: list[tuple[str, str, str]] = field(default_factory=list)
    """Warnings and errors of the log: time, level and text."""
    pictures: dict[str, Picture] = field(default_factory=dict)
    """The newest of each name."""
    earlier: int = 0
    """Starts of other runs, which have written to this folder before."""

    @property
    def state(self) -> str:
        return self.lives[-1].state if self.lives else "not started"

    @property
    def badge(self) -> str:
        """Returns the last life's state in the words of schedulers."""
        return self.lives[-1].badge if self.lives else self.state

    @property
    def chosen(self) -> dict[str, Any] | None:
        """Returns the settings that are not the defaults, by their dotted names; None of a run that has not noted them."""
        changed = self.lives[-1].known.get("changed") if self.lives else None
        settings = {name: value for name, value in flat(self.config).items() if name not in BESIDE}
        return None if changed is None else {name: settings[name] for name in changed if name in settings}

    @property
    def step(self) -> int:
        return self.lives[-1].end_step if self.lives else 0

    @property
    def global_batch(self) -> int | None:
        return self.lives[-1].known.get("global_batch") if self.lives else None

    def samples(self, step: int) -> int | None:
        """Returns the samples of the first steps, as far as known: the last step of an epoch may be short."""
        if not self.lives or not self.global_batch:
            return None
        steps, samples = (self.lives[-1].known.get(name) for name in ("epoch_steps", "epoch_samples"))
        epochs, rest = divmod(step, steps) if steps and samples else (0, step)
        return epochs * (samples or 0) + rest * self.global_batch

    @property
    def seconds(self) -> float:
        """Returns the seconds that the run was alive, over all its lives."""
        return sum(life.seconds for life in self.lives)

    @cached_property
    def _clock(self) -> tuple[list[float], list[float]]:
        """Returns when each life was over, and how long the ones before it had lasted."""
        ends = [*accumulate((life.end for life in self.lives), max)]
        return ends, [0.0, *accumulate(life.seconds for life in self.lives)]

    def hours(self, time: float) -> float:
        """Returns the hours of life until a moment."""
        ends, past = self._clock
        at = bisect_left(ends, time)
        return (past[at] + (max(0.0, time - self.lives[at].time) if at < len(ends) else 0.0)) / 3600

    def recent_median(self, tag: str) -> float | None:
        """Returns the median of a curve's last values in the last life in which speed was measured."""
        times = [point.time for point in self.curves.get("speed/samples_per_s", ())]
        since = max((life.time for life in self.lives if times and life.time <= times[-1]), default=0.0)
        values = [point.value for point in self.curves.get(tag, ()) if point.time >= since]
        return median(values[-_RECENT:]) if values else None

    @cached_property
    def monitored(self) -> tuple[str, str] | None:
        """Returns the curve by which the run is judged, and 'max' or 'min', whichever is better; None where there is none."""
        return monitored_curve(self.lives[-1], self.curves) if self.lives else None

    @cached_property
    def best(self) -> Point | None:
        """Returns the best point of that curve so far."""
        return best_point(self.curves[self.monitored[0]], self.monitored[1]) if self.monitored else None

    @property
    def shares(self) -> dict[str, float]:
        """Returns the shares of a step's time, by phase."""
        medians = {name: self.recent_median(f"speed/{name}") for name in PHASES}
        return {name: share for name, share in medians.items() if share is not None}

    def summary(self) -> dict[str, object]:
        """Returns the history's figures, for programs."""
        last = self.lives[-1] if self.lives else None
        return {
            "run": self.name,
            "state": self.state,
            "why": last and last.why,
            "cause": last and last.why,
            "where": last.where if last else "",
            "traceback": last.traceback if last else "",
            "step": self.step,
            "samples": self.samples(self.step),
            "seconds": round(self.seconds, 3),
            "starts": len(self.lives),
            "ranks": last and last.ranks,
            "hosts": last and last.known.get("hosts"),
            "samples_per_s": self.recent_median("speed/samples_per_s"),
            "shares": self.shares,
            "metrics": {tag: points[-1].value for tag, points in self.curves.items() if not tag.startswith(OURS)},
            "monitored": self.monitored and self.monitored[0],
            "best": self.best and {"value": self.best.value, "step": self.best.step},
            "checkpoint": str(self.checkpoint.relative_to(self.folder)) if self.checkpoint else None,
            "lives": [
                {**{name: value for name, value in vars(life).items() if name != "known"}, **life.known} for life in self.lives
            ],
        }


def read_history(folder: Path, name: str, in_training: bool = False) -> History:
    """Reads the history of the run in this folder. `in_training`: a process is training it."""
    reader = Curves(folder, KEPT)
    curves = reader.read()
    manifests = sorted(folder.glob("checkpoints/step-*.json"), reverse=True)
    newest = next((path.with_suffix(".ckpt") for path in manifests if _is_whole(path)), None)
    seen = [*reader.starts, *((point.time, point.step) for points in curves.values() for point in points)]
    lives = lives_of(folder / FILE, seen)
    earlier, lives, curves = newest_run(folder, lives, curves)
    if lives and lives[-1].cut_off and newest and (step := _STEP.match(newest.name)):
        lives[-1].end_step = max(lives[-1].end_step, int(step[1]))
    if lives and in_training and lives[-1].state == "killed":
        lives[-1].state = "going on"
    text = ""
    try:
        config = masked(parsed := parse_yaml(text := read_text(folder / "config.yaml", _CONFIG, follow=False)))
        text = text if config == parsed else dump_yaml(config)
    except (yaml.YAMLError, OSError, ValueError):
        config, text = {}, masked_text(text)
    warnings = _SAID.findall(end_of(folder / LOG, _LOG))[-_WARNINGS:]
    config = config if isinstance(config, dict) else {}
    warnings = [entry for entry in warnings if not earlier or entry[0] >= date(lives[0].began)]
    return History(name, folder, lives, curves, config, text, newest, warnings, reader.pictures, earlier)


def lives_of(path: Path, seen: Sequence[tuple[float, int]] = ()) -> list[Life]:
    """Reads the lives of a run. `seen`: when, and at which step, the run has left something."""
    lives: list[Life] = []
    for line in end_of(path, _LIVES).splitlines():
        if '"event"' not in line:
            continue
        try:
            entry = parse_json(line)
            event, time, step = entry.pop("event"), as_time(entry.pop("time")), entry.pop("step")
            if event == "start":
                ranks = as_count(entry.pop("ranks"), 1, _MOST_RANKS)
                lives.append(Life(time, as_count(step), ranks, _known(entry), time, step))
            elif lives and entry["state"] in _STATES:
                life = lives[-1]
                why = None if entry["why"] is None else as_text(entry["why"], LONGEST_CAUSE)
                end_step = life.step if step is None else max(life.step, as_count(step))
                life.end, life.state, life.why, life.end_step = time, entry["state"], why, end_step
                life.cut_off = step is None or life.state == "killed"  # a warden's step is up to a second old
                life.where = as_text(entry.get("where", ""), LONGEST_CAUSE)
                life.traceback = as_text(entry.get("traceback", ""), _TRACEBACK)
                life.moment = as_text(entry.get("moment", life.moment))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # half a line, which a kill or a full disk has left; or somebody else's
    lives, seen = lives[-_STARTS:], sorted(seen)
    # What a start logs again before its first step is no sign of the life before. A spare process may be older than its end.
    for life, following in zip(lives, [*lives[1:], None], strict=False):
        until = inf if following is None else max(following.began, life.end)
        before = bisect_left(seen, (until,))
        if life.cut_off and before > bisect_left(seen, (life.time,)):
            time, step = seen[before - 1]
            life.end, life.end_step = max(life.end, time), max(life.end_step, step)
        if life.cut_off and following is not None:  # which resumes from what was saved before
            life.end_step = max(life.end_step, following.step)
        if following is not None and following.began < life.end:  # a spare process, which has waited for this
            following.known = {**following.known, "began": life.end}
    return lives


def newest_run(
    folder: Path, lives: list[Life], curves: dict[str, list[Point]]
) -> tuple[int, list[Life], dict[str, list[Point]]]:
    """Returns how many starts of earlier runs a folder has, and the lives and the curves of its newest run. Only Python gives
    one folder (`default_root_dir`) to several runs: each of its fits that begins at step 0 is another one.
    """
    begins = [at for at in range(1, len(lives)) if lives[at].step == 0 < lives[at - 1].end_step]
    if not begins or (folder / "config.yaml").exists():
        return 0, lives, curves
    since = lives[begins[-1]].time
    known = {tag: [point for point in points if point.time >= since] for tag, points in curves.items()}
    return begins[-1], lives[begins[-1] :], {tag: points for tag, points in known.items() if points}


def _known(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the other entries of a start, checked one by one."""
    known: dict[str, Any] = {
        name: as_text(value, _COMMAND if name == "command" else 500) if isinstance(value, str) else value
        for name, value in entry.items()
        if value is None or isinstance(value, (str, int, float))
    }
    if entry.get("began") is not None:
        as_time(entry["began"])
    for name in ("of", "global_batch", "epoch_steps", "epoch_samples"):
        if entry.get(name) is not None:
            as_count(entry[name])
    if "hosts" in entry:
        known["hosts"] = {as_text(host): as_count(ranks) for host, ranks in entry["hosts"].items()}
    if "versions" in entry:
        known["versions"] = {as_text(name): as_text(value) for name, value in entry["versions"].items()}
    if isinstance(entry.get("changed"), list):
        known["changed"] = [as_text(name) for name in entry["changed"][:_SETTINGS]]
    return known


def held(lock: Path) -> bool:
    """Returns whether a process writes to the run's folder. That process must not call it: its lock would be lost."""
    try:
        with os.fdopen(os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK), "r+b", buffering=0) as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def shows_life(life: Life, silence: float) -> bool:
    """Returns whether a run without a recorded end may still train. `silence`: seconds since the last sign of it."""
    return silence < FRESH and not _has_ended(life)


def _has_ended(life: Life) -> bool:
    """Returns whether rank 0's process is gone, where this host can tell: a later one may have its number."""
    pid, hosts = life.known.get("pid"), life.known.get("hosts") or {"": 1}
    if next(iter(hosts)) != host() or not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
        return process_started(pid) > life.time + _CLOCK
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False


def _is_whole(manifest: Path) -> bool:
    """Returns whether a checkpoint and its manifest exist."""
    with suppress(OSError, ValueError):
        return manifest.with_suffix(".ckpt").exists() and bool(read_json(manifest, follow=False))
    return False


def longest(shares: Mapping[str, float]) -> str:
    """Returns the phase that most of a step goes into, with its share."""
    name = max(shares, key=lambda phase: shares[phase])
    return f"{shares[name]:.0%} {name.replace('_', ' ')}"


def monitored_curve(life: Life, curves: Iterable[str]) -> tuple[str, str] | None:
    """Returns the curve by which a run is judged that has come so far, and 'max' or 'min', whichever is better."""
    monitor, mode = chosen_metric(
        str(life.known.get("monitor", "auto")), str(life.known.get("mode", "max")), names := {*curves}
    )
    return (monitor, mode) if monitor in names and monitor is not None else None


def best_point(points: Sequence[Point], mode: str) -> Point | None:
    """Returns the point with the highest value, or the lowest; of equals, the first. What is not finite is none."""
    finite = [point for point in points if isfinite(point.value)]
    return (max if mode == "max" else min)(finite, key=lambda point: point.value, default=None)


def of_the_module(tag: str) -> bool:
    """Returns whether the module has logged a curve."""
    return not tag.startswith(OURS) and tag not in ("epoch", SKIPPED, "train/fp16_skipped_steps")


def date(time: float) -> str:
    """Returns the text of a time, in this machine's time zone."""
    return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"


def hint_of(history: History) -> str:
    """Returns what mends the cause of a run's end, by the error in its log that names this cause, or else by the
    cause's kind; nothing where neither does.
    """
    last = history.lives[-1]
    if _HINT in (last.why or ""):
        return (last.why or "").partition(_HINT)[2].strip()
    entries = [] if not last.why else _ENTRY.split(end_of(history.folder / LOG, READ))
    cause = str(last.why).rpartition(" has failed: ")[2]  # without its rank, which the log has elsewhere
    named = [text for text in entries if _HINT in text and cause[:_NAMED] in text and text[24:].startswith(_FAULTS)]
    if named:
        return named[-1].rpartition(_HINT)[2].partition("\n")[0].strip()
    return next((hint for pattern, hint in _HINTS if pattern.search(last.why or "")), "")
