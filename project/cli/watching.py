"""The verb `watch`: `python -m project watch RUN` follows a run elsewhere, from the files in its folder alone.

On a terminal one line that is written anew; elsewhere a line whenever something changes.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from project.cli.reading import ended, run_parser
from project.config_files import run_folder
from project.untrusted import LATEST, printable
from project.watch.charts import number
from project.watch.curves import Curves
from project.watch.history import FILE, PHASES, held, lives_of, longest

_ABOUT = "How a run gets on that goes on elsewhere, from the files in its folder alone; until it has finished, or Ctrl-C."
_FRESH = 120.0  # seconds without a sign of life, after which a run that nobody here holds is taken for dead
_METRICS = ("train/loss", "val/loss", "train/acc", "val/acc", "train/lr")


def main(words: Sequence[str]) -> int:
    """Follows the run, and returns the exit code: 0 when it has finished, or is in training (`--once`)."""
    parser = run_parser("watch", _ABOUT)
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="how often to look (5)")
    parser.add_argument("--once", action="store_true", help="look once; the exit code is 1 if the run is dead")
    given = parser.parse_args(words)
    if given.every <= 0:
        parser.error(f"--every is a number of seconds, not {given.every:g}")
    return ended(lambda: _follow(run_folder(given.run, FILE), given.every, given.once))


def _follow(folder: Path, every: float, once: bool) -> int:
    look = Look(folder)
    terminal, before = sys.stdout.isatty() and not once, ""
    while True:
        state, text = look()
        over = once or state == "finished"
        if terminal:
            print(f"\r\033[2K{printable(text)}, {look.age()}", end="\n" if over else "", flush=True)
        elif text != before:
            print(f"{time.strftime('%H:%M:%S')}  {printable(text)}, {look.age()}", flush=True)
        before = text
        if over:
            return int(once and state not in ("finished", "going on"))
        time.sleep(every)


class Look:
    """A look at a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._curves = Curves(folder)

    def __call__(self) -> tuple[str, str]:
        """Returns the state of the run, and a line about it."""
        newest = {tag: points[-1] for tag, points in self._curves.read().items()}
        lives = lives_of(self.folder / FILE, [(point.time, point.step) for point in newest.values()])
        if not lives:
            return "not started", "not a step yet"
        life = lives[-1]
        state = life.state
        if state == "killed" and life.why is None and (held(self.folder / ".lock") or self._silent() < _FRESH):
            state = "going on"
        of = life.known.get("of")
        parts = [f"step {life.end_step:,}/{of:,}" if of else f"step {life.end_step:,}"]
        parts += [f"{tag} {number(newest[tag].value)}" for tag in _METRICS if tag in newest]
        if (speed := newest.get("speed/samples_per_s")) and speed.time >= life.time:
            parts.append(f"{speed.value:,.0f} samples/s")
            parts.append(longest({name: newest[tag].value for name in PHASES if (tag := f"speed/{name}") in newest}))
        parts.append("1 rank" if life.ranks == 1 else f"{life.ranks} ranks on {len(life.known.get('hosts', ())) or 1} host(s)")
        done = life.end_step - life.step
        if state == "going on" and of and done > 0:  # at the pace since the last start
            parts.append(f"{_span((of - life.end_step) * (life.end - life.time) / done)} left")
        return state, "  ".join([*parts, f"{state}: {life.why.rstrip('.')}" if life.why else state])

    def _silent(self) -> float:
        """Returns the seconds since anything was written."""
        newest = 0.0
        for path in self.folder.iterdir():
            with suppress(OSError):  # it is gone, or leads nowhere
                newest = max(newest, path.stat().st_mtime)
        return max(0.0, time.time() - newest)

    def age(self) -> str:
        return f"last sign of life {_span(self._silent())} ago"


def _span(seconds: float) -> str:
    return str(timedelta(seconds=round(min(max(0.0, seconds), LATEST))))
