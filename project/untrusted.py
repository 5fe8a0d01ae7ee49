"""Reads and writes small files where others may write, too: in a run's folder; and reads configs.

Whatever lies there is bounded before it is parsed: a pipe or a device is not waited for, a file is not larger than it may be,
and a YAML of a few lines does not stand for millions. Nothing is written through a link that somebody has put there. What is
wrong is an OSError or a ValueError.

Imports nothing heavy: it is needed before PyTorch is loaded.
"""

import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import IO, Any

import yaml

from project.errors import UserError

LARGEST = 64 << 20  # bytes; a manifest has some thousand, a log of a long run some million
_VALUES = 100_000  # that a YAML may stand for, with its aliases written out
_DEPTH = 100
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # all but new lines and tabs
_Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where there is a C library for it


def printable(text: str, most: int | None = None) -> str:
    """Returns a text that does nothing to a terminal but to appear there; of a longer one the first so many characters."""
    if most is not None and len(text) > most:
        text = f"{text[:most]} ..."
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def regular_size(path: Path) -> int:
    """Returns the size of a file; an OSError for what would be read for ever, or is a folder."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(f"{path} is a folder")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is no regular file")
    return found.st_size


def read_text(path: Path, limit: int = LARGEST, errors: str = "strict") -> str:
    """Reads a text file of at most so many bytes."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(f"{path} is no regular file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(f"{path} has more than {limit:,} bytes")
    return content.decode(errors=errors)


def parse_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError("it is nested too deeply") from None


def read_json(path: Path, limit: int = LARGEST) -> dict[str, Any]:
    """Reads a JSON file that holds an object."""
    found = parse_json(read_text(path, limit))
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object")
    return found


class _Loader(_Parser):  # type: ignore[misc, valid-type]
    """Refuses a document that stands for more than it should, before anything is made of it."""

    def get_single_node(self) -> Any:
        try:
            node = super().get_single_node()
        except RecursionError:
            raise yaml.YAMLError("it is nested too deeply") from None
        if node is not None:
            _count(node, {}, 0)
        return node


def _count(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Returns how many values a node stands for. `known`: those of nodes that were counted; 0 for one that is being counted."""
    if depth > _DEPTH:
        raise yaml.composer.ComposerError(None, None, "it is nested too deeply", node.start_mark)
    if (before := known.get(id(node))) is not None:
        if before == 0:
            raise yaml.composer.ComposerError(None, None, "an alias stands for what it is in", node.start_mark)
        return before
    count = 1
    if isinstance(node, yaml.CollectionNode):
        known[id(node)] = 0
        for item in node.value:
            count += sum(_count(part, known, depth + 1) for part in (item if isinstance(item, tuple) else (item,)))
    if count > _VALUES:
        raise yaml.composer.ComposerError(None, None, f"its aliases stand for more than {_VALUES:,} values", node.start_mark)
    known[id(node)] = count
    return count


def read_yaml(path: Path) -> Any:
    """Reads a YAML document; a YAMLError, which may know a place, or a ValueError says what is wrong with it."""
    return parse_yaml(read_text(path))


def parse_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def compose_yaml(path: Path) -> Any:
    """Returns the document's nodes, which know their lines."""
    return yaml.compose(read_text(path), _Loader)


# Writing -------------------------------------------------------------------------------------------------------------


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Writes a file under a name that nobody can know before, and renames it: whole or not there, at any moment."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        opened = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # which follows no link
        with os.fdopen(opened, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def open_to_append(path: Path) -> IO[str]:
    """Opens a file to add to it; an OSError where a link, a pipe or a device lies there."""
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(opened, "a", encoding="utf-8", newline="")
