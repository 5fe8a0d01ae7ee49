"""Checks what the hosts must see alike: the run's folder, and a file that all ranks read.

All ranks call these together; `gather` brings together what each of them reports (anything that JSON can hold), by rank.
"""

import hashlib
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from project.cluster.environment import Gather, named
from project.cluster.place import node_of
from project.untrusted import open_to_read, read_text, write_text

Problem = tuple[str, list[int]]
"""What is wrong, and the ranks that it is about."""

_PATIENCE = 5.0  # seconds: a network file system may take a moment to show a new file
_END = 1 << 20  # bytes at the end of a file that are compared: in a checkpoint they hold the checksums of all its parts
NOTE = ".rank-0"
"""In the run's folder on each host, where they don't share it: the host of rank 0."""
SHARE = (
    "put it on a file system that all hosts share, and writable (trainer.default_root_dir, or start there); or, if only "
    "rank 0's host is to have it, set trainer.shared_folder=false."
)
MOVE = f"start rank 0 where it was, or bring the folder to its new host; then remove {NOTE} from it, on every host."


def folder_problem(folder: Path, rank: int, hosts: Sequence[str], gather: Gather) -> Problem | None:
    """Returns what is wrong with rank 0's folder: rank 0 writes a file into it, and all ranks read that."""
    # A name that nobody has looked for before: a network file system remembers for a while what was not there.
    file, error = folder / f".seen-by-all-{uuid.uuid4().hex}", ""
    if rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(file.name)
        except OSError as raised:
            error = raised.strerror or str(raised)
    path, error = gather([str(file), error])[0]
    seen = gather(not error and _holds(Path(path), Path(path).name))
    if rank == 0:
        file.unlink(missing_ok=True)
    where = Path(path).parent
    if error:
        return f"{named([0], hosts)} can't write to the run's folder {where}: {error}", [0]
    if blind := [index for index, sees in enumerate(seen) if not sees]:
        return f"{named(blind, hosts)} can't see what {named([0], hosts)} writes to the run's folder, {where}", blind
    return None


def _holds(file: Path, text: str) -> bool:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with suppress(OSError):
            if read_text(file, 1000) == text:
                return True
        time.sleep(0.1)
    return False


def moved(folder: Path, rank: int, hosts: Sequence[str], gather: Gather) -> Problem | None:
    """Returns a problem if rank 0 has moved to a host without the run's folder: there the run would begin anew."""
    note, before = Path(gather(str(folder))[0]) / NOTE, ""
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            write_text(note, hosts[0])
    with suppress(OSError, ValueError):
        before = read_text(note, 1000)
    other = next((host for host in gather(before) if node_of(host) not in ("", node_of(hosts[0]))), None)
    if other is None:
        return None
    return f"Only {other} has this run's folder, {note.parent}, and rank 0 is on {hosts[0]} now", [0]


def file_problem(path: Path, hosts: Sequence[str], gather: Gather) -> str | None:
    """Returns what is wrong with a file, or a folder of files, that all ranks are about to read."""
    prints = gather(_fingerprint(path))
    if prints[0] is None:
        return None  # whoever reads it says so
    if blind := [rank for rank, fingerprint in enumerate(prints) if fingerprint is None]:
        return f"{named(blind, hosts)} can't see {path}, which {named([0], hosts)} resumes from"
    if other := [rank for rank, fingerprint in enumerate(prints) if fingerprint != prints[0]]:
        return f"{named(other, hosts)}: {path} is another file there than on {named([0], hosts)}"
    return None


def _fingerprint(path: Path) -> str | None:
    try:
        if path.is_dir():
            inside = sorted(f"{entry.name} {entry.stat().st_size}" for entry in path.iterdir())
            return f"{len(inside)} files {hashlib.sha256(chr(10).join(inside).encode()).hexdigest()}"
        with open_to_read(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _END))
            return f"{size} {hashlib.sha256(file.read()).hexdigest()}"
    except OSError:
        return None
