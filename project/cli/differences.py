"""The verb `config`: `python -m project config diff A B` shows in which keys two configurations differ, defaults filled in.

A and B are YAML files, with their bases, or runs. Exit code 0: there is no difference, 1: there is, 2: it can't be told.
"""

import re
import textwrap
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

from project.cli.keys import Node, arguments, below, class_of, document, group
from project.cli.reading import show
from project.cluster.settings import differing, likeliest_first, of_the_same_classes
from project.config_files import documents, expand, run_folder
from project.masking import masked

_ABOUT = """Shows in which keys two configurations differ: YAML files, with what they stand on, or runs. What a YAML does not
say has its default. Exit code 0: there is no difference, 1: there is."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_LEFT_OUT = ("base", "config")
_LONGEST = 100  # characters of a value

Config = dict[str, object]


def main(words: Sequence[str]) -> int:
    """Prints what differs, and returns the exit code."""
    parser = ArgumentParser("python -m project config", description=_ABOUT)
    parser.add_argument("what", choices=["diff"], metavar="diff")
    parser.add_argument("first", metavar="A", help="a YAML file, or a run")
    parser.add_argument("second", metavar="B", help="another one")
    given = parser.parse_args(words)
    configs = [masked(filled(read(name))) for name in (given.first, given.second)]
    changes = of_the_same_classes(differing([{k: v for k, v in config.items() if k not in _LEFT_OUT} for config in configs]))
    for key, (value, other) in likeliest_first(changes).items():
        show(f"{key}: {_text(value)} -> {_text(other)}")
    if not changes:
        show(f"{given.first} and {given.second} say the same.")
    return int(bool(changes))


def _text(value: object) -> str:
    return textwrap.shorten("null" if value is None else str(value), _LONGEST)


def read(name: str) -> Config:
    """Returns the configuration of a YAML file, including its `base`, or of a run."""
    if not name.endswith((".yaml", ".yml")) and not Path(name).is_file():
        name = str(run_folder(name, "config.yaml") / "config.yaml")
    whole: Config = {}
    for part in documents(expand(["--config", name])):
        whole = _merged(whole, part, document())
    return whole


def _merged(under: Config, above: Mapping[str, object], node: Node) -> Config:
    """Merges two configurations; values of the second override those of the first."""
    merged = dict(under)
    for key, value in above.items():
        inner, before = below(node, path_of(above) or path_of(under)).get(key, {}), merged.get(key)
        if not (isinstance(value, Mapping) and isinstance(before, Mapping)):
            merged[key] = value
            continue
        before = dict(before)
        path = path_of(value)
        if path is not None and path != before.get("class_path"):  # arguments that the new class does not take go
            known, kept = arguments(inner, path), before.get("init_args")
            before["init_args"] = {k: v for k, v in kept.items() if k in known} if isinstance(kept, Mapping) else {}
        merged[key] = _merged(before, value, inner)
    return merged


def path_of(config: Mapping[str, object]) -> str | None:
    """Returns the class that a part of a configuration names."""
    path = config.get("class_path")
    return path if isinstance(path, str) else None


def filled(config: Mapping[str, object]) -> Config:
    """Returns a configuration with the default of each key that it does not name."""
    keys = group(document())
    model = config.get("model")
    if (
        isinstance(model, str) or (isinstance(model, Mapping) and path_of(model))
    ) and "data" not in config:  # such a module may have loaders itself
        del keys["data"]
    return _filled_group(config, keys)


def _filled_group(values: Mapping[str, object], keys: Mapping[str, Node]) -> Config:
    names = dict.fromkeys([*keys, *values])
    return {name: _filled(values.get(name, keys.get(name, {}).get("default")), keys.get(name, {})) for name in names}


def _filled(value: object, node: Node) -> object:
    if isinstance(value, str) and (path := class_of(node, value)):
        value = {"class_path": path}
    if isinstance(value, Mapping) and (named := value.get("class_path")):
        inner = arguments(node, named)
        return {"class_path": class_of(node, named) or named, "init_args": _filled_group(value.get("init_args") or {}, inner)}
    if (value is None or isinstance(value, Mapping)) and (keys := group(node)):
        return _filled_group(value or {}, keys)
    if isinstance(value, list):
        return [_filled(item, node) for item in value]
    if not isinstance(value, str) or not _NUMBER.fullmatch(value):
        return value
    return int(value) if value.lstrip("+-").isdigit() else float(value)
