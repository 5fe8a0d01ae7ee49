"""The page of a run, report.html: its course and why it ended. The file summary.json next to it is for programs."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from project.errors import UserError
from project.untrusted import printable, write_text
from project.watch.charts import COLOURS, HEALTH, OF_RANKS, SPEED, Chart, Line, Mark
from project.watch.curves import Picture, Point
from project.watch.figures import best, did_not_learn, direction, learning_rates, metrics
from project.watch.goodput import goodput
from project.watch.history import PHASES, SKIPPED, History, date, hint_of, of_the_module
from project.watch.pages import duration, ranks, rendered
from project.watch.run_files import LOG, file_to_link, log_end, newest_checkpoints, profiles, stacks

PAGE, SUMMARY = "report.html", "summary.json"
_RUNS = "lightning_logs"  # in which a run is known by its name
_FAULTS = 100  # marks: the last ones
_STAGES = ("train", "val", "test")
_FIRST = ("loss", "acc")  # of what is learned; the rest as it was logged
_PICTURES = 8 << 20  # bytes of all
_WARNINGS, _FIGURES = 60, 300  # rows
_LONGEST = 20_000  # characters of a traceback
_NO_CURVES = (
    "none: they are read from TensorBoard's events, and this folder has none. In a script another logger= takes their place. "
    'HINT: leave logger out, or give its short name (logger="csv"): then it comes beside them.'
)


class Figure(NamedTuple):
    """A metric's row: its last value, and its best one."""

    tag: str
    last: Point
    best: Point | None
    better: str | None


def write(history: History) -> Path:
    """Writes the page and the summary of a run into its folder."""
    spent = goodput(history.lives)
    summary = {**history.summary(), "elapsed": round(spent.elapsed, 3), "goodput": spent.shares}
    write_text(history.folder / SUMMARY, json.dumps(summary, indent=1))
    write_text(path := history.folder / PAGE, page(history))
    return path


def page(history: History) -> str:
    """Returns the page of one run."""
    parts = shares_of_a_step(history)
    shares = [(named, COLOURS[colour], parts[name]) for name, (named, colour) in PHASES.items() if name in parts]
    marks = _marks(history)
    ended = history.badge in ("failed", "lost")
    since = date(history.lives[-1].time) if history.lives else ""  # an error that has ended an earlier life has its mark
    return rendered(
        "run.html",
        title=f"Run {history.name}",
        history=history,
        facts={**facts(history), **({"state": f"{history.badge}, after step {history.step:,}"} if ended else {})},
        verdict=_verdict(history) if ended else {},
        unlearned=did_not_learn(history),
        stacks=stacks(history.folder),
        errors=0 if ended else sum(level in ("ERROR", "CRITICAL") and when >= since for when, level, _ in history.warnings),
        troubled=ended or _diverged(history),
        arguments=_arguments(history),
        log_end=log_end(history.folder) if ended else "",
        log_file=file_to_link(history.folder, history.folder / LOG),
        checkpoints=newest_checkpoints(history.folder),
        profiles=profiles(history.folder),
        pictures=_pictures(history),
        figures=[
            Figure(tag, history.curves[tag][-1], best(history, tag), direction(tag, history))
            for tag in metrics([history])[:_FIGURES]
        ],
        shares=shares,
        axes=[{"name": "steps"}, {"name": "wall time", "time": True, "ends": _ends(history)}],
        marks=marks,
        sections={
            "Is it learning?": _charts(_learning(history)),
            "Is it fast?": _charts(_named(history, SPEED), from_zero=True),
            "Is it healthy?": _charts({**_of_ranks(history), **_named(history, HEALTH)}, from_zero=True),
        },
        most_warnings=_WARNINGS,
    )


def shares_of_a_step(history: History) -> dict[str, float]:
    """Returns the shares of a step's time, by phase: medians, which don't add up to 1, and the rest is what they lack."""
    measured = {name: share for name, share in history.shares.items() if name != "rest" and math.isfinite(share)}
    whole = max(1.0, sum(measured.values()))
    parts = {name: share / whole for name, share in measured.items()}
    return {**parts, "rest": max(0.0, 1 - sum(parts.values()))} if parts else {}


def _diverged(history: History) -> bool:
    """Returns whether what the run has logged last of any metric is not finite."""
    return any(not math.isfinite(history.curves[tag][-1].value) for tag in metrics([history]))


def _ends(history: History) -> list[float]:
    """Returns the time of a run: from its first process on, as goodput counts it."""
    return [history.lives[0].began, history.lives[-1].end] if history.lives else []


def _arguments(history: History) -> dict[str, str]:
    """Returns what names a run on a command line: a run of this folder by its name, another by its path."""
    folder = history.folder.absolute()
    if folder == Path(_RUNS).absolute() / history.name:
        return {"folder": f"{_RUNS}/{history.name}", "name": history.name, "place": f"cd {quote(str(Path.cwd()))} && "}
    return {"folder": str(folder), "name": str(folder), "place": ""}


def _charts(named: Mapping[str, Sequence[Line]], from_zero: bool = False) -> list[Chart]:
    return [Chart(title, lines, from_zero) for title, lines in named.items() if any(line.points for line in lines)]


def facts(history: History) -> dict[str, str]:
    """Returns the figures of a run, as texts."""
    last = history.lives[-1] if history.lives else None
    speed, batch = history.recent_median("speed/samples_per_s"), history.global_batch
    known, spent = last.known if last else {}, goodput(history.lives)
    hosts: Mapping[str, int] = known.get("hosts", {})
    return {
        "state": f"{history.badge}, after step {history.step:,}" + (f": {last.why}" if last and last.why else ""),
        "host": ", ".join(f"{name} ({count})" if len(hosts) > 1 else name for name, count in hosts.items()),
        "user": str(known.get("user") or ""),
        "started": date(history.lives[0].began) if last else "",
        "ended": date(last.end) if last and history.badge != "running" else "",
        "samples": f"{history.samples(history.step):,} in global batches of {batch:,}" if batch else "",
        "time": duration(spent.elapsed) if spent.elapsed else "",
        "goodput": str(spent),
        "speed": f"{speed:,.0f} samples/s on {ranks(last)}, in the median window" if speed and last else "",
        "starts": f"{len(history.lives)}",
        "precision": str(known.get("precision", "")),
        "device": str(known.get("device", "")),
        "versions": ", ".join(f"{name} {value}" for name, value in known.get("versions", {}).items()),
        "commit": str(known.get("commit") or ""),
        "image": str(known.get("image") or ""),
        "curves": _NO_CURVES if history.step and not history.curves else "",
        "newest checkpoint": str(history.checkpoint or ""),
        "command": str(known.get("command") or ""),
    }


def _verdict(history: History) -> dict[str, str]:
    """Returns what a run died of: the cause in a sentence, what mends it, the place in the user's code, the
    traceback, as far as known.
    """
    last = history.lives[-1]
    cause = (last.why or "").partition(" HINT:")[0]
    texts = {"cause": cause, "where": last.where, "traceback": last.traceback, "hint": hint_of(history)}
    return {name: printable(text, _LONGEST) for name, text in texts.items() if text}


def _pictures(history: History) -> dict[str, Picture]:
    """Returns the newest pictures, as many as a page should have."""
    shown, room = {}, _PICTURES
    for tag, picture in sorted(history.pictures.items()):
        room -= len(picture.png)
        if room >= 0:
            shown[tag] = picture
    return shown


def _marks(history: History) -> list[Mark]:
    """Returns a mark for each start but the first, and for each fault."""
    starts = [
        Mark(
            (life.step, life.time), f"{date(life.time)}: started again at step {life.step} on {ranks(life)}, was {before.state}"
        )
        for before, life in pairwise(history.lives)
    ]
    failed = [
        Mark((life.end_step, life.end), f"{date(life.end)}: {life.state} after step {life.end_step}: {life.why}", "fault")
        for life in history.lives
        if life.state == "failed" or (life.state == "killed" and life.why)
    ]
    left_out = [
        Mark((point.step, point.time), f"{date(point.time)}: step {point.step} was left out, it was not finite", "fault")
        for point in history.curves.get(SKIPPED, ())
    ]
    return [*starts, *failed, *left_out[-_FAULTS:]]


def _learning(history: History) -> dict[str, list[Line]]:
    """Returns what was logged, other than speed: training and validation of one thing in one chart."""
    charts: dict[str, list[Line]] = {}
    for tag, points in history.curves.items():
        if of_the_module(tag):
            stage, _, name = tag.partition("/")
            known = stage in _STAGES and name
            line = Line(tag, points, _STAGES.index(stage) if known else 0)
            charts.setdefault(name if known else tag, []).append(line)
    if not any(line.points is learning_rates(history) for lines in charts.values() for line in lines):
        charts["lr"] = [Line("as the schedule set it", learning_rates(history))]
    for lines in charts.values():
        lines.sort(key=lambda line: line.colour)
    return dict(sorted(charts.items(), key=lambda chart: chart[0] not in _FIRST))


def _named(history: History, wanted: Mapping[str, Mapping[str, tuple[str, int]]]) -> dict[str, list[Line]]:
    return {
        title: [Line(name, history.curves.get(tag, ()), colour) for tag, (name, colour) in tags.items()]
        for title, tags in wanted.items()
    }


def _of_ranks(history: History) -> dict[str, list[Line]]:
    """Returns charts with a line for each rank, named with its host."""
    charts: dict[str, list[Line]] = {}
    for start, title in OF_RANKS.items():
        named = [(tag, *tag.removeprefix(start).split(".", 1)) for tag in history.curves if tag.startswith(start)]
        by_rank = sorted(((int(rank), host, tag) for tag, rank, *host in named if rank.isdecimal() and len(rank) < 10))
        charts[title] = [
            Line(f"rank {rank}, {'.'.join(host)}", history.curves[tag], colour)
            for colour, (rank, host, tag) in enumerate(by_rank)
        ]
    return charts


def refuse_nothing(history: History) -> None:
    """Raises a UserError for a folder that no run has written to."""
    if not history.lives and not history.curves:
        raise UserError(
            f"{history.folder} has neither curves nor a life.jsonl: no training has begun there, or it was trained by an older "
            "version of this project. HINT: give the name of a run, or its folder."
        )
