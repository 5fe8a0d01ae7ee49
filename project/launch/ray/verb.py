"""The verb `ray`: reads its flags, connects to Ray, and has a training or a search started there.

Loads neither torch nor, before the flags are read, Ray.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from project.config_files import RUNS, checked, documents, expand, option, setting
from project.errors import UserError
from project.launch.ray.cluster import connected, listen
from project.launch.sweep import read_sweep, with_trial


def main(words: Sequence[str]) -> int:
    """Runs the training or the search, and returns the exit code."""
    signals: list[int] = []
    try:
        options = read(words)
        sweep = read_sweep(options.tune) if options.tune else None
        if sweep and not sweep.metric:
            raise UserError(
                f"{options.tune} does not say what the trials are compared by. HINT: metric: val/acc, and mode: max or min"
            )
        listen(signals)
        with connected(options.address, math.ceil(options.workers * options.cpus)):
            listen(signals)  # Ray sets handlers of its own when it is connected
            if sweep:
                from project.launch.ray.search import search

                return search(options, sweep, signals)
            from project.launch.ray.fit import Fit

            return Fit(options, signals).run()
    except UserError as error:
        print(f"ERROR   {error}", file=sys.stderr)
        return 2


def read(words: Sequence[str]) -> argparse.Namespace:
    """Returns Ray's flags, the words that are left for `python -m project` (`words`), and the run's `name` and `folder`."""
    parser = argparse.ArgumentParser(
        "python -m project ray", allow_abbrev=False,
        description="Ray starts the training and restarts it after a failure: on the cluster at --address or RAY_ADDRESS, else "
        "on one of its own on this machine. All other words are those of 'python -m project fit'.",
    )  # fmt: skip
    add, places = parser.add_argument, ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
    grace = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")
    add("verb", choices=("fit",), help="what to run")
    add("--workers", type=_from(1), default=1, metavar="N", help="ranks; with --tune, of each trial (1)")
    add("--min-workers", type=_from(1), metavar="N", help="continue with so few ranks where there is no room for more")
    add("--cpus", type=_from(0, float), default=1.0, metavar="N", help="CPUs that Ray sets aside for each worker (1)")
    add("--gpus", type=_from(0, float), metavar="N", help="GPUs for each worker (1 if the cluster has any)")
    add("--max-failures", type=_from(-1), default=3, metavar="N", help="restarts after failures; -1: any number (3)")
    add("--address", default=os.environ.get("RAY_ADDRESS"), metavar="HOST:PORT", help="of a Ray cluster, or auto (RAY_ADDRESS)")
    add("--placement", choices=places, default="PACK", help="how Ray places the workers (PACK)")
    add("--grace", type=_from(0, float), default=grace, metavar="SECONDS", help="from a signal to SIGKILL (300)")
    add("--tune", metavar="SPACE.yaml", help="a search: docs/ray.md")
    options, rest = parser.parse_known_args(words)
    if options.tune and option(rest, "--sweep") is not None:
        parser.error("--tune trains all trials of a sweep, and --sweep one: give one of them")
    if options.tune and options.min_workers:
        parser.error("--min-workers is not for --tune: a trial has as many ranks from its beginning to its end")
    options.min_workers = options.min_workers or options.workers
    if options.min_workers > options.workers:
        parser.error(f"--min-workers {options.min_workers} is more than --workers {options.workers}")
    rest = with_trial(["fit", *rest])
    if option(rest, "--run") is None:
        rest += ["--run", f"{Path(option(rest, '-c', '--config') or 'fit').stem}-{datetime.now():%Y%m%d-%H%M%S}"]
    options.words, options.name, options.cwd = rest, checked(option(rest, "--run") or ""), os.getcwd()
    options.root = Path(str(setting(rest, documents(expand(rest)), "trainer", "default_root_dir") or ".")).absolute()
    options.folder = options.root / RUNS / options.name
    return options


def _from(least: int, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Returns a reader of finite numbers that are not less than `least`."""

    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"a number from {least} on, not {text}")
        return value

    return number
