"""The YAML files that a command line names: configs, what they stand on (`base:`), and those of runs that exist.

Imports nothing heavy: it runs before PyTorch is loaded.
"""

import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import cast

import yaml

from project.errors import UserError
from project.untrusted import read_yaml

_PACKAGE = Path(__file__).parent
CONFIGS = (_PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent) / "configs"
"""The configs that come with the project: in the package of a wheel, and beside it in a checkout."""
RUNS = "lightning_logs"
_NAMED = 20  # runs in an error
_LONGEST_NAME = 200  # characters of a run: a file system takes 255, and a folder beside it has more
EVALUATING = ("validate", "test", "predict", "export")  # they look at weights that are there
SECTIONS = ("trainer", "model", "data", "checkpoints", "watchdog", "recover", "profile", "dashboard", "notify", "metrics")
TRAINING = ("fit", *EVALUATING, "doctor", "manifest")  # they take the keys of a training


def expand(argv: list[str]) -> list[str]:
    """Replaces `--config X` by `--config BASE --config X`, for the configs that X names as its base, theirs first.

    Files come right after the verb, in their order: jsonargparse lets the last setting of a key win, and a key that the
    command line itself sets counts over any file.
    """
    has_verb = bool(argv) and not argv[0].startswith("-")  # `bench`, say
    after = next((at + 1 for at, argument in enumerate(argv) if argument in TRAINING), int(has_verb))
    return [argument for part in (argv[:after], argv[after:]) for argument in _files_first(part)]


def _files_first(argv: list[str]) -> list[str]:
    files: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for argument in words:
        flag, equals, name = re.sub(r"^-c(?=[^=])", "-c=", argument).partition("=")
        if flag in ("-c", "--config"):
            paths = _stack(name if equals else next(words, ""))
            files += [part for path in paths for part in ("--config", str(path))]
        elif flag.startswith("--") and flag[2:] in SECTIONS:
            setting = [argument, *islice(words, not equals)]
            (files if os.path.isfile(name or setting[-1]) else others).extend(setting)
        else:
            others.append(argument)
    return [*files, *others]


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
    return [config for base in bases for config in _stack(base, (*above, path))] + [path] * bool(content)


def find(name: str, asking: Path | None) -> Path:
    """Finds a config beside the one that names it, from here, or one that comes with the project."""
    places = [asking.parent / name] if asking else [Path(name)]
    if not Path(name).is_absolute():
        places.append(CONFIGS / name.removeprefix("configs/"))
    for place in places:
        if place.is_file():
            return place.resolve()
    if asking:
        raise UserError(f"There is no config {name!r}, which {asking} names as its base.")
    near = sorted(path for path in (Path("..") / name, *Path().glob(f"*/{Path(name).name}")) if path.is_file())
    hint = f"{near[0]} is there" if near else "those that come with the project are called configs/*.yaml"
    raise UserError(f"There is no config {name!r} in {Path.cwd()}. HINT: {hint}.")


def option(argv: list[str], *names: str) -> str | None:
    """Returns the value of a flag on a command line, the last one."""
    value = None
    for argument, following in pairwise([*argv, ""]):
        name, equals, given = argument.partition("=")
        if name in names:
            value = given if equals else following
    return value


def without(argv: list[str], *names: str) -> list[str]:
    """Returns a command line without these flags and their values."""
    kept, words = [], iter(argv)
    for argument in words:
        name, equals, _ = argument.partition("=")
        if name not in names:
            kept.append(argument)
        elif not equals:
            next(words, None)
    return kept


def documents(argv: list[str]) -> list[dict[str, object]]:
    """Reads the configs of a command line, one after the other; of one that `expand` has returned."""
    return [read_yaml(config) or {} for config in named_configs(argv)]


def setting(argv: list[str], sections: Sequence[Mapping[str, object]], section: str, name: str) -> object:
    """Returns the value that a command line gives a key of a section, else the last of its `documents` that has the key."""
    if (kind := option(argv, f"--{section}.{name}.class_path")) is not None:
        return {"class_path": kind}
    if (flag := option(argv, f"--{section}.{name}")) is not None:
        return None if flag == "null" else _structure(flag)
    whole = option(argv, f"--{section}")
    contents = [document.get(section) for document in sections] + [_section(whole)]
    known = [content for content in contents if isinstance(content, Mapping) and name in content]
    return known[-1][name] if known else None


def _section(flag: str | None) -> object:
    """Returns a section that a flag gives as a whole, in itself or as a file's name."""
    content = _structure(flag or "")
    return read_yaml(Path(content)) if isinstance(content, str) and Path(content).is_file() else content


def _structure(flag: str) -> object:
    """Returns the list or dictionary that a flag's value is; other values as they are."""
    with suppress(yaml.YAMLError):  # which the parser reports
        return cast(object, yaml.safe_load(flag)) if flag.startswith(("[", "{")) else flag
    return flag


def named_configs(argv: list[str]) -> list[Path]:
    """Returns the configs of a command line that `expand` has returned, bases first."""
    return [Path(following) for argument, following in pairwise(argv) if argument == "--config"]


def checked(name: str) -> str:
    """Returns the name of a run, if it can be one."""
    if len(name.encode()) > _LONGEST_NAME:
        raise UserError(f"A run's name has {_LONGEST_NAME} characters at most, and {name[:20]}... has more.")
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise UserError(f"A run's name is made of letters, digits, '.', '_' and '-', and {name!r} is not.")
    return name


def folder_of(root: Path, name: str) -> Path:
    """Returns the folder of a run, by its name or, where the folder was moved elsewhere, by its path."""
    return Path(name).absolute() if os.sep in name else root / RUNS / checked(name)


def run_config(argv: list[str]) -> list[str]:
    """Adds to a command line with `--run NAME` and no config the one that this run was trained with, if the run exists."""
    config = config_of_run(argv)
    if config is None:
        return argv
    verb = next(at for at, argument in enumerate(argv) if argument in {"fit", *EVALUATING})
    return [*argv[: verb + 1], "--config", str(config), *argv[verb + 1 :]]


def config_of_run(argv: list[str]) -> Path | None:
    """Returns the config that `--run` stands for."""
    name = option(argv, "--run")
    if name is None or option(argv, "-c", "--config") is not None or not set(argv) & {"fit", *EVALUATING}:
        return None
    root = Path(option(argv, "--trainer.default_root_dir") or ".")
    config = folder_of(root, name) / "config.yaml"
    return config if config.is_file() else None


def strangers(config: Path) -> str | None:
    """Returns who else may have written a config, which can run any code; None where it is this user's alone."""
    status = config.stat()
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    return "can be written by everybody" if status.st_mode & stat.S_IWOTH else None


def run_names(given: Sequence[str], file: str) -> list[str]:
    """Returns the runs that a command names, each once; * and ? stand for any letters, in the names of runs with this file."""
    names: list[str] = []
    for name in given:
        if not {*"*?["} & {*name} or os.sep in name or Path(name).exists():
            names.append(name)
            continue
        matching = sorted(path.parent.name for path in Path(RUNS).glob(f"{name}/{file}") if path.parent.name[0] != ".")
        if not matching:
            raise UserError(f"No run in {RUNS}/ with a {file} matches {name}. HINT: python -m project runs lists them.")
        names += matching
    return list(dict.fromkeys(names))


def run_folder(name: str, file: str) -> Path:
    """Returns the folder of a run, by its name or its path; one that has left this file, if there are several."""
    places = [Path(name), Path(RUNS) / name]
    places = [place for place in places if (place / file).is_file()] + [place for place in places if place.is_dir()]
    if places:
        return places[0]
    if len(Path(name).parts) == 1:
        checked(name)
    known = sorted(entry.parent.name for entry in Path(RUNS).glob(f"*/{file}"))
    listing = f"there are: {', '.join(known[:_NAMED])}" if known else f"there is none in {Path(RUNS).absolute()}"
    raise UserError(f"There is no run {name}. HINT: give its name in {RUNS}/, or its folder; {listing}.")
