"""The files of a run's folder that its page shows or links to: the log's end, stacks, checkpoints, profiles."""

import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from project.untrusted import printable, read_end
from project.watch.asked import FOLDER

LOG = "log.txt"
_LINES, _LONGEST = 100, 500  # of the log's end, and characters of a line
_TABLES, _CHECKPOINTS = 8, 20
READ = 1 << 17
"""Bytes of a log's end, or of a table."""
_TABLE = re.compile(r"[\w-]{1,80}\.txt")
_CHECKPOINT = re.compile(r"[\w.=-]{1,120}\.ckpt")
_STACKS = re.compile(r"hang-rank\d{1,9}\.txt")


def end_of(path: Path, most: int) -> str:
    """Returns the end of a file; nothing of one that can't be read."""
    with suppress(OSError):
        return read_end(path, most)
    return ""


class File(NamedTuple):
    """A file to link to, by its path within the run's folder; a folder has no size."""

    path: str
    size: int | None


def file_to_link(folder: Path, path: Path) -> File | None:
    """Returns a file or folder in the run's folder; None if it is neither, or does not exist."""
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            size = status.st_size if stat.S_ISREG(status.st_mode) else None
            return File(path.relative_to(folder).as_posix(), size)
    return None


def log_end(folder: Path) -> str:
    """Returns the last lines of the log."""
    return "\n".join(printable(line, _LONGEST) for line in end_of(folder / LOG, READ).splitlines()[-_LINES:])


def stacks(folder: Path) -> list[File]:
    """Returns the files of the ranks' stacks that a hang has left."""
    paths = sorted(path for path in folder.glob("hang-rank*.txt") if _STACKS.fullmatch(path.name))
    return [file for path in paths[:_CHECKPOINTS] if (file := file_to_link(folder, path))]


def newest_checkpoints(folder: Path) -> list[File]:
    """Returns the newest checkpoints, the last one first, by their names."""
    if (folder / "checkpoints").is_symlink():
        return []
    names = sorted((path for path in folder.glob("checkpoints/*.ckpt") if _CHECKPOINT.fullmatch(path.name)), reverse=True)
    return [file for path in names[:_CHECKPOINTS] if (file := file_to_link(folder, path))]


def profiles(folder: Path) -> dict[str, str]:
    """Returns the newest tables of profiles, by their paths."""
    paths = [] if (folder / FOLDER).is_symlink() else sorted(folder.glob(f"{FOLDER}/*.txt"), reverse=True)[:_TABLES]
    tables = {f"{FOLDER}/{path.name}": end_of(path, READ) for path in paths if _TABLE.fullmatch(path.name)}
    return {name: table for name, table in tables.items() if table}
