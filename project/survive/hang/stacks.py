"""Locates a process: the stacks of its threads and of its loader processes.

Nothing here reads source files or asks the device: it must work in a process in which nothing else does.
"""

import faulthandler
import itertools
import multiprocessing
import os
import re
import sys
import sysconfig
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

from lightning.pytorch.trainer import trainer

from project.cluster.processes import DUMP, read_dump
from project.tracebacks import library_of

_PACKAGES = sysconfig.get_paths()["purelib"]
_CALL = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
"""A line of the stacks that faulthandler writes."""
_DEBUGGERS = ("bdb.py", "pdb.py", "pydevd.py", "debugpy")
LONGEST = 20_000  # characters of a rank's stacks
_PROCESSES = 3  # loader processes whose stacks are asked for


def open_dump() -> tuple[IO[bytes], str]:
    """Makes this process write its stacks into a file on a signal; loader processes that it forks do the same.

    The file has no name: it ends with the process. Its path in /proc is what others on this host read.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process
    with suppress(ValueError, OSError, AttributeError):
        faulthandler.register(DUMP, file=file, all_threads=True, chain=False)
    return file, f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Returns the frames from the outermost call to the innermost."""
    return [] if frame is None else [frame for frame, _ in traceback.walk_stack(frame)][::-1]


def main_frames() -> list[FrameType]:
    """Returns the frames of the main thread, from the outermost call to the innermost."""
    return _frames(sys._current_frames().get(threading.main_thread().ident or 0))


def thread_stacks() -> str:
    """Returns the stacks of all threads of this process but the calling one, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = sys._current_frames()
    stacks.pop(threading.get_ident(), None)
    main = threading.main_thread().ident
    lines = []
    for ident in sorted(stacks, key=lambda ident: ident != main):
        lines.append(f"Thread {names.get(ident, ident)} (most recent call last):")
        lines += [
            f'  File "{_short(frame.f_code.co_filename)}", line {frame.f_lineno}, in {frame.f_code.co_name}'
            for frame in _frames(stacks[ident])
        ]
    return "\n".join(lines)


def own_stacks(dump: str) -> tuple[str, str]:
    """Returns the innermost call that this process is in, and its stacks. `dump`: the file for those of loader processes."""
    loaders = loader_stacks(dump)
    place = innermost_loader_call(loaders) or innermost_call(main_frames())
    return place, f"{thread_stacks()}\n{loaders}".rstrip()[:LONGEST]


def _short(file: str) -> str:
    return file.removeprefix(_PACKAGES + os.sep)


def loader_stacks(path: str) -> str:
    """Returns the stacks of the loader processes."""
    return "\n".join(
        f"Loader process {child.name}:\n{text}"
        for child in multiprocessing.active_children()[:_PROCESSES]
        if child.pid and (text := read_dump(child.pid, path))
    )


def innermost_call(frames: list[FrameType]) -> str:
    """Returns the innermost call in the user's code; below the Trainer, where there is none, the innermost of all."""
    below = itertools.takewhile(lambda frame: frame.f_code.co_filename != trainer.__file__, reversed(frames))
    for frame in (*(frame for frame in below if not library_of(frame.f_code.co_filename)), *frames[-1:]):
        return f"{frame.f_code.co_name} ({_short(frame.f_code.co_filename)}:{frame.f_lineno})"
    return ""


def innermost_loader_call(text: str) -> str:
    """Returns the innermost call in the user's code that a loader process is in, from their stacks; '' where all wait."""
    for process in text.split("Loader process ")[1:]:
        for file, line, name in _CALL.findall(process.partition("in _worker_loop")[0]):
            if not library_of(file):
                return f"{name} ({file}:{line}), in a loader process"
    return ""


def in_debugger(frames: list[FrameType]) -> bool:
    """Returns whether a debugger is among the frames: the user looks at the process, and it does not hang."""
    return any(name in frame.f_code.co_filename for frame in frames for name in _DEBUGGERS)


def in_checkpoint(frames: list[FrameType]) -> bool:
    """Returns whether a checkpoint is read or written. torch has a file of that name that computes activations again."""
    places = (Path(frame.f_code.co_filename).parts[-2:] for frame in frames)
    return any("checkpoint" in part for place in places if place != ("utils", "checkpoint.py") for part in place)


def in_collective(frames: list[FrameType]) -> bool:
    inside = os.path.join("torch", "distributed", "")
    return any(inside in frame.f_code.co_filename and "/nn/" not in frame.f_code.co_filename for frame in frames)
