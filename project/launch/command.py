"""Builds a container's command line: configs that are not in the image travel with the manifest."""

import re
from pathlib import Path

import yaml

from project.config_files import CONFIGS, without
from project.errors import UserError

_OWN = ("--engine", "--nodes", "--gpus", "--cpus", "--image", "--claim", "--out", "--run")  # of the verb `manifest`
_IN_IMAGE = (CONFIGS.resolve(), (CONFIGS.parent.parent / "configs").resolve())


def command(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments of the verb `fit`, and the configs, by name, that `--config=:NAME` refers to.

    `argv`: after the verb `manifest`, with configs expanded to those that they stand on.
    """
    configs: dict[str, str] = {}
    rest = iter(without(argv, *_OWN))
    return [_config(Path(next(rest)), configs) if word == "--config" else word for word in rest], configs


def _config(path: Path, configs: dict[str, str]) -> str:
    if path.resolve().parent in _IN_IMAGE:
        return f"--config=configs/{path.name}"
    text = path.read_text()
    if not re.fullmatch(r"[-._a-zA-Z0-9]+", path.name) or configs.get(path.name) not in (None, text):
        raise UserError(
            f"{path} travels with the manifest, under its name. HINT: another one, of letters, digits, '-', '.' and '_'."
        )
    configs[path.name] = text
    bases = (yaml.safe_load(text) or {}).get("base") or []
    for base in [bases] if isinstance(bases, str) else bases:
        beside = (path.parent / base).resolve()
        if beside.is_file() and beside.parent not in _IN_IMAGE and base != beside.name:
            raise UserError(
                f"{path} stands on {base}, and both travel with the manifest, in one folder. HINT: put it beside {path}."
            )
    return f"--config=:{path.name}"
