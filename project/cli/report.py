"""The verb `report`: `python -m project report RUN [RUN ...]` writes report.html for each run; several also on one page.

It reads the runs' folders, which may belong to runs in training, or to runs that were killed.
"""

from collections.abc import Sequence
from pathlib import Path

from project.cli.reading import run_parser
from project.config_files import RUNS, run_folder
from project.errors import UserError
from project.untrusted import printable, write_text
from project.watch.history import FILE, held, read_history
from project.watch.report import PAGE, SUMMARY, facts, refuse_nothing, write
from project.watch.side_by_side import compared

_ABOUT = f"What a run did, on one page: {PAGE} in its folder, and {SUMMARY} for programs. Several runs also side by side."


def main(words: Sequence[str]) -> int:
    """Writes the page, prints what is most important, and returns the exit code."""
    parser = run_parser("report", _ABOUT, nargs="+")
    parser.add_argument(
        "--out", type=Path, help="of several runs: where the page goes (compared.html beside them, if not given)"
    )
    given = parser.parse_args(words)
    return _write(list(dict.fromkeys(given.run)), given.out)


def _write(names: Sequence[str], out: Path | None) -> int:
    histories = []
    for folder in (run_folder(name, FILE) for name in names):
        histories.append(read_history(folder, folder.absolute().name, in_training=held(folder / ".lock")))
        refuse_nothing(histories[-1])
    try:
        for history in histories:
            print(printable(f"{history.name}: {write(history)}"))
            for name, text in facts(history).items():
                if text:
                    print(printable(f"  {name:18} {text}"))
        if len(histories) > 1:
            places = {history.folder.parent for history in histories}
            place = out or (places.pop() if len(places) == 1 else Path(RUNS)) / "compared.html"
            place.parent.mkdir(parents=True, exist_ok=True)
            (Path.write_text if out else write_text)(
                place, compared(histories, place.parent)
            )  # a path that is named may be a pipe
            print(f"Side by side: {place}")
    except OSError as error:
        raise UserError(f"The report can't be written: {error}. HINT: make room, or ask who owns the folder.") from error
    return 0
