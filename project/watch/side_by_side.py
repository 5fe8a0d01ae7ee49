"""The page of several runs, compared.html: a table with a row for each, their curves, and what differs in their settings."""

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from project.cluster.settings import differing
from project.watch.charts import COLOURS, Chart, Line, number
from project.watch.curves import Point
from project.watch.figures import Rates, best, common_direction, did_not_learn, metrics, scaling, sweep, used_rates
from project.watch.history import BESIDE, History
from project.watch.pages import rendered
from project.watch.report import PAGE

_METRICS = 40  # columns
_SETTINGS = 200
_CHOSEN = 5  # columns of settings that differ
_BY_RANKS = ("trainer.devices", "trainer.num_nodes")  # which a column of its own tells


class Row(NamedTuple):
    """A run in the table."""

    history: History
    colour: str
    link: str
    ranks: str
    speed: float | None
    efficiency: float | None
    rates: Rates | None
    verdict: str
    chosen: list[object]
    """The values of settings that differ."""
    values: list[tuple[Point | None, Point | None]]
    """The last and the best point of each metric."""


def compared(histories: Sequence[History], place: Path) -> str:
    """Returns the page of several runs. `place`: the folder that it is written to, from where it links to the runs' pages."""
    every = metrics(histories)[:_METRICS]
    tags = [tag for tag in every if tag == every[0] or _has_column(tag, histories)]
    changes = differences(histories)
    by_class = [{name: _by_class(values[at]) for name, values in changes.items()} for at in range(len(histories))]
    plain = {name: values for name, values in differing(by_class).items() if not any(map(_is_nested, values))}
    chosen = [name for name in plain if name not in _BY_RANKS][:_CHOSEN]
    x_name = "samples" if all(history.global_batch for history in histories) else "steps"
    efficiency, rates = scaling(histories), [used_rates(history) for history in histories]
    rows = [
        Row(
            history,
            COLOURS[at % len(COLOURS)],
            os.path.relpath(history.folder.absolute() / PAGE, place.absolute()),
            ", then ".join(ranks for ranks, _ in groupby(str(life.ranks) for life in history.lives)),
            history.recent_median("speed/samples_per_s"),
            efficiency[at],
            rates[at],
            did_not_learn(history),
            [plain[name][at] for name in chosen],
            [_ends(history, tag) for tag in tags],
        )
        for at, history in enumerate(histories)
    ]
    return rendered(
        "runs.html",
        title=f"{len(histories)} runs",
        rows=rows,
        tags=tags,
        chosen=chosen,
        best=_best(histories),
        common=_common(histories),
        better=[common_direction(tag, histories) for tag in tags],
        winners=_winners(rows, tags, histories),
        ended=len({history.badge for history in histories}) > 1,
        moved=len({history.step for history in histories}) > 1,
        manned=len({(row.ranks, len(row.history.lives)) for row in rows}) > 1,
        efficient=any(ratio is not None for ratio in efficiency),
        rated=len({str(used) for used in rates}) > 1,
        parallel=sweep(histories, plain),
        axes=[{"name": x_name}, {"name": "hours of training"}],
        marks=[],
        sections={"Curves": _charts(histories, [*every, "speed/samples_per_s"], x_name)},
        differences=dict([*changes.items()][:_SETTINGS]),
    )


def _ends(history: History, tag: str) -> tuple[Point | None, Point | None]:
    """Returns the last and the best point of a metric."""
    return (history.curves[tag][-1] if tag in history.curves else None), best(history, tag)


def _has_column(tag: str, histories: Sequence[History]) -> bool:
    """Returns whether a metric differs between runs, and is not logged by epoch, too, in all of them: an epoch's mean has
    less noise, and the table has room for one of both.
    """
    by_epoch = all(f"{tag}_epoch" in history.curves for history in histories if tag in history.curves)
    return not by_epoch and len({tuple(point and point.value for point in _ends(history, tag)) for history in histories}) > 1


def _by_class(value: object) -> object:
    """Returns the arguments of a list of classes (callbacks, say), by their names; anything else as it is."""
    if not (isinstance(value, list) and all(isinstance(part, dict) and "class_path" in part for part in value)):
        return value
    return {str(part["class_path"]).rpartition(".")[2]: part.get("init_args") or "yes" for part in value}


def _is_nested(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(part, (dict, list)) for part in value))


def _best(histories: Sequence[History]) -> str:
    """Returns which run is the best, by the metric that all are judged by; '' where they are judged by different ones."""
    judged = [(history.best, history) for history in histories if history.best]
    if len({history.monitored for _, history in judged}) != 1:
        return ""
    tag, mode = judged[0][1].monitored or ("", "")
    point, history = min(judged, key=lambda pair: best_first(pair[1]))
    better = "lower" if mode == "min" else "higher"
    return f"The best by {tag} ({better} is better): {history.name}, {number(point.value)} at step {point.step:,}."


def best_first(history: History) -> tuple[bool, str, float]:
    """Returns the key that sorts runs: the best first by the metric that they are judged by; runs without any come last."""
    if not (history.monitored and history.best):
        return True, "", 0.0
    tag, mode = history.monitored
    return False, tag, -history.best.value if mode == "max" else history.best.value


def _common(histories: Sequence[History]) -> dict[str, str]:
    """Returns what makes runs comparable: steps, batch, seed and processes, each with the value of all, or with their range."""
    facts: dict[str, list[object]] = {
        "steps": [history.step for history in histories],
        "global batch": [history.global_batch for history in histories],
        "seed": [history.config.get("seed_everything") for history in histories],
        "ranks": [history.lives[-1].ranks if history.lives else None for history in histories],
        "starts": [len(history.lives) for history in histories],
        "state": [history.badge for history in histories],
    }
    return {name: _range(values) for name, values in facts.items() if any(value is not None for value in values)}


def _range(values: Sequence[object]) -> str:
    texts = list(dict.fromkeys(f"{value:,}" if isinstance(value, int) else str(value) for value in values))
    return texts[0] if len(texts) == 1 else f"not the same ({', '.join(texts[:4])}{', ...' * (len(texts) > 4)})"


def _winners(rows: Sequence[Row], tags: Sequence[str], histories: Sequence[History]) -> list[float | None]:
    """Returns the best value that any of the runs has of each metric."""
    winners: list[float | None] = []
    for at, tag in enumerate(tags):
        values = [point.value for row in rows if (point := row.values[at][1])]
        winners.append((min if common_direction(tag, histories) == "min" else max)(values) if values else None)
    return winners


def _charts(histories: Sequence[History], tags: Sequence[str], x_name: str) -> list[Chart]:
    """Returns a chart for each metric, with a line for each run: of one that has none of it, an empty one."""

    def placed(history: History, point: Point) -> tuple[float, float, float]:
        place = history.samples(point.step) if x_name == "samples" else None
        return place if place is not None else point.step, point.value, history.hours(point.time)

    def line(history: History, colour: int, tag: str) -> Line:
        return Line(history.name, [placed(history, point) for point in history.curves.get(tag, ())], colour)

    charts = (Chart(tag, [line(history, at, tag) for at, history in enumerate(histories)], legend=False) for tag in tags)
    return [chart for chart in charts if any(line.points for line in chart.lines)]


def differences(histories: Sequence[History]) -> Mapping[str, Sequence[object]]:
    """Returns the settings that are not the same in all runs, by their dotted names."""
    changes = differing([history.config for history in histories])
    if changes.get("data.seed") == changes.get("seed_everything"):  # which it follows
        changes.pop("data.seed", None)
    return {name: settings for name, settings in changes.items() if name not in BESIDE}
