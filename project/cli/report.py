"""The verb `report`: `python -m project report RUN [RUN ...]` writes report.html for each run; several also on one page.

It reads the runs' folders, which may belong to runs in training, or to runs that were killed.
"""

from collections.abc import Sequence
from pathlib import Path

from project.cli.reading import run_parser, show
from project.config_files import RUNS, run_folder, run_names
from project.errors import UserError
from project.untrusted import write_text
from project.watch.charts import number
from project.watch.history import FILE, History, held, read_history
from project.watch.report import PAGE, SUMMARY, facts, refuse_nothing, write
from project.watch.side_by_side import best_first, compared

_ABOUT = f"Writes {PAGE} into a run's folder, and {SUMMARY} for programs; of several runs also a page that compares them."


def main(words: Sequence[str]) -> int:
    """Writes the page, prints what is most important, and returns the exit code."""
    parser = run_parser("report", _ABOUT, nargs="+")
    parser.add_argument(
        "--out", type=Path, help="the file of the page that compares several runs (default: compared.html beside them)"
    )
    given = parser.parse_args(words)
    # A shell's lightning_logs/* also names earlier comparisons.
    runs = [name for name in run_names(given.run, FILE) if not name.endswith(".html")]
    return _write(runs or given.run, given.out)


def _lines(histories: Sequence[History]) -> list[str]:
    """Returns a line for each run."""
    rows = []
    for history in histories:
        last = ""
        if history.monitored and history.best:
            last = f"best {history.monitored[0]} {number(history.best.value)} at step {history.best.step:,}"
        rows.append((history.name, history.badge, f"step {history.step:,}", last))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _write(names: Sequence[str], out: Path | None) -> int:
    histories = []
    for folder in (run_folder(name, FILE) for name in names):
        histories.append(read_history(folder, folder.absolute().name, in_training=held(folder / ".lock")))
        refuse_nothing(histories[-1])
    try:
        pages = [write(history) for history in histories]
        histories.sort(key=best_first)
        if len(histories) == 1:
            show(f"{histories[0].name}: {pages[0]}")
            for name, text in facts(histories[0]).items():
                if text:
                    show(f"  {name:18} {text}")
        else:
            show("\n".join(_lines(histories)))
            places = {history.folder.parent for history in histories}
            place = out or (places.pop() if len(places) == 1 else Path(RUNS)) / "compared.html"
            place.parent.mkdir(parents=True, exist_ok=True)
            write_page = Path.write_text if out else write_text  # a path that is named may be a pipe
            write_page(place, compared(histories, place.parent))
            show(f"Side by side: {place}")
    except BrokenPipeError:  # nobody reads it any more
        raise
    except OSError as error:
        raise UserError(f"The report can't be written: {error}. HINT: make room, or ask who owns the folder.") from error
    return 0
