"""A supervisor's folder in memory, in which the run's newest states outlive the ranks."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_SHM, _PREFIX, _UNLOCKED = Path("/dev/shm"), "samerun-state-", "samerun-new-"


def make_folder_in_memory() -> Path | None:
    """Returns a new folder in memory, and removes those of supervisors that were killed, with all that belonged to them: who
    lives holds a lock on its folder. None where there is no such memory.
    """
    with suppress(OSError):
        for folder in _SHM.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                if folder.lstat().st_uid == os.geteuid() and _lock(folder) is not None:
                    shutil.rmtree(folder, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=_SHM))  # a name by which no other supervisor takes it for left
        _lock(folder)
        return folder.rename(folder.with_name(_PREFIX + folder.name.removeprefix(_UNLOCKED)))
    return None


def _lock(folder: Path) -> int | None:
    """Locks a folder as long as this process lives; None where another one has it locked."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return opened
    except OSError:
        os.close(opened)
        return None
