"""python -m project ray fit --config configs/ddp.yaml --workers 2: Ray starts the training, and looks after it.

Loads neither torch nor, before the words are read, Ray.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from project.config_files import RUNS, checked, documents, expand, option
from project.errors import UserError
from project.sweep import with_trial

_ABOUT = (
    "Ray starts the training, and looks after it: on the cluster at --address or RAY_ADDRESS, else on one of its own on this "
    "machine. All other words are those of 'python -m project fit'."
)
_PLACES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class Asked:
    """What the command line wants."""

    words: list[str]
    """The child's: fit, and all that is not Ray's; with the name of the run."""
    run: str
    checkpoints: Path
    workers: int
    least: int
    cpus: float
    gpus: float | None
    """For each worker; None: one where the cluster has any."""
    failures: int
    address: str | None
    storage: str | None
    placement: str
    grace: float
    search: Path | None
    cwd: Path

    @property
    def folder(self) -> Path:
        """The run's."""
        return self.checkpoints.parent


def main(words: Sequence[str]) -> int:
    """Runs it, and returns the exit code: the training's."""
    try:
        asked = read(words)
        if asked.search is not None:
            from project.engines.ray.search import search

            return search(asked)
        from project.engines.ray.fit import fit

        return fit(asked)
    except UserError as error:
        print(f"ERROR   {error}", file=sys.stderr)
        return 2


def read(words: Sequence[str]) -> Asked:
    """The command line, where it makes sense."""
    parser = argparse.ArgumentParser("python -m project ray", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("verb", choices=("fit",), help="what to run")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="how many ranks; with --tune, of each trial (1)")
    parser.add_argument("--min-workers", type=int, metavar="N", help="go on with so few, where there are no more places")
    parser.add_argument("--cpus", type=float, default=1.0, metavar="N", help="CPUs that Ray sets aside for each worker (1)")
    parser.add_argument("--gpus", type=float, metavar="N", help="GPUs for each worker (1 if the cluster has any)")
    parser.add_argument("--max-failures", type=int, default=3, metavar="N", help="starts after failures; -1: any number (3)")
    parser.add_argument("--address", metavar="HOST:PORT", help="of a Ray cluster, or auto (RAY_ADDRESS)")
    parser.add_argument(
        "--storage", metavar="PATH", help="where Ray keeps its notes; all hosts see it (ray/ in the run's folder)"
    )
    parser.add_argument("--placement", choices=_PLACES, default="PACK", help="how Ray places the workers (PACK)")
    parser.add_argument(
        "--grace", type=float, metavar="SECONDS", help="from a signal to SIGKILL: what a checkpoint may take (300)"
    )
    parser.add_argument("--tune", metavar="SPACE.yaml", help="a search: docs/ray.md")
    given, rest = parser.parse_known_args(words)
    if given.tune and option(rest, "--sweep") is not None:
        parser.error("--tune trains all trials of a sweep, and --sweep one: give one of them")
    rest = with_trial(["fit", *rest])[1:]  # here, as the run's name has the trial's number
    given.workers = _number(parser, "--workers", given.workers, 1)
    least = _number(parser, "--min-workers", given.min_workers or given.workers, 1)
    if least > given.workers:
        parser.error(f"--min-workers {least} is more than --workers {given.workers}")
    if given.tune and given.min_workers:
        parser.error("--min-workers is not for --tune: a trial has as many ranks from its beginning to its end")
    for name in ("cpus", "gpus"):
        if (value := getattr(given, name)) is not None and not (value >= 0 and math.isfinite(value)):
            parser.error(f"--{name} is a number from 0 on, not {value:g}")
    if given.max_failures < -1:
        parser.error("--max-failures is a number from 0 on, or -1 for any number")
    grace = given.grace if given.grace is not None else float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300"))
    name = option(rest, "--run") or f"{_stem(rest)}-{datetime.now():%Y%m%d-%H%M%S}"
    rest = rest if option(rest, "--run") else [*rest, "--run", name]
    return Asked(
        words=["fit", *rest],
        run=checked(name),
        checkpoints=(_root(rest) / RUNS / name / "checkpoints").absolute(),
        workers=given.workers,
        least=least,
        cpus=given.cpus,
        gpus=given.gpus,
        failures=given.max_failures,
        address=given.address or os.environ.get("RAY_ADDRESS"),
        storage=given.storage,
        placement=given.placement,
        grace=grace,
        search=Path(given.tune) if given.tune else None,
        cwd=Path.cwd(),
    )


def _number(parser: argparse.ArgumentParser, name: str, value: int, least: int) -> int:
    if value < least:
        parser.error(f"{name} is a number from {least} on, not {value}")
    return value


def _stem(words: list[str]) -> str:
    return Path(option(words, "-c", "--config") or "fit").stem


def _root(words: list[str]) -> Path:
    """Where runs land: trainer.default_root_dir, as the words and the configs have it."""
    if (flag := option(words, "--trainer.default_root_dir")) is not None:
        return Path(flag)
    trainers: list[Any] = [one["trainer"] for one in documents(expand(words)) if isinstance(one.get("trainer"), dict)]
    found = next((one["default_root_dir"] for one in reversed(trainers) if one.get("default_root_dir")), None)
    return Path(found or ".")
