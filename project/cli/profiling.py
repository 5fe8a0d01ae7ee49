"""The verb `profile`: `python -m project profile RUN` asks a run, here or elsewhere, to record some steps, and shows them."""

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from project.cli.reading import run_parser
from project.cli.watching import Look
from project.config_files import run_folder
from project.errors import UserError
from project.untrusted import printable, read_end, write_text
from project.watch.asked import FILE, FOLDER, Asked
from project.watch.history import FILE as LIFE
from project.watch.history import lives_of

_ABOUT = (
    "Makes a running run record a few steps. Writes the traces, for https://ui.perfetto.dev, and a table for each rank "
    f"into {FOLDER}/ in its folder, and prints the tables."
)
_TABLE = re.compile(r"step-\d{9,18}-rank\d{1,9}\.txt")
_LONGEST = 1 << 20  # bytes of a table
_PAUSE = 0.2
_AFTER_OTHERS = 60.0  # seconds that a rank's profile may come later than the first one's


def main(words: Sequence[str]) -> int:
    """Asks, waits and shows; returns the exit code."""
    parser = run_parser("profile", _ABOUT)
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="the number of steps (5)")
    parser.add_argument("--ranks", default="0", metavar="0,1,...", help="the ranks, or all (0)")
    parser.add_argument("--memory", action="store_true", help="also record what is allocated, and what the memory holds")
    given = parser.parse_args(words)
    try:
        ranks = None if given.ranks == "all" else [int(rank) for rank in given.ranks.split(",")]
        request = Asked(given.steps, ranks, given.memory)
    except UserError as error:
        parser.error(str(error))
    except ValueError:
        parser.error(f"--ranks is a list as in 0,1, or all, and not {given.ranks}")
    return _ask(run_folder(given.run, LIFE), request)


def _ask(folder: Path, request: Asked) -> int:
    look = Look(folder)
    state, _ = look()
    if state != "going on":
        raise UserError(f"The run {folder.name} is not running ({state}). HINT: profile.step in its YAML.")
    ranks = lives_of(folder / LIFE)[-1].ranks
    wanted = sorted({*(range(ranks) if request.ranks is None else request.ranks)})
    if wanted[-1] >= ranks:
        raise UserError(f"The run {folder.name} has no rank {wanted[-1]}: its ranks are 0 to {ranks - 1}.")
    if os.path.lexists(folder / FILE):
        raise UserError(f"Somebody asks already, and has had no answer yet. HINT: to take that back, remove {folder / FILE}.")
    before = _tables(folder)
    try:
        write_text(folder / FILE, json.dumps(asdict(request)))
    except OSError as error:
        raise UserError(f"The word can't be put into the run's folder: {error}.") from error
    try:
        return _show(look, wanted, before)
    finally:
        (folder / FILE).unlink(missing_ok=True)


def _tables(folder: Path) -> dict[str, float]:
    """Returns the tables' names, with the times of writing: the steps of a new start may have the numbers of earlier ones."""
    tables = {}
    for path in (folder / FOLDER).glob("step-*.txt"):
        with suppress(OSError):  # it leads nowhere
            if _TABLE.fullmatch(path.name):
                tables[path.name] = path.stat().st_mtime
    return tables


def _show(look: Look, wanted: Sequence[int], before: dict[str, float]) -> int:
    """Prints the tables in the order of the ranks, once all ranks have written theirs."""
    texts: dict[int, str] = {}
    first, why = float("inf"), ""
    while not why and len(texts) < len(wanted):
        for name, when in _tables(look.folder).items():
            rank = int(name.rpartition("rank")[2].removesuffix(".txt"))
            if before.get(name) != when and rank in wanted:
                texts[rank] = read_end(look.folder / FOLDER / name, _LONGEST)
                first = min(first, time.monotonic())
        missing = sorted({*wanted} - {*texts})
        if missing and not (look.folder / FILE).exists() and time.monotonic() > first + _AFTER_OTHERS:
            why = f"Of ranks {missing} there is nothing here: their hosts don't see this folder?"
        elif missing and (seen := look())[0] != "going on":
            why = f"The run has ended without an answer: {seen[1]}"
        time.sleep(_PAUSE)
    for _, text in sorted(texts.items()):
        print(printable(text), flush=True)
    if why:
        print(printable(why), file=sys.stderr)
        return 1
    print(f"The traces, for https://ui.perfetto.dev: {look.folder / FOLDER}")
    return 0
