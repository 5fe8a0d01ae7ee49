"""Reads and writes small files where others may write, too: in a run's folder; and reads configs.

Whatever lies there is bounded before it is parsed: a pipe or a device is not waited for, a file is not larger than it may be,
and a YAML of a few lines does not stand for millions. Nothing is written through a link that somebody has put there, and what
is shown to others is not read through one. What is wrong is an OSError or a ValueError.

Imports nothing heavy: it is needed before PyTorch is loaded.
"""

import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

import yaml

from project.errors import UserError

LARGEST = 16 << 20  # bytes; a manifest has some thousand
LARGEST_COUNT = 1 << 53
LONGEST_CAUSE = 1_000  # characters
LATEST = 1 << 32  # seconds since 1970: dates after it are none
_VALUES = 100_000  # that a YAML may stand for, with its aliases written out
_DEPTH = 100
# All but new lines and tabs; and halves of characters, which no encoding can write.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# Ten times as fast, where there is a C library for it.
_Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def printable(text: str, most: int | None = None) -> str:
    """Returns a text that does nothing to a terminal but to appear there; of a longer one the two ends."""
    text = text if most is None else both_ends(text, most)
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def both_ends(text: str, most: int = LONGEST_CAUSE) -> str:
    """Returns a text; of one with more than so many characters the beginning and the end, where the cause may stand."""
    start = most * 6 // 10
    return text if len(text) <= most else f"{text[:start]} ... {text[len(text) - max(0, most - start - 5) :]}"


def shortened(error: object, most: int = 300) -> str:
    """Returns an error's text with not more of what it quotes than a reader needs: the ends of its cause, and its hint."""
    cause, hint, fix = printable(str(error)).partition(" HINT:")
    return f"{printable(cause, most)}{hint}{printable(fix, most)}"


# Reading -------------------------------------------------------------------------------------------------------------


def regular_size(path: Path) -> int:
    """Returns the size of a file; an OSError for what would be read for ever, or is a folder. It is not opened."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is no regular file")
    return status.st_size


def _open_regular(path: Path, flags: int) -> int:
    opened = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return opened
    os.close(opened)
    raise OSError(f"{path} is no regular file")


def open_to_read(path: Path, follow: bool = True) -> BinaryIO:
    """Opens a regular file; an OSError for what would be waited for, and, if it is not to `follow` one, for a link."""
    return os.fdopen(_open_regular(path, os.O_RDONLY if follow else os.O_RDONLY | os.O_NOFOLLOW), "rb")


def read_text(path: Path, limit: int = LARGEST, follow: bool = True) -> str:
    """Reads a text file of at most so many bytes."""
    with open_to_read(path, follow) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(f"{path} has more than {limit:,} bytes")
    return content.decode()


def read_end(path: Path, most: int) -> str:
    """Reads the last so many bytes of a text that others may read then, from its first whole line on."""
    with open_to_read(path, follow=False) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        text = file.read(most).decode(errors="replace")
    return text.partition("\n")[2] if size > most else text


def read_lines(path: Path, longest: int = LARGEST) -> Iterator[bytes]:
    """Yields the lines of a file that have an end, one after the other; an OSError for one of more bytes than that."""
    with open_to_read(path, follow=False) as file:
        while line := file.readline(longest + 1):
            if len(line) > longest:
                raise OSError(f"{path} has a line of more than {longest:,} bytes")
            if line.endswith(b"\n"):
                yield line


def parse_json(text: str | bytes) -> Any:
    """Reads a JSON document that is not nested too deeply for whoever goes through it."""
    try:
        document = json.loads(text)
        _check_depth(document, _DEPTH)
    except RecursionError:
        raise UserError("it is nested too deeply") from None
    return document


def _check_depth(value: object, left: int) -> None:
    if left < 0:
        raise RecursionError
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, left - 1)


def read_json(path: Path, limit: int = LARGEST, follow: bool = True) -> dict[str, Any]:
    """Reads a JSON file that holds an object."""
    document = parse_json(read_text(path, limit, follow))
    if not isinstance(document, dict):
        raise UserError(f"{path} holds no JSON object")
    return document


def as_count(value: object, least: int = 0, most: int = LARGEST_COUNT) -> int:
    """Returns a whole number within bounds; a UserError for everything else."""
    if type(value) is not int or not least <= value <= most:
        raise UserError(f"{str(value)[:40]!r} is no number from {least} to {most}")
    return value


def as_time(value: object) -> float:
    """Returns seconds since 1970."""
    if not isinstance(value, (int, float)) or type(value) is bool or not 0 <= value < LATEST:
        raise UserError(f"{str(value)[:40]!r} is no time")
    return float(value)


def as_text(value: object, most: int = 500) -> str:
    """Returns a text, of a longer one the beginning."""
    if not isinstance(value, str):
        raise UserError(f"{str(value)[:40]!r} is no text")
    return value[:most]


class _Loader(_Parser):  # type: ignore[misc, valid-type]
    """Refuses a document that stands for more than it should, before anything is made of it."""

    def get_single_node(self) -> yaml.Node | None:
        try:
            node: yaml.Node | None = super().get_single_node()
        except RecursionError:
            raise yaml.YAMLError("it is nested too deeply") from None
        if node is not None:
            _count(node, {}, 0)
        return node


def _count(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Returns how many values a node stands for. `known`: those of nodes that were counted; 0 for one that is being counted."""
    if depth > _DEPTH:
        raise yaml.composer.ComposerError(None, None, "it is nested too deeply", node.start_mark)
    count = known.get(id(node))
    if count == 0:
        raise yaml.composer.ComposerError(None, None, "an alias stands for what it is in", node.start_mark)
    if count is None:
        count = known[id(node)] = 0
        if isinstance(node, yaml.CollectionNode):
            if isinstance(node, yaml.MappingNode):
                _refuse_double(node)
            for item in node.value:
                count += sum(_count(part, known, depth + 1) for part in (item if isinstance(item, tuple) else (item,)))
        known[id(node)] = count = count + 1
    if count > _VALUES:
        raise yaml.composer.ComposerError(None, None, f"its aliases stand for more than {_VALUES:,} values", node.start_mark)
    return count


def _refuse_double(node: yaml.MappingNode) -> None:
    """Refuses a key that stands twice in a mapping: PyYAML would take the last one without a word."""
    known: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            if key.value in known:
                raise yaml.composer.ComposerError(None, None, f"the key {key.value} is there twice", key.start_mark)
            known.add(key.value)


def parse_yaml(text: str) -> Any:
    """Reads a YAML document; a YAMLError, which may know a place, or a ValueError names what is wrong with it."""
    return yaml.load(text, _Loader)


def read_yaml(path: Path) -> Any:
    return parse_yaml(read_text(path))


def compose_yaml(path: Path) -> yaml.Node | None:
    """Returns the document's nodes, which know their lines."""
    return yaml.compose(read_text(path), _Loader)


# Writing -------------------------------------------------------------------------------------------------------------


def dump_yaml(value: object) -> str:
    """Returns a value as YAML, the keys in their order."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a name that nobody can know before; the file of that name then takes the place of `path`: whole or not there."""
    part = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Writes a file, whole or not at all, and through no link."""
    with replacing(path) as part:
        opened = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # which follows no link
        with os.fdopen(opened, "w", encoding="utf-8", newline="") as file:
            file.write(text)


def foreign_link(folder: Path) -> bool:
    """Returns whether a folder is a link that another user has made: one's own may lead to a larger disk."""
    return os.path.islink(folder) and folder.lstat().st_uid != os.geteuid()


def make_folder(folder: Path) -> None:
    """Makes a folder, if there is none; raises an OSError if another user has put a link in its place."""
    if foreign_link(folder):
        raise OSError(f"{folder} is a link of another user")
    folder.mkdir(parents=True, exist_ok=True)


def open_to_append(path: Path) -> IO[str]:
    """Opens a file to add to it; an OSError where a link, a pipe or a device lies there."""
    opened = _open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    return os.fdopen(opened, "a", encoding="utf-8", newline="")


def cut_off_half_a_line(path: Path, longest: int = LARGEST) -> None:
    """Removes what was being written when a process was killed, before something is added; an OSError as for that."""
    with suppress(FileNotFoundError), os.fdopen(_open_regular(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - longest))
        end = file.read(longest)
        file.truncate(size - len(end) + end.rfind(b"\n") + 1)
