"""The page that shows several runs side by side."""

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
    """Returns the page of several runs."""
    steps = all(history.global_batch for history in histories)
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
    common = [tag for tag in histories[0].curves if all(tag in history.curves for history in histories)]
    shown = [tag for tag in common if of_the_module(tag)]
    efficiency = scaling(histories)
    rows = [
        ["state", *(escape(f"{history.state}, step {history.step:,}") for history in histories)],
        ["ranks", *(escape(", then ".join(_in_turn(history))) for history in histories)],
        ["time", *(str(timedelta(seconds=round(history.seconds))) for history in histories)],
        ["starts", *(str(len(history.lives)) for history in histories)],
        ["samples/s", *(_figure(history.recent_median("speed/samples_per_s")) for history in histories)],
        ["scaling efficiency", *(f"{ratio:.0%}" if ratio is not None else "" for ratio in efficiency)],
        *([escape(tag), *(_figure(history.last(tag)) for history in histories)] for tag in shown),
    ]
    return table(rows, ("", *(escape(history.name) for history in histories)))


def _in_turn(history: History) -> list[str]:
    """Returns the numbers of ranks, in the order in which the run had them."""
    return [number for number, _ in groupby(str(life.ranks) for life in history.lives)]


def scaling(histories: Sequence[History]) -> list[float | None]:
    """Returns the samples a second and rank, relative to the run with the fewest ranks."""
    speeds = [
        (history.recent_median("speed/samples_per_s"), history.lives[-1].ranks if history.lives else 0) for history in histories
    ]
    each = [(speed / ranks, ranks) if speed and ranks else None for speed, ranks in speeds]
    known = [pair for pair in each if pair]
    base = min(known, key=lambda pair: pair[1])[0] if known else 1.0
    return [pair[0] / base if pair else None for pair in each]


def _figure(value: float | None) -> str:
    return "" if value is None else escape(number(value))


def _of_all(histories: Sequence[History], hours: bool) -> Iterator[Chart]:
    logged = (tag for history in histories for tag in history.curves)
    tags = dict.fromkeys(tag for tag in logged if of_the_module(tag) or tag == "speed/samples_per_s")
    by_steps = not all(history.global_batch for history in histories)
    for tag in tags:
        lines = []
        for colour, history in enumerate(histories):
            each = 1 if by_steps else history.global_batch or 1
            points = [
                (history.hours(point.time) if hours else point.step * each, point.value)
                for point in history.curves.get(tag, ())
            ]
            if points:
                lines.append(Line(history.name, points, colour))
        yield tag, lines


def differences(histories: Sequence[History]) -> dict[str, list[Any]]:
    """Returns the settings that are not the same in all runs, by their dotted names."""
    levels = [flat(history.config) for history in histories]
    names = dict.fromkeys(name for level in levels for name in level)
    values = {name: [level.get(name) for level in levels] for name in names if name not in BESIDE}
    return {name: settings for name, settings in values.items() if any(setting != settings[0] for setting in settings)}


def _differences(histories: Sequence[History]) -> str:
    settings = differences(histories)
    if not settings:
        return "<p>Nothing.</p>"
    rows = [[f"<code>{escape(name)}</code>", *(escape(str(value)) for value in values)] for name, values in settings.items()]
    return table(rows, ("", *(escape(history.name) for history in histories)))
