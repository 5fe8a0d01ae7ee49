"""A sweep: a YAML like configs/sweeps/lr.yaml lists which values keys are to have. Trial N of it is a run like any other.

It is a function of this file and of its number: the same on Slurm, on Ray and by hand. Imports nothing heavy.
"""

import argparse
import itertools
import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import yaml

from project.config_files import checked, find, option, without
from project.errors import UserError
from project.untrusted import read_yaml

_KNOWN = ("samples", "seed", "metric", "mode", "together", "stop_early", "keys")
_DRAWN = {
    "uniform": "[LOW, HIGH]",
    "loguniform": "[LOW, HIGH], both greater than 0",
    "randint": "[LOW, HIGH], whole numbers",
    "choice": "a list of values",
}
_TAKEN = ("run", "resume", "config", "base", "ckpt_path", "sweep", "trial")


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep's file; the keys of all its trials, in their order."""

    file: str
    trials: list[dict[str, object]]
    extremes: dict[str, list[object]]
    """The values of each key that tell whether it can have them all."""
    metric: str
    """Empty where the file names none."""
    mode: str
    together: int | None
    """At most so many trials at once; None: as many as there is room for."""
    stop_early: tuple[int, int] | None
    """ASHA: after so many validations, of the trials that came as far only one in so many continues."""

    def words(self, number: int) -> list[str]:
        """Returns the flags of trial `number`; the first is 1."""
        last = len(self.trials)
        if not 1 <= number <= last:
            raise UserError(f"{self.file} has the trials 1 to {last}, and no {number}. HINT: sbatch --array=1-{last}")
        return [flag(key, value) for key, value in self.trials[number - 1].items()]


def flag(key: str, value: object) -> str:
    """Returns a key and its value as a flag of the command line."""
    return f"--{key}={value if isinstance(value, str) else json.dumps(value)}"


def read_sweep(file: str) -> Sweep:
    """Reads the sweep of a YAML; a UserError names what is wrong with it."""
    try:
        content = read_yaml(find(file, None))
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    try:
        return _sweep(file, content)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _sweep(file: str, content: object) -> Sweep:
    if not isinstance(content, dict) or not isinstance(keys := content.get("keys"), dict) or not keys:
        raise UserError("a sweep says under 'keys' which values keys of the YAML are to have. HINT: see configs/sweeps/lr.yaml")
    if unknown := [str(key) for key in content if key not in _KNOWN]:
        raise UserError(f"a sweep has no {', '.join(unknown)}. HINT: it has {', '.join(_KNOWN)}")
    samples, mode, early = content.get("samples", 1), content.get("mode", "max"), content.get("stop_early", True)
    if mode not in ("max", "min"):
        raise UserError(f"mode is max or min, and not {mode!r}.")
    if not isinstance(early, (bool, dict, type(None))) or (isinstance(early, dict) and not early.keys() <= {"after", "factor"}):
        raise UserError(f"stop_early is true, false, or {{after: VALIDATIONS, factor: N}}, and not {early!r}.")
    after, factor = ({"after": 1, "factor": 3} | (early if isinstance(early, dict) else {})).values()
    together = content.get("together")
    numbers = (("samples", samples, 1), ("stop_early.after", after, 1), ("stop_early.factor", factor, 2))
    for name, value, least in (*numbers, ("together", 1 if together is None else together, 1)):
        if type(value) is not int or value < least:
            raise UserError(f"{name} is a number from {least} on, and not {value!r}.")
    for key, value in keys.items():
        _check(str(key), value)
    if samples > 1 and all(isinstance(value, list) for value in keys.values()):
        raise UserError(f"samples={samples}, and no key is drawn. HINT: leave samples out; each value of a list has its trial.")
    lists = {key: value for key, value in keys.items() if isinstance(value, list)}
    trials = []
    for number, values in enumerate([*itertools.product(*lists.values())] * samples, 1):
        listed = dict(zip(lists, values, strict=True))
        # A generator for each key and trial: another key, or one more sample, keeps what is drawn already.
        draws = {key: random.Random(f"{content.get('seed', 0)} {key} {number}") for key in keys}
        trials.append({key: listed[key] if key in listed else _draw(draws[key], keys[key]) for key in keys})
    extremes = {key: value if key in lists else next(iter(value.values())) for key, value in keys.items()}
    stop_early = (after, factor) if early or early == {} else None
    return Sweep(file, trials, extremes, content.get("metric") or "", mode, together, stop_early)


def _check(key: str, value: object) -> None:
    """Refuses a key, or values of it, that can't be."""
    if key.split(".")[0] in _TAKEN:
        raise UserError(f"{key} can't be tried: each trial has its own, or all have the same.")
    if isinstance(value, list):
        if not value:
            raise UserError(f"{key} has no values.")
        return
    way, ends = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", value)
    if way not in _DRAWN:
        raise UserError(
            f"{key} has {value!r}. HINT: a list of values, or one of {', '.join(_DRAWN)}, as in {{loguniform: [0.01, 1]}}"
        )
    kinds = {"choice": (object,), "randint": (int,)}.get(way, (int, float))
    values = ends if isinstance(ends, list) else []
    right = bool(values) and all(isinstance(end, kinds) for end in values)
    if way != "choice":
        right = right and len(values) == 2 and -math.inf < values[0] <= values[1] < math.inf and bool not in map(type, values)
    if not right or (way == "loguniform" and values[0] <= 0):
        raise UserError(f"{key}: {way} takes {_DRAWN[way]}, and not {ends!r}. HINT: 1.0e-3 is a number in YAML, 1e-3 is not")


def _draw(rng: random.Random, drawn: dict[str, list[object]]) -> object:
    """Returns a value, rounded so that it can be read, and typed."""
    ((way, ends),) = drawn.items()
    if way == "choice":
        return rng.choice(ends)
    if way == "randint":
        return rng.randint(*cast(list[int], ends))
    low, high = cast(list[float], ends)
    number = rng.uniform(low, high) if way == "uniform" else math.exp(rng.uniform(math.log(low), math.log(high)))
    return float(f"{number:.4g}")


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
        "python -m project sweep", description="Lists the trials of a sweep; fit --sweep FILE --trial N trains one of them."
    )
    parser.add_argument("file", help="a sweep's YAML, as configs/sweeps/lr.yaml")
    sweep = read_sweep(parser.parse_args(words).file)
    for number in range(1, len(sweep.trials) + 1):
        print(f"{number:4}  {'  '.join(argument.removeprefix('--') for argument in sweep.words(number))}")
    return 0
