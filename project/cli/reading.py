"""The common part of the verbs that read runs: the argument RUN, errors in a line, and exit codes. Imports nothing heavy."""

import argparse
import errno
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable

from project.config_files import RUNS
from project.errors import WRONG, UserError
from project.untrusted import printable, shortened


def run_parser(verb: str, about: str, nargs: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of a verb that takes a run, or several of them."""
    parser = argparse.ArgumentParser(f"python -m project {verb}", description=about)
    several = "; in a name * and ? stand for any letters" if nargs else ""
    parser.add_argument("run", nargs=nargs, metavar="RUN", help=f"the name of a run in {RUNS}/, or its folder{several}")
    return parser


def ended(verb: Callable[[], int], longest: int = 300) -> int:
    """Runs a verb, and returns its exit code, however it comes to its end. `longest`: characters of an error's cause."""
    try:
        code = verb()
        print(end="", flush=True)
        return code
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC) and sys.stdout is sys.__stdout__:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries once more to write it when it ends
        if isinstance(error, BrokenPipeError):  # nobody reads it any more
            return 0
        print(f"ERROR   {shortened(error, longest)}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def show(text: str) -> None:
    """Prints lines; those that are longer than a terminal's are folded between words, under where their text begins."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(folded(line, width) for line in printable(text).split("\n")), flush=True)


def folded(line: str, width: int | None) -> str:
    """Returns a line in parts of so many columns; None: as it is. A word that is longer, a path say, stays whole."""
    if width is None:
        return line
    title = re.match(r" *(?:\S+(?: \S+)* {2,})?", line)
    indent = " " * (title.end() if title and title.end() in range(1, 24) else 2)
    parts = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(parts) or line
