"""Several runs side by side, on one page."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from html import escape
from itertools import groupby
from typing import Any

from project.cluster.settings import flat
from project.watch.charts import Line, number
from project.watch.history import BESIDE, History
from project.watch.page import Chart, charts, html, of_the_module, section, table


def compared(histories: Sequence[History]) -> str:
    """Several runs on one page."""
    steps = all(one.global_batch for one in histories)
    x_name = "samples" if steps else "steps"
    return html(
        f"{len(histories)} runs",
        [
            f"<h1>{len(histories)} runs</h1>",
            *section("Side by side", _side_by_side(histories)),
            *section(f"Over {x_name}", charts(_of_all(histories, hours=False), x_name)),
            *section("Over hours", charts(_of_all(histories, hours=True), "hours")),
            *section("What differs between their configurations", _differences(histories)),
        ],
    )


def _side_by_side(histories: Sequence[History]) -> str:
    common = [tag for tag in histories[0].curves if all(tag in one.curves for one in histories)]
    shown = [tag for tag in common if of_the_module(tag)]
    efficiency = scaling(histories)
    rows = [
        ["state", *(escape(f"{one.state}, step {one.step:,}") for one in histories)],
        ["ranks", *(escape(", then ".join(_in_turn(one))) for one in histories)],
        ["time", *(str(timedelta(seconds=round(one.seconds))) for one in histories)],
        ["starts", *(str(len(one.lives)) for one in histories)],
        ["samples/s", *(_figure(one.usual("speed/samples_per_s")) for one in histories)],
        ["scaling efficiency", *(f"{one:.0%}" if one is not None else "" for one in efficiency)],
        *([escape(tag), *(_figure(one.last(tag)) for one in histories)] for tag in shown),
    ]
    return table(rows, ("", *(escape(one.name) for one in histories)))


def _in_turn(history: History) -> list[str]:
    """Numbers of ranks, as they followed each other."""
    return [number for number, _ in groupby(str(life.ranks) for life in history.lives)]


def scaling(histories: Sequence[History]) -> list[float | None]:
    """Samples a second and rank, against the run with the fewest ranks."""
    speeds = [(one.usual("speed/samples_per_s"), one.lives[-1].ranks if one.lives else 0) for one in histories]
    each = [(speed / ranks, ranks) if speed and ranks else None for speed, ranks in speeds]
    known = [one for one in each if one]
    base = min(known, key=lambda one: one[1])[0] if known else 1.0
    return [one[0] / base if one else None for one in each]


def _figure(value: float | None) -> str:
    return "" if value is None else escape(number(value))


def _of_all(histories: Sequence[History], hours: bool) -> Iterator[Chart]:
    logged = (tag for one in histories for tag in one.curves)
    tags = dict.fromkeys(tag for tag in logged if of_the_module(tag) or tag == "speed/samples_per_s")
    by_steps = not all(one.global_batch for one in histories)
    for tag in tags:
        lines = []
        for colour, one in enumerate(histories):
            each = 1 if by_steps else one.global_batch or 1
            points = [(one.hours(point.time) if hours else point.step * each, point.value) for point in one.curves.get(tag, ())]
            if points:
                lines.append(Line(one.name, points, colour))
        yield tag, lines


def differences(histories: Sequence[History]) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs, by their dotted names."""
    levels = [flat(one.config) for one in histories]
    names = dict.fromkeys(name for level in levels for name in level)
    values = {name: [level.get(name) for level in levels] for name in names if name not in BESIDE}
    return {name: found for name, found in values.items() if any(one != found[0] for one in found)}


def _differences(histories: Sequence[History]) -> str:
    found = differences(histories)
    if not found:
        return "<p>Nothing.</p>"
    rows = [[f"<code>{escape(name)}</code>", *(escape(str(value)) for value in values)] for name, values in found.items()]
    return table(rows, ("", *(escape(one.name) for one in histories)))
