"""Which YAML files a command line names: configs, what they stand on (`base:`), and those of runs that exist.

Imports nothing heavy: it is asked before PyTorch is loaded.
"""

import os
import re
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from project.errors import UserError
from project.untrusted import read_yaml

CONFIGS = Path(__file__).parent / "configs"  # in a wheel; beside the package in a checkout
RUNS = "lightning_logs"
_NAMED = 20  # runs in an error
EVALUATING = ("validate", "test", "predict", "export")  # they look at weights that are there


def expand(argv: list[str]) -> list[str]:
    """Each `--config X` becomes `--config BASE --config X`, for the configs that X names as its base, theirs first."""
    expanded: list[str] = []
    words = iter(argv)
    for word in words:
        if word in ("-c", "--config"):
            expanded += [flag for path in _stack(next(words, "")) for flag in ("--config", str(path))]
        elif word.startswith("--config="):
            expanded += [flag for path in _stack(word.partition("=")[2]) for flag in ("--config", str(path))]
        else:
            expanded.append(word)
    return expanded


def _stack(name: str, above: tuple[Path, ...] = ()) -> list[Path]:
    path = find(name, above[-1] if above else None)
    if path in above:
        raise UserError(f"{above[-1]} and {path} stand on each other: one 'base' must go.")
    try:
        content = read_yaml(path) or {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}{where}: this is not YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{path} must hold keys and values, as in 'trainer: {{max_epochs: 1}}'.")
    bases = content.get("base") or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{path}: base is the path of a config, or a list of them, and it is {bases!r}.")
    return [one for base in bases for one in _stack(base, (*above, path))] + [path]


def find(name: str, asking: Path | None) -> Path:
    """A config beside the one that names it, from here, or one that comes with the project."""
    places = [asking.parent / name] if asking else [Path(name)]
    if not Path(name).is_absolute():
        plain = name.removeprefix("configs/")
        places += [CONFIGS / plain, CONFIGS.parent.parent / "configs" / plain]
    for place in places:
        if place.is_file():
            return place.resolve()
    raise UserError(
        f"There is no config {name!r}"
        + (
            f", which {asking} names as its base."
            if asking
            else ". HINT: those that come with the project are called configs/*.yaml."
        )
    )


def option(argv: list[str], *names: str) -> str | None:
    """The value of a flag on a command line, the last one."""
    found = None
    for word, following in pairwise([*argv, ""]):
        for name in names:
            if word == name:
                found = following
            elif word.startswith(name + "="):
                found = word.partition("=")[2]
    return found


def without(argv: list[str], *names: str) -> list[str]:
    """A command line without these flags and their values."""
    kept, words = [], iter(argv)
    for word in words:
        if word in names:
            next(words, None)
        elif not word.startswith(tuple(f"{name}=" for name in names)):
            kept.append(word)
    return kept


def documents(argv: list[str]) -> list[dict[str, Any]]:
    """What the configs of a command line hold, one after the other; of one that `expand` has returned."""
    configs = [following for word, following in pairwise(argv) if word == "--config"]
    return [read_yaml(Path(config)) or {} for config in configs]


def checked(name: str) -> str:
    """The name of a run, if it can be one."""
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise UserError(f"A run's name is made of letters, digits, '.', '_' and '-', and {name!r} is not.")
    return name


def folder_of(root: Path, name: str) -> Path:
    """The folder of a run, by its name or, where the folder was moved elsewhere, by its path."""
    return Path(name).absolute() if os.sep in name else root / RUNS / checked(name)


def run_config(argv: list[str]) -> list[str]:
    """Without a config, `--run NAME` of a run that exists stands for the config that it was trained with."""
    config = config_of_run(argv)
    if config is None:
        return argv
    verb = next(at for at, word in enumerate(argv) if word in {"fit", *EVALUATING})
    return [*argv[: verb + 1], "--config", str(config), *argv[verb + 1 :]]


def config_of_run(argv: list[str]) -> Path | None:
    """The config that `--run` stands for."""
    name = option(argv, "--run")
    if name is None or option(argv, "-c", "--config") is not None or not set(argv) & {"fit", *EVALUATING}:
        return None
    root = Path(option(argv, "--trainer.default_root_dir") or ".")
    config = folder_of(root, name) / "config.yaml"
    return config if config.is_file() else None


def strangers(config: Path) -> str | None:
    """Who else may have written a config, which can run any code; None where it is this user's alone."""
    found = config.stat()
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    return "can be written by everybody" if found.st_mode & stat.S_IWOTH else None


def run_folder(name: str, file: str) -> Path:
    """Of a run that is named, or whose folder is; one that has left this file, if there are several."""
    path = Path(name)
    places = [path, Path(RUNS) / name]
    for place in (*(one for one in places if (one / file).is_file()), *(one for one in places if one.is_dir())):
        return place
    if len(path.parts) == 1:
        checked(name)
    known = sorted(one.parent.name for one in Path(RUNS).glob(f"*/{file}"))
    there = f"there are: {', '.join(known[:_NAMED])}" if known else f"there is none in {Path(RUNS).absolute()}"
    raise UserError(f"There is no run {name}. HINT: give its name in {RUNS}/, or its folder; {there}.")
