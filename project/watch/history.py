"""What a run has left in its folder, read again: its starts and stops, its curves, its configuration, its checkpoints, its
warnings. Nothing is imported that a login node would have to wait for, and nothing is changed.
"""

import fcntl
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from project.masking import masked, masked_text
from project.untrusted import parse_json, parse_yaml, read_json, read_text

FILE = "life.jsonl"
BESIDE = ("run", "resume", "change", "base", "doctor", "debug")
"""Settings that say nothing of what is trained."""
PHASES = ("data_wait", "forward", "backward", "gradient_sync", "optimizer", "rest")
"""Of a step; their shares are curves under speed/."""
OURS = ("speed/", "ranks/", "run/")
"""What the curves that are not the module's begin with."""
SKIPPED = "train/skipped_steps"
"""The curve of steps that were left out, as they were not finite."""
_SAID = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (WARNING|ERROR|CRITICAL) +(.*)$")

_LONGEST = 1 << 28  # bytes of a log that is read


@dataclass(frozen=True)
class Point:
    """A value of a curve."""

    step: int
    value: float
    time: float


@dataclass
class Life:
    """From a start to the stop, or to where the trace ends."""

    time: float
    step: int
    ranks: int
    known: Mapping[str, Any]
    """What else was written down at the start."""
    end: float
    """When it stopped; of a life that was cut off, when it was last seen."""
    end_step: int
    state: str = "killed"
    why: str | None = None

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.time)


@dataclass
class History:
    """Of one run."""

    name: str
    folder: Path
    lives: list[Life]
    curves: dict[str, list[Point]]
    config: dict[str, Any]
    config_text: str
    checkpoints: list[tuple[Path, dict[str, Any]]]
    """Manifests, the newest first."""
    said: list[tuple[str, str, str]] = field(default_factory=list)
    """Warnings and errors of the log: time, level and text."""

    @property
    def state(self) -> str:
        return self.lives[-1].state if self.lives else "not started"

    @property
    def step(self) -> int:
        return self.lives[-1].end_step if self.lives else 0

    @property
    def global_batch(self) -> int | None:
        known = [one.known.get("global_batch") for one in self.lives]
        return known[-1] if known else None

    @property
    def seconds(self) -> float:
        """That it was alive, over all its lives."""
        return sum(one.seconds for one in self.lives)

    def hours(self, time: float) -> float:
        """Of life, until a moment."""
        past = 0.0
        for one in self.lives:
            if time <= one.end:
                return (past + max(0.0, time - one.time)) / 3600
            past += one.seconds
        return past / 3600

    def last(self, tag: str) -> float | None:
        found = self.curves.get(tag)
        return found[-1].value if found else None

    def usual(self, tag: str) -> float | None:
        """The median of the last life in which speed was measured."""
        times = [point.time for point in self.curves.get("speed/samples_per_s", ())]
        since = max((one.time for one in self.lives if times and one.time <= times[-1]), default=0.0)
        found = [point.value for point in self.curves.get(tag, ()) if point.time >= since]
        return median(found) if found else None

    @property
    def shares(self) -> dict[str, float]:
        """Of a step, by what it was spent in."""
        found = {name: self.usual(f"speed/{name}") for name in PHASES}
        return {name: share for name, share in found.items() if share is not None}

    def summary(self) -> dict[str, Any]:
        """For programs."""
        newest = self.checkpoints[0] if self.checkpoints else None
        last = self.lives[-1] if self.lives else None
        return {
            "run": self.name,
            "state": self.state,
            "why": last.why if last else None,
            "step": self.step,
            "samples": self.step * self.global_batch if self.global_batch else None,
            "seconds": round(self.seconds, 3),
            "starts": len(self.lives),
            "ranks": last.ranks if last else None,
            "hosts": last.known.get("hosts") if last else None,
            "samples_per_s": self.usual("speed/samples_per_s"),
            "shares": self.shares,
            "metrics": {tag: points[-1].value for tag, points in self.curves.items() if not tag.startswith(OURS)},
            "checkpoint": str(newest[0].relative_to(self.folder)) if newest else None,
            "lives": [
                {
                    **{"time": one.time, "end": one.end, "step": one.step, "end_step": one.end_step, "ranks": one.ranks},
                    **{"state": one.state, "why": one.why},
                    **one.known,
                }
                for one in self.lives
            ],
        }


def read_history(folder: Path, name: str, goes_on: bool = False) -> History:
    """Of the run in this folder. `goes_on`: a process is at it."""
    curves = _curves(folder)
    seen = [(point.time, point.step) for points in curves.values() for point in points]
    lives = lives_of(folder / FILE, seen)
    if lives and goes_on and lives[-1].state == "killed":
        lives[-1].state = "going on"
    text = _text(folder / "config.yaml")
    try:
        config = masked(parsed := parse_yaml(text))
        text = text if config == parsed else yaml.safe_dump(config, sort_keys=False)
    except (yaml.YAMLError, ValueError):
        config, text = {}, masked_text(text)
    checkpoints = [(path.with_suffix(".ckpt"), _json(path)) for path in sorted(folder.glob("checkpoints/step-*.json"))[::-1]]
    known = [(path, manifest) for path, manifest in checkpoints if path.exists() and manifest]
    said = [found.groups() for line in _text(folder / "log.txt").splitlines() if (found := _SAID.match(line))]
    return History(
        *(name, folder, lives, curves, config if isinstance(config, dict) else {}, text, known),
        said=[(str(when), str(level), str(words)) for when, level, words in said],
    )


def lives_of(path: Path, seen: Sequence[tuple[float, int]] = ()) -> list[Life]:
    """`seen`: when, and at which step, the run has left something."""
    lives: list[Life] = []
    for line in _text(path).splitlines():
        try:
            entry = parse_json(line)
            event, time, step = entry.pop("event"), float(entry.pop("time")), entry.pop("step")
            if event == "start":
                lives.append(Life(time, int(step), int(entry.pop("ranks")), entry, time, int(step)))
            elif lives:
                life = lives[-1]
                life.end, life.state, life.why = time, str(entry["state"]), entry["why"]
                life.end_step = life.step if step is None else int(step)  # None: from a warden, which knows no steps
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # half a line, which a kill or a full disk has left
    for life, until in zip(lives, [*(one.time for one in lives[1:]), float("inf")], strict=False):
        if life.state == "killed":
            of_it = [one for one in seen if life.time <= one[0] < until]
            life.end = max([life.end, *(time for time, _ in of_it)])
            life.end_step = max([life.end_step, *(step for _, step in of_it)])
    return lives


def _curves(folder: Path) -> dict[str, list[Point]]:
    """Of TensorBoard's events, as TensorBoard shows them: what a run that went on has taken back is left out."""
    events = Events(folder)
    return {tag: [Point(one.step, one.value, one.wall_time) for one in events.scalars(tag)] for tag in events.read()}


class Events:
    """TensorBoard's reader of a folder. `keep`: values of each curve, the newest and others by chance; 0: all."""

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self._folder, self._keep = folder, keep
        self._found: Any = None

    def read(self) -> list[str]:
        """What is new since it was called last. The names of all curves."""
        if self._found is None and not any(self._folder.glob("events.out.tfevents.*")):
            return []
        quiet, logging.root.manager.disable = logging.root.manager.disable, logging.WARNING
        try:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

            self._found = self._found or EventAccumulator(str(self._folder), size_guidance={"scalars": self._keep})
            self._found.Reload()
        finally:
            logging.root.manager.disable = quiet
        return list(self._found.Tags()["scalars"])

    def scalars(self, tag: str) -> Sequence[Any]:
        return self._found.Scalars(tag) if self._found else ()


def held(lock: Path) -> bool:
    """Whether a process writes to the run's folder; never asked by that process, whose lock would be lost by it."""
    try:
        with lock.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _text(path: Path) -> str:
    try:
        return read_text(path, _LONGEST, errors="replace")
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def longest(shares: Mapping[str, float]) -> str:
    """The part that most of a step goes into, in three words."""
    name = max(shares, key=lambda one: shares[one])
    return f"{shares[name]:.0%} {name.replace('_', ' ')}"


def date(time: float) -> str:
    """In this machine's time zone."""
    return f"{datetime.fromtimestamp(time):%Y-%m-%d %H:%M:%S}"
