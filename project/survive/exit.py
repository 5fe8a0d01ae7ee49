"""Ends the process without taking the libraries' objects apart, which takes over a second of a processor for each rank.

No other import than the standard library's: the program and the launcher load this first.
"""

import atexit
import faulthandler
import gc
import os
import resource
import sys
import threading
from contextlib import suppress
from io import BufferedRandom, BufferedWriter, TextIOWrapper
from itertools import dropwhile
from typing import NoReturn

_TOOLS = ("LD_PRELOAD", "CUDA_INJECTION64_PATH")
"""Environment variables of profilers and sanitizers, some of which write their results in C's exit handlers."""


def exit_fast(code: object) -> NoReturn:
    """Does what Python does when a program ends, but for the last: threads, exit handlers, unreachable objects, open files.

    What it leaves out is the destruction of modules, and C++'s destructors, which have aborted processes in which a thread of
    a store still runs. `code`: as `sys.exit` takes it.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does when a process ends
    atexit._run_exitfuncs()
    gc.collect()
    for each in gc.get_objects():
        if type(each) in (TextIOWrapper, BufferedWriter, BufferedRandom):  # `isinstance` would call a stranger's __class__
            with suppress(OSError, ValueError):
                each.flush()
    flush_and_exit(code)


def flush_streams() -> None:
    """Flushes standard output and error, where they are open."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # Python has None for one that was closed at the start
            stream.flush()


def flush_and_exit(code: object) -> NoReturn:
    """Ends the process without any of Python's cleanup but for its standard streams. `code`: as `sys.exit` takes it."""
    flush_streams()
    os._exit(code if isinstance(code, int) else int(code is not None))


def forbid_core_dumps() -> None:
    """Has this process, and those that it starts, end without a core dump: one of a process that maps a GPU's memory takes
    minutes, in which nobody knows what happened. NCCL ends a rank so (SIGABRT). Not with PYTHONFAULTHANDLER: somebody debugs.

    One byte is no room for a dump, and the kernel starts no program that would receive it; with 0 it would start that.
    """
    if not faulthandler.is_enabled():
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))


def is_the_program(name: str) -> bool:
    """Returns whether this process runs `python -m NAME` and nothing else: no debugger and no profiler around it."""
    words = [*dropwhile(lambda flag: flag.startswith("-") and flag != "-m", sys.orig_argv[1:])]
    is_watched = sys.flags.inspect or sys.gettrace() or sys.getprofile() or not os.environ.keys().isdisjoint(_TOOLS)
    return words[:2] == ["-m", name] and not is_watched
