"""Flattens a configuration to dotted names. Imports nothing: a report is read on a login node, too."""

from collections.abc import Mapping
from typing import Any


def flat(configuration: object, prefix: str = "") -> dict[str, Any]:
    """Returns a nested configuration as one level of dotted names."""
    if not isinstance(configuration, Mapping):
        return {prefix.rstrip("."): configuration}
    return {name: value for key, part in configuration.items() for name, value in flat(part, f"{prefix}{key}.").items()}
