"""Reads the manifest of a checkpoint, which any user may have written: each value is checked to be of its required kind.

No other import than the standard library's: it is read without PyTorch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from project.errors import UserError
from project.untrusted import as_count, as_text, read_json

_COUNTS = {"epoch", "step", "global_step", "logged_steps"}
_SWITCHES = ("epoch_over", "validation_due", "begun")  # of a position; the rest of it are counts


def manifest_of(path: Path) -> Path:
    return path.with_suffix(".json")


def manifest_at(path: Path) -> dict[str, Any]:
    """Reads the manifest of a checkpoint and none of its files; raises an OSError or a ValueError that names what is wrong with
    it.
    """
    return _check_manifest(read_json(manifest_of(path)))


def _check_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """Returns the manifest; raises a UserError that names a value of the wrong kind."""
    for name, check in _CHECKS.items():
        if name in manifest:
            try:
                check(manifest[name])
            except (TypeError, AttributeError, ValueError) as error:
                raise UserError(f"its {name} can't be: {error}") from error
    return manifest


def _check_position(position: Any) -> None:
    for name, value in position.items():
        if name in _SWITCHES:
            _check_boolean(value)
        else:
            as_count(value)


def check_complete(manifest: Mapping[str, Any]) -> None:
    """Raises a UserError where a manifest lacks what a run that is resumed has to know."""
    lacking = {"position", "finished"} - manifest.keys() or _COUNTS - manifest["position"].keys()
    if lacking:
        raise UserError(f"its manifest has no {min(lacking)}")


def _check_boolean(value: Any) -> None:
    if not isinstance(value, bool):
        raise UserError(f"{str(value)[:40]!r} is neither true nor false")


def _check_number(value: Any) -> None:
    if type(value) not in (int, float):
        raise UserError(f"{str(value)[:40]!r} is no number")


def _check_logged(entries: Any) -> None:
    for step, tag, value in entries:
        as_count(step)
        as_text(tag)
        _check_number(value)


def _check_metrics(metrics: Any) -> None:
    for value in metrics.values():
        _check_number(value)


def _check_parts(parts: Any) -> None:
    for entry in parts.values():
        _check_file(entry)
        as_count(entry["rank"])
        as_text(entry["host"])


def _check_file(entry: Any) -> None:
    if not {"bytes", "sha256"} <= entry.keys():
        raise UserError("a size or a checksum is missing")
    as_count(entry["bytes"])
    as_text(entry["sha256"])


def _check_before(manifest: Any) -> None:
    _check_file(manifest)
    _check_manifest(manifest)


def _check_mapping(value: Any) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"{str(value)[:40]!r} has no keys")


_CHECKS: dict[str, Callable[[Any], object]] = {
    **{
        "position": _check_position,
        "finished": _check_boolean,
        "logged": _check_logged,
        "metrics": _check_metrics,
        "parts": _check_parts,
    },
    **{
        "bytes": as_count,
        "sha256": as_text,
        "before": _check_before,
        "configuration": _check_mapping,
        "versions": _check_mapping,
    },
}
