"""The files of a run's folder that its page shows or links to: the end of its log, the tables of profiles, its checkpoints.

The folder may be somebody else's: no link is followed, and only so much is read of a file.
"""

import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from project.untrusted import printable, read_end
from project.watch.asked import FOLDER

LOG = "log.txt"
_LINES, _LONGEST = 100, 500  # of the log, and characters of a line
_TABLES, _CHECKPOINTS = 8, 20
_READ = 1 << 17  # bytes of a file
_TABLE = re.compile(r"[\w-]{1,80}\.txt")
_CHECKPOINT = re.compile(r"[\w.=-]{1,120}\.ckpt")


class File(NamedTuple):
    """A file to link to, by its path within the run's folder; a folder has no size."""

    path: str
    size: int | None


def _entry(folder: Path, path: Path) -> File | None:
    with suppress(OSError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            size = status.st_size if stat.S_ISREG(status.st_mode) else None
            return File(path.relative_to(folder).as_posix(), size)
    return None


def log_end(folder: Path) -> str:
    """Returns the last lines of the log."""
    with suppress(OSError):
        lines = read_end(folder / LOG, _READ).splitlines()[-_LINES:]
        return "\n".join(printable(line, _LONGEST) for line in lines)
    return ""


def log_file(folder: Path) -> File | None:
    return _entry(folder, folder / LOG)


def checkpoints(folder: Path) -> list[File]:
    """Returns the newest checkpoints, the last one first, by their names."""
    if (folder / "checkpoints").is_symlink():
        return []
    names = sorted((path for path in folder.glob("checkpoints/*.ckpt") if _CHECKPOINT.fullmatch(path.name)), reverse=True)
    return [file for path in names[:_CHECKPOINTS] if (file := _entry(folder, path))]


def profiles(folder: Path) -> dict[str, str]:
    """Returns the newest tables of profiles, by their paths."""
    if (folder / FOLDER).is_symlink():
        return {}
    tables: dict[str, str] = {}
    for path in sorted(folder.glob(f"{FOLDER}/*.txt"), reverse=True)[:_TABLES]:
        with suppress(OSError):
            if _TABLE.fullmatch(path.name):
                tables[f"{FOLDER}/{path.name}"] = read_end(path, _READ)
    return tables
