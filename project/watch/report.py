"""The pages of runs: report.html, what a run did, and compared.html, several runs side by side. They open anywhere, without a
server or a network; the template is page.html, and charts.js draws. The file summary.json beside a report is for programs.
"""

import json
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import timedelta
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from project.cluster.settings import differing
from project.errors import UserError
from project.untrusted import printable, write_text
from project.watch.charts import COLOURS, HEALTH, OF_RANKS, SPEED, Chart, Line, Mark, number
from project.watch.curves import Point
from project.watch.history import BESIDE, PHASES, SKIPPED, History, Life, date, of_the_module

PAGE, SUMMARY = "report.html", "summary.json"
_FAULTS = 100  # marks: the last ones
_STAGES = ("train", "val", "test")
_FIRST = ("loss", "acc")  # of what is learned; the rest as it was logged
_SCRIPT = Path(__file__).with_name("charts.js").read_text()
_POLICY = (
    f"default-src 'none'; script-src 'sha256-{b64encode(sha256(_SCRIPT.encode()).digest()).decode()}'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
"""A Content-Security-Policy: the page runs its own script and no other, and loads nothing."""


def _ranks(life: Life) -> str:
    return "1 rank" if life.ranks == 1 else f"{life.ranks} ranks"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


_PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True, auto_reload=False
)
_PAGES.filters |= {"number": number, "date": date, "ranks": _ranks, "duration": _duration}
_PAGES.filters["colour"] = lambda colour: COLOURS[colour]
_PAGES.globals |= {"policy": _POLICY, "script": Markup(_SCRIPT), "most_charts": 24, "most_warnings": 60}


def write(history: History) -> Path:
    """Writes the page and the summary of a run into its folder."""
    write_text(history.folder / SUMMARY, json.dumps(history.summary(), indent=1))
    write_text(path := history.folder / PAGE, page(history))
    return path


def page(history: History) -> str:
    """Returns the page of one run."""
    shares = [(*PHASES[name], share) for name, share in history.shares.items() if math.isfinite(share)]
    marks = _marks(history)
    health = {**_of_ranks(history), **_named(history, HEALTH)}
    return _rendered(
        title=f"Run {history.name}",
        history=history,
        facts=facts(history),
        shares=shares,
        learning=_charts(_learning(history), marks=marks),
        speed=_charts(_named(history, SPEED), marks=marks, from_zero=True),
        health=_charts(health, marks=marks, from_zero=True),
    )


def _rendered(**values: object) -> str:
    return printable(_PAGES.get_template("page.html").render(values))


def _charts(named: Mapping[str, Sequence[Line]], **settings: Any) -> list[Chart]:
    return [Chart(title, lines, **settings) for title, lines in named.items() if any(line.points for line in lines)]


def facts(history: History) -> dict[str, str]:
    """Returns the figures of a run, as texts."""
    last = history.lives[-1] if history.lives else None
    speed, batch = history.recent_median("speed/samples_per_s"), history.global_batch
    known = last.known if last else {}
    return {
        "state": f"{history.state}, after step {history.step:,}" + (f": {last.why}" if last and last.why else ""),
        "samples": f"{history.step * batch:,} in global batches of {batch:,}" if batch else "",
        "time": _duration(history.seconds) if history.seconds else "",
        "speed": f"{speed:,.0f} samples/s on {_ranks(last)}" if speed and last else "",
        "starts": f"{len(history.lives)}",
        "precision": str(known.get("precision", "")),
        "device": str(known.get("device", "")),
        "versions": ", ".join(f"{name} {value}" for name, value in known.get("versions", {}).items()),
        "commit": str(known.get("commit") or ""),
        "image": str(known.get("image") or ""),
        "newest checkpoint": str(history.checkpoint or ""),
    }


def _marks(history: History) -> list[Mark]:
    """Returns a mark for each start but the first, and for each fault."""
    starts = [
        Mark(life.step, f"{date(life.time)}: started again at step {life.step} on {_ranks(life)}, was {before.state}")
        for before, life in zip(history.lives, history.lives[1:], strict=False)
    ]
    failed = [
        Mark(life.end_step, f"{date(life.end)}: failed after step {life.end_step}: {life.why}", "fault")
        for life in history.lives
        if life.state == "failed"
    ]
    left_out = [
        Mark(point.step, f"{date(point.time)}: step {point.step} was left out, it was not finite", "fault")
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
            line = Line(tag, [point[:2] for point in points], _STAGES.index(stage) if known else 0)
            charts.setdefault(name if known else tag, []).append(line)
    for lines in charts.values():
        lines.sort(key=lambda line: line.colour)
    return dict(sorted(charts.items(), key=lambda chart: chart[0] not in _FIRST))


def _named(history: History, wanted: Mapping[str, Mapping[str, tuple[str, int]]]) -> dict[str, list[Line]]:
    return {
        title: [
            Line(name, [point[:2] for point in history.curves.get(tag, ())], colour) for tag, (name, colour) in tags.items()
        ]
        for title, tags in wanted.items()
    }


def _of_ranks(history: History) -> dict[str, list[Line]]:
    """Returns charts with a line for each rank, named with its host."""
    charts: dict[str, list[Line]] = {}
    for start, title in OF_RANKS.items():
        named = [(tag, *tag.removeprefix(start).split(".", 1)) for tag in history.curves if tag.startswith(start)]
        by_rank = sorted(((int(rank), host, tag) for tag, rank, *host in named if rank.isdecimal() and len(rank) < 10))
        charts[title] = [
            Line(f"rank {rank}, {'.'.join(host)}", [point[:2] for point in history.curves[tag]], colour)
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


def compared(histories: Sequence[History]) -> str:
    """Returns the page of several runs."""
    figures = [tag for tag in histories[0].curves if of_the_module(tag) and all(tag in history.curves for history in histories)]
    rows = [
        ["state", *(f"{history.state}, step {history.step:,}" for history in histories)],
        ["ranks", *(", then ".join(ranks for ranks, _ in groupby(str(life.ranks) for life in h.lives)) for h in histories)],
        ["time", *(_duration(history.seconds) for history in histories)],
        ["starts", *(len(history.lives) for history in histories)],
        ["samples/s", *(number(history.recent_median("speed/samples_per_s")) for history in histories)],
        ["scaling efficiency", *("" if ratio is None else f"{ratio:.0%}" for ratio in scaling(histories))],
        *([tag, *(number(history.curves[tag][-1].value) for history in histories)] for tag in figures),
    ]
    x_name = "samples" if all(history.global_batch for history in histories) else "steps"
    return _rendered(
        title=f"{len(histories)} runs",
        names=["", *(history.name for history in histories)],
        side_by_side=rows,
        over_steps=_charts(_of_all(histories, x_name), x_name=x_name),
        over_hours=_charts(_of_all(histories, "hours"), x_name="hours"),
        differences=differences(histories),
    )


def scaling(histories: Sequence[History]) -> list[float | None]:
    """Returns the samples a second and rank, relative to the run with the fewest ranks."""
    speeds = [
        (history.recent_median("speed/samples_per_s"), history.lives[-1].ranks if history.lives else 0) for history in histories
    ]
    each = [(speed / ranks, ranks) if speed and ranks else None for speed, ranks in speeds]
    base = min((pair for pair in each if pair), key=lambda pair: pair[1], default=(1.0, 1))[0]
    return [pair[0] / base if pair else None for pair in each]


def _of_all(histories: Sequence[History], x_name: str) -> dict[str, list[Line]]:
    def x(history: History, point: Point) -> float:
        if x_name == "hours":
            return history.hours(point.time)
        return point.step * (history.global_batch or 1 if x_name == "samples" else 1)

    tags = dict.fromkeys(tag for history in histories for tag in history.curves)
    return {
        tag: [
            Line(history.name, [(x(history, point), point.value) for point in history.curves[tag]], colour)
            for colour, history in enumerate(histories)
            if tag in history.curves
        ]
        for tag in tags
        if of_the_module(tag) or tag == "speed/samples_per_s"
    }


def differences(histories: Sequence[History]) -> dict[str, list[Any]]:
    """Returns the settings that are not the same in all runs, by their dotted names."""
    changes = differing([history.config for history in histories])
    return {name: settings for name, settings in changes.items() if name not in BESIDE}
