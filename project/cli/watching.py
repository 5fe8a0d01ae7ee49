"""The verb `watch`: `python -m project watch RUN` follows a run elsewhere, from the files in its folder alone.

On a terminal one line that is written anew; elsewhere a line whenever something changes.
"""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median

from project.cli.reading import run_parser
from project.cli.runs import is_of_readers
from project.config_files import run_folder
from project.untrusted import LATEST, printable
from project.watch.charts import number
from project.watch.curves import Curves, Point
from project.watch.fields import GAP, Field, Importance, fitted
from project.watch.goodput import goodput
from project.watch.history import (
    FILE,
    KEPT,
    PHASES,
    Life,
    best_point,
    held,
    lives_of,
    longest,
    monitored_curve,
    newest_run,
    of_the_module,
    shows_life,
)

_ABOUT = "Follows a run that trains elsewhere, by the files in its folder alone, until it has ended or Ctrl-C."
_FIRST = ("train/loss", "val/loss", "train/acc", "val/acc")  # of the metrics; the others as they were logged
_METRICS = 8  # that a line shows at most
_FORKS = ("_step",)  # of what Lightning logs twice: the last step's, beside the epoch's


def main(words: Sequence[str]) -> int:
    """Follows the run, and returns the exit code: 0 when it has finished, or is in training (`--once`)."""
    parser = run_parser("watch", _ABOUT)
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="the time between two looks (5)")
    parser.add_argument("--once", action="store_true", help="look once; the exit code is 1 if the run is dead")
    given = parser.parse_args(words)
    if given.every <= 0:
        parser.error(f"--every is a number of seconds, not {given.every:g}")
    return _follow(run_folder(given.run, FILE), given.every, given.once)


def _follow(folder: Path, every: float, once: bool) -> int:
    look = Look(folder)
    terminal, before = sys.stdout.isatty() and not once, ""
    while True:
        state, fields = look()
        text, age = GAP.join(field.text for field in fields), Field(Importance.PROGRESS, look.age())
        over = once or state == "finished"
        if terminal:
            line = fitted([*fields, age], shutil.get_terminal_size().columns - 1)
            print(f"\r\033[2K{printable(line)}", end="\n" if over else "", flush=True)
        elif text != before:
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {printable(text)}, {age.text}", flush=True)
        before = text
        if over:
            return int(once and state not in ("finished", "going on"))
        time.sleep(every)


class Look:
    """A look at a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._curves = Curves(folder, KEPT)
        self._points: Mapping[str, Sequence[Point]] = {}

    def __call__(self) -> tuple[str, list[Field]]:
        """Returns the state of the run, and the fields of a line about it."""
        points = self._curves.read()
        seen = [(point.time, point.step) for curve in points.values() for point in curve[-1:]]
        _, lives, self._points = newest_run(self.folder, lives_of(self.folder / FILE, seen), points)
        newest = {tag: curve[-1] for tag, curve in self._points.items()}
        if not lives:
            return "not started", [Field(Importance.PROGRESS, "not a step yet")]
        life = lives[-1]
        state = life.state
        if state == "killed" and life.why is None and (shows_life(life, self._silent()) or held(self.folder / ".lock")):
            state = "going on"
        spent = Field(Importance.PHASE, f"goodput {goodput(lives).shares.get('training', 0):.0%}")
        return state, [*self._fields(life, newest), spent, *self._ending(life, state)]

    def _fields(self, life: Life, newest: Mapping[str, Point]) -> list[Field]:
        """Returns the run's progress, metrics and speed."""
        of = life.known.get("of")
        fields = [Field(Importance.PROGRESS, f"step {life.end_step:,}/{of:,}" if of else f"step {life.end_step:,}")]
        judged = monitored_curve(life, newest)
        module = [tag for tag in newest if of_the_module(tag) and not tag.endswith(_FORKS)]
        first = [tag for tag in _FIRST if tag in module] + ([judged[0]] if judged else [])
        names = list(dict.fromkeys([*first, *module]))
        kinds = {names[0]: Importance.FIRST_METRIC} if names else {}
        kinds |= {judged[0]: Importance.MONITORED} if judged else {}
        last = max((newest[tag].step for tag in names), default=0)
        for tag in names[:_METRICS]:
            older = f" at step {newest[tag].step:,}" if newest[tag].step < last else ""
            fields.append(Field(kinds.get(tag, Importance.METRIC), f"{tag} {number(newest[tag].value)}{older}"))
        if len(names) > _METRICS:
            fields.append(Field(Importance.METRIC, f"and {len(names) - _METRICS} more"))
        if judged and (best := best_point(self._points[judged[0]], judged[1])):
            fields.append(Field(Importance.BEST, f"best {judged[0]} {number(best.value)} at step {best.step:,}"))
        speeds = [point.value for point in self._points.get("speed/samples_per_s", ()) if point.time >= life.time]
        if speeds:
            fields.append(Field(Importance.SPEED, f"{median(speeds):,.0f} samples/s"))
            shares = {name: newest[tag].value for name in PHASES if (tag := f"speed/{name}") in newest}
            fields += [Field(Importance.PHASE, longest(shares))] if shares else []
        ranks = "1 rank" if life.ranks == 1 else f"{life.ranks} ranks on {len(life.known.get('hosts', ())) or 1} host(s)"
        return [*fields, Field(Importance.RATE, ranks)]

    @staticmethod
    def _ending(life: Life, state: str) -> list[Field]:
        """Returns the time left and the state, or how the run has ended."""
        of, done = life.known.get("of"), life.end_step - life.step
        fields = []
        if state == "going on" and of and done > 0:  # at the pace since the last start
            fields.append(Field(Importance.PROGRESS, f"{_span((of - life.end_step) * (life.end - life.time) / done)} left"))
        text = f"{state}: {life.why.rstrip('.')}" if life.why else state
        return [*fields, Field(Importance.PROGRESS, f"{text} ({life.where})" if life.where else text)]

    def _silent(self) -> float:
        """Returns the seconds since anything was written."""
        newest = 0.0
        for path in self.folder.iterdir():
            if is_of_readers(path.name):
                continue
            with suppress(OSError):  # it is gone, or leads nowhere
                newest = max(newest, path.stat().st_mtime)
        return max(0.0, time.time() - newest)

    def age(self) -> str:
        return f"last sign of life {_span(self._silent())} ago"


def _span(seconds: float) -> str:
    return str(timedelta(seconds=round(min(max(0.0, seconds), LATEST))))
