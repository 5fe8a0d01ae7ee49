"""The folder of an export: complete, or absent."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from project.errors import FaultError, UserError

ABOUT = "export.json"
"""The file that describes an export; a folder without one is not ours to replace."""


def refuse_strangers(target: Path) -> None:
    """Raises an error if the target exists and is no export: it stays as it is."""
    if target.is_dir() and not (target / ABOUT).is_file() and any(target.iterdir()):
        raise UserError(f"{target} holds something else than an export. HINT: --out takes a new folder, or that of an export.")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file. HINT: --out takes a folder.")


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yields a folder beside the target to write to. It replaces the target at the end; on failure, it is removed."""
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")  # another export may write to the same target
    try:
        folder.mkdir(parents=True)
        yield folder
        _take_place(folder, target)
    except OSError as error:  # a full disk, a folder that can't be written to
        raise FaultError(f"The export to {target} can't be written: {error}. HINT: --out takes another folder.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _take_place(folder: Path, target: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    old = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.old")
    with suppress(FileNotFoundError):
        target.rename(old)
    try:
        folder.rename(target)
    except OSError:
        with suppress(OSError):
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
