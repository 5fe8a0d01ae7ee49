"""A sweep: one YAML lists which values keys are to have. Trial N of it is a run like any other, on every launcher.

    samples: 3                  # how often what is drawn is drawn, for each combination of the lists (1)
    seed: 0                     # of the drawing (0)
    metric: val/acc             # what trials are compared by, where an engine compares them: Ray
    mode: max                   # or min
    together: 4                 # so many at once at most
    stop_early: {after: 1, factor: 3}     # after so many validations one trial in so many continues; or false
    keys:
      data.global_batch_size: [64, 128]                       # each of these
      model.optimizer.init_args.lr: {loguniform: [0.01, 1]}   # drawn; also uniform, randint (both ends count), choice

A trial is a function of this file and of its number: the same on Slurm, on Ray and by hand. Imports nothing heavy.
"""

import argparse
import itertools
import json
import math
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from project.config_files import checked, find, option, without
from project.errors import UserError
from project.untrusted import read_yaml

_DRAWN: dict[str, Callable[[random.Random, list[Any]], Any]] = {
    "uniform": lambda rng, ends: _short(rng.uniform(*ends)),
    "loguniform": lambda rng, ends: _short(math.exp(rng.uniform(*map(math.log, ends)))),
    "randint": lambda rng, ends: rng.randint(*ends),
    "choice": lambda rng, values: rng.choice(values),
}
_TAKEN = ("run", "resume", "config", "base", "ckpt_path", "sweep", "trial")


def _short(number: float) -> float:
    """Rounds a number so that it can be read, and typed."""
    return float(f"{number:.4g}")


@dataclass(frozen=True)
class StopEarly:
    """The settings of ASHA: of the trials that came as far, only one in `factor` continues."""

    after: int = 1
    """Validations that each trial may make."""
    factor: int = 3


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep's file; the keys of all its trials, in their order."""

    file: str
    trials: list[dict[str, Any]]
    extremes: dict[str, list[Any]]
    """The values of each key that tell whether it can have them all."""
    metric: str | None = None
    mode: str = "max"
    together: int | None = None
    """At most so many trials at once; None: as many as there are places."""
    stop_early: StopEarly | None = None

    def words(self, number: int) -> list[str]:
        """Returns the flags of trial `number`; the first is 1."""
        last = len(self.trials)
        if not 1 <= number <= last:
            raise UserError(f"{self.file} has the trials 1 to {last}, and no {number}. HINT: sbatch --array=1-{last}")
        return [flag(key, value) for key, value in self.trials[number - 1].items()]


def flag(key: str, value: Any) -> str:
    """Returns a key and its value as a flag of the command line."""
    return f"--{key}={value if isinstance(value, str) else json.dumps(value)}"


def read_sweep(file: str) -> Sweep:
    """Reads the sweep of a YAML; a UserError names what is wrong with it."""
    try:
        content = read_yaml(find(file, None))
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    known = ("samples", "seed", "metric", "mode", "together", "stop_early", "keys")
    if not isinstance(content, Mapping) or not isinstance(content.get("keys"), Mapping) or not content["keys"]:
        raise UserError(
            f"{file}: a sweep says under 'keys' which values keys of the YAML are to have. HINT: see configs/sweeps/lr.yaml"
        )
    if unknown := [str(key) for key in content if key not in known]:
        raise UserError(f"{file}: a sweep has no {', '.join(unknown)}. HINT: it has {', '.join(known)}")
    if content.get("mode", "max") not in ("max", "min"):
        raise UserError(f"{file}: mode is max or min, and not {content['mode']!r}.")
    samples, seed = _whole(file, "samples", content.get("samples", 1)), content.get("seed", 0)
    together = _whole(file, "together", content["together"]) if content.get("together") is not None else None
    if taken := [str(key) for key in content["keys"] if str(key).split(".")[0] in _TAKEN]:
        raise UserError(f"{file}: {taken[0]} can't be tried: each trial has its own, or all have the same.")
    trials = _trials(file, content["keys"], samples, seed)
    extremes = {key: value if isinstance(value, list) else next(iter(value.values())) for key, value in content["keys"].items()}
    metric, mode = content.get("metric"), content.get("mode", "max")
    return Sweep(file, trials, extremes, metric, mode, together, _stop_early(file, content.get("stop_early", True)))


def _trials(file: str, keys: Mapping[str, Any], samples: int, seed: Any) -> list[dict[str, Any]]:
    """Returns the keys of each trial."""
    lists = {key: value for key, value in keys.items() if isinstance(value, list)}
    drawn = {key: _drawn(file, key, value) for key, value in keys.items() if not isinstance(value, list)}
    if empty := [key for key, values in lists.items() if not values]:
        raise UserError(f"{file}: {empty[0]} has no values.")
    if samples > 1 and not drawn:
        raise UserError(
            f"{file}: samples={samples}, and no key is drawn. HINT: leave samples out; each value of a list has its trial."
        )
    trials: list[dict[str, Any]] = []
    for _, combination in itertools.product(range(samples), itertools.product(*lists.values())):
        number = len(trials) + 1
        chosen = dict(zip(lists, combination, strict=True))
        # Of its own for each key and trial: another key, or one more sample, leaves what there is.
        chosen |= {key: draw(random.Random(f"{seed} {key} {number}")) for key, draw in drawn.items()}
        trials.append({key: chosen[key] for key in keys})
    return trials


def _whole(file: str, name: str, value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{file}: {name} is a number from {least} on, and not {value!r}.")
    return value


def _stop_early(file: str, wanted: Any) -> StopEarly | None:
    if wanted in (None, False):
        return None
    given = {} if wanted is True else wanted
    if not isinstance(given, dict) or not given.keys() <= {"after", "factor"}:
        raise UserError(f"{file}: stop_early is true, false, or {{after: VALIDATIONS, factor: N}}, and not {wanted!r}.")
    after, factor = given.get("after", 1), given.get("factor", 3)
    return StopEarly(_whole(file, "stop_early.after", after), _whole(file, "stop_early.factor", factor, 2))


def _drawn(file: str, key: str, value: Any) -> Callable[[random.Random], Any]:
    ways = ", ".join(_DRAWN)
    if not isinstance(value, Mapping) or len(value) != 1 or (way := str(next(iter(value)))) not in _DRAWN:
        raise UserError(
            f"{file}: {key} has {value!r}. HINT: a list of values, or one of {ways}, as in {{loguniform: [0.01, 1]}}"
        )
    ends = next(iter(value.values()))
    numbers = isinstance(ends, list) and all(type(end) in (int, float) and math.isfinite(end) for end in ends)
    if way == "choice":
        if not isinstance(ends, list) or not ends:
            raise UserError(f"{file}: {key}: choice takes a list of values, and not {ends!r}.")
    elif not numbers or len(ends) != 2 or ends[0] > ends[1]:
        raise UserError(
            f"{file}: {key}: {way} takes [LOW, HIGH], and not {ends!r}. HINT: 1.0e-3 is a number in YAML, 1e-3 is not"
        )
    elif way == "loguniform" and ends[0] <= 0:
        raise UserError(f"{file}: {key}: loguniform takes numbers greater than 0, and not {ends!r}.")
    elif way == "randint" and not all(isinstance(end, int) for end in ends):
        raise UserError(f"{file}: {key}: randint takes whole numbers, and not {ends!r}.")
    return lambda rng: _DRAWN[way](rng, ends)


def with_trial(argv: list[str]) -> list[str]:
    """Replaces `--sweep FILE --trial N` by the flags of that trial; in a job array of Slurm, N is the task's number.

    A run that is named gets the trial's number behind its name.
    """
    file, trial = option(argv, "--sweep"), option(argv, "--trial")
    if file is None:
        if trial is not None:
            raise UserError(f"--trial {trial}, and no --sweep says of what.")
        return argv
    if "fit" not in argv:
        raise UserError("--sweep is for fit. HINT: what a trial has left is a run, with a name of its own: --run NAME-3")
    sweep = read_sweep(file)
    number = trial if trial is not None else os.environ.get("SLURM_ARRAY_TASK_ID")
    if number is None or not number.isdigit():
        raise UserError(
            f"--sweep {file} has {len(sweep.trials)} trials; which one? HINT: --trial 1, or a job array: sbatch "
            f"--array=1-{len(sweep.trials)} scripts/slurm.sbatch --sweep {file} ..."
        )
    words = sweep.words(int(number))
    keys = [argument.removeprefix("--").partition("=")[0] for argument in words]
    if twice := [key for key in keys if option(argv, f"--{key}") is not None]:
        raise UserError(f"{twice[0]} is said twice: by {file} and by --{twice[0]}. HINT: take it out of one of them")
    rest = without(argv, "--sweep", "--trial")
    if (name := option(rest, "--run")) is not None:
        rest = [*without(rest, "--run"), "--run", f"{checked(name)}-{number}"]
    return [*rest, *words]


def main(words: Sequence[str]) -> int:
    """Prints the trials of a sweep, a line each, and returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m project sweep", description="The trials of a sweep; fit --sweep FILE --trial N trains one."
    )
    parser.add_argument("file", help="a sweep's YAML, as configs/sweeps/lr.yaml")
    try:
        sweep = read_sweep(parser.parse_args(words).file)
    except UserError as error:
        print(f"ERROR   {error}", file=sys.stderr)
        return 2
    for number in range(1, len(sweep.trials) + 1):
        print(f"{number:4}  {'  '.join(argument.removeprefix('--') for argument in sweep.words(number))}")
    return 0
