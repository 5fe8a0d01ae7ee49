"""The common part of the verbs that read runs: the argument RUN, errors in a line, and exit codes. Imports nothing heavy."""

import argparse
import os
import sys
from collections.abc import Callable

from project.config_files import RUNS
from project.errors import WRONG, UserError
from project.untrusted import shortened


def run_parser(verb: str, about: str, nargs: str | None = None) -> argparse.ArgumentParser:
    """Returns the parser of a verb that takes a run, or several of them."""
    parser = argparse.ArgumentParser(f"python -m project {verb}", description=about)
    parser.add_argument("run", nargs=nargs, metavar="RUN", help=f"the name of a run in {RUNS}/, or its folder")
    return parser


def ended(verb: Callable[[], int], longest: int = 300) -> int:
    """Runs a verb, and returns its exit code, however it comes to its end. `longest`: characters of an error's cause."""
    try:
        return verb()
    except (UserError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # nobody reads it any more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"ERROR   {shortened(error, longest)}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
