"""Flattens configurations to dotted names, and compares them. Imports nothing: a report is read on a login node, too."""

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

Change = TypeVar("Change")
_LIKELY = re.compile(r"^(model|seed_everything)\b|\b(max_epochs|max_steps|precision|exact|strategy)$|batch|clip")
"""Settings that change what a step computes."""
_UNLIKELY = re.compile(
    r"^(run|resume|change|base|config|ckpt_path|doctor|debug|dry_run|checkpoints|watchdog|recover|profile|dashboard|notify|metrics)\b"
    r"|^trainer\.(logger|default_root_dir|log_every_n_steps|enable_\w+|fingerprints|profiler|join_timeout|shared_folder"
    r"|limit_(val|test|predict)_batches)\b"
)
"""Settings that change what is shown and saved."""


def flat(configuration: object, prefix: str = "") -> dict[str, object]:
    """Returns a nested configuration as one level of dotted names."""
    if not isinstance(configuration, Mapping):
        return {prefix.rstrip("."): configuration}
    return {name: value for key, part in configuration.items() for name, value in flat(part, f"{prefix}{key}.").items()}


def differing(configurations: Sequence[object]) -> dict[str, list[object]]:
    """Returns the settings that are not the same in all configurations, by their dotted names."""
    levels = [flat(configuration) for configuration in configurations]
    names = dict.fromkeys(name for level in levels for name in level)
    values = {name: [level.get(name) for level in levels] for name in names}
    return {name: settings for name, settings in values.items() if any(setting != settings[0] for setting in settings)}


def of_the_same_classes(changes: Mapping[str, Change]) -> dict[str, Change]:
    """Returns changes without the arguments of classes that are others now: of another class, all arguments are others."""
    others = tuple(f"{key.removesuffix('class_path')}init_args." for key in changes if key.endswith(".class_path"))
    return {key: change for key, change in changes.items() if not key.startswith(others)}


def likeliest_first(changes: Mapping[str, Change]) -> dict[str, Change]:
    """Returns changes, those first that are most likely to change the result: names, loggers and folders come last."""
    return dict(sorted(changes.items(), key=lambda change: 2 if _UNLIKELY.search(change[0]) else not _LIKELY.search(change[0])))
