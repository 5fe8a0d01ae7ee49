"""Flattens configurations to dotted names, and compares them. Imports nothing: a report is read on a login node, too."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

Change = TypeVar("Change")


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
