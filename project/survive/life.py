"""Writes into a run's folder for a rank that can't any more. Standard library only.

Others may write there, too: no link is followed, and no pipe is waited for. See project/untrusted.py, which reads YAML as well.
"""

import json
import os
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
_LAST = 1 << 16  # bytes, in which the last line is


def start_report(life: Path) -> None:
    """Starts `project report` for the run that has this file of starts and stops, where no rank is left that writes it."""
    words = [sys.executable, "-m", "project", "report", str(life.parent)]
    with suppress(OSError):
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def add_to_log(life: Path, level: str, text: str) -> None:
    """Writes a line into the log of the run that has this file of starts and stops."""
    now = time.time()
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now % 1 * 1000):03} {level:<7} {text}\n"
    with suppress(OSError), os.fdopen(os.open(life.with_name("log.txt"), _FLAGS), "r+b", buffering=0) as file:
        file.write(line.encode())


def add_stop(life: Path, pid: int, step: int | None, state: str, why: str | None, **details: str | None) -> bool:
    """Records in a run's file of starts and stops how it ended, if this process's life is the last and has no stop; returns
    whether. Nothing is recorded where no training was begun, or there is no room.
    """
    known = {name: value for name, value in details.items() if value}
    stop = {"event": "stop", "time": round(time.time(), 3), "step": step, "state": state, "why": why, **known}
    with (
        suppress(OSError, ValueError, LookupError, TypeError, RecursionError),
        os.fdopen(os.open(life, _FLAGS), "r+b", buffering=0) as file,
    ):
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return False
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST))
        last = json.loads(file.read(_LAST).splitlines()[-1])
        if last["event"] != "stop" and last["pid"] == pid:
            file.write(f"{json.dumps(stop)}\n".encode())
            return True
    return False
