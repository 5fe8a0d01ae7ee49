"""The folder of an export: complete, or absent."""

import os
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from project.errors import UserError

ABOUT = "export.json"
"""What an export says of itself; a folder without one is not ours to replace."""


def refuse_strangers(target: Path) -> None:
    """Raises an error if the target exists and is no export: it stays as it is."""
    if target.is_dir() and not (target / ABOUT).is_file() and any(target.iterdir()):
        raise UserError(f"{target} holds something else than an export. HINT: --out takes a new folder, or that of an export.")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file. HINT: --out takes a folder.")


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yields a folder beside the target to write to. It replaces the target at the end; on failure, it is removed."""
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with _signals_clean_up():
            folder.mkdir(parents=True)
            yield folder
            _take_place(folder, target)
    except OSError as error:  # a full disk, a folder that can't be written to
        raise UserError(f"The export to {target} can't be written: {error}. HINT: --out takes another folder.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _take_place(folder: Path, target: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    old = folder.with_suffix(".old")
    with suppress(FileNotFoundError):
        target.rename(old)
    try:
        folder.rename(target)
    except OSError:
        with suppress(OSError):
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _signals_clean_up() -> Iterator[None]:
    """Ends the process by an exception on a signal that would end it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, _end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
