"""report.html: what a run did, on one page that opens anywhere, without a server or a network; or several runs side by side.

And summary.json beside it, for programs.
"""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from project.cluster.settings import flat
from project.errors import UserError
from project.watch.charts import Line, Mark, chart, number
from project.watch.history import BESIDE, History, Life, date

PAGE, SUMMARY = "report.html", "summary.json"
_CHARTS = 24  # of what a module logs
_SAID = 60  # warnings: the last ones
_STAGES = ("train", "val", "test")
_SPEED = {
    "samples/s": (("samples_per_s", "all ranks"),),
    "share of a step": (("data_wait", "waiting for data"), ("gradient_sync", "waiting for other ranks' gradients")),
    "the worst rank against the usual one": (("worst_data", "by its data"), ("worst_compute", "by its computing")),
    "TFLOP/s of a rank": (("tflops", "TFLOP/s"),),
    "share of the peak (MFU)": (("mfu", "MFU"),),
}
_STYLE = """
:root{color-scheme:light dark;--grid:#8884;--soft:#777}
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:24px auto;padding:0 16px}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:32px 0 8px}.soft{color:var(--soft)}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid var(--grid);
vertical-align:top}th{font-weight:600}.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(430px,1fr));gap:16px}
figure{margin:0;position:relative}figcaption{font-weight:600}svg{width:100%;height:auto;display:block}
svg text{font-size:11px;fill:var(--soft)}.grid{stroke:var(--grid)}.mark{stroke:#b8474f;stroke-dasharray:3 3}
svg .nan{fill:#b8474f;font-size:15px}.legend span{margin-right:14px;font-size:13px}
.legend i{display:inline-block;width:12px;height:3px;margin-right:5px;vertical-align:middle}
.reading{font-size:12px;color:var(--soft);min-height:18px}.bar{display:flex;height:22px;border-radius:3px;overflow:hidden}
pre{overflow:auto;padding:10px;border:1px solid var(--grid);font-size:13px}.ERROR,.CRITICAL,.failed,.killed{color:#b8474f}
"""
_SCRIPT = """
for (const f of document.querySelectorAll('figure')) {
  const c = JSON.parse(f.dataset.chart), svg = f.querySelector('svg'), out = f.querySelector('.reading');
  svg.addEventListener('mousemove', e => {
    const box = svg.getBoundingClientRect(), [low, high, left, right] = c.x;
    const px = (e.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const x = low + (px - left) / (right - left) * (high - low);
    out.textContent = c.lines.filter(l => l.points.length).map(l => {
      const p = l.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      return `${l.name}: ${typeof p[1] === 'number' ? +p[1].toPrecision(5) : p[1]} at ${+p[0].toPrecision(6)}`;
    }).join('   ') + `  (${c.name})`;
  });
  svg.addEventListener('mouseleave', () => out.textContent = '');
}
"""


def write(history: History) -> Path:
    """The page and the summary of a run, in its folder."""
    (history.folder / SUMMARY).write_text(json.dumps(history.summary(), indent=1))
    path = history.folder / PAGE
    path.write_text(page(history))
    return path


def page(history: History) -> str:
    """Of one run."""
    return _html(
        f"Run {history.name}",
        [
            _head(history),
            *_section("Is it learning?", _charts(_learning(history), "steps")),
            *_section("Is it fast?", _where_time_went(history), _charts(_speed(history), "steps", from_zero=True)),
            *_section("Its life", _life(history)),
            *_section(f"What it warned of{_cut(history)}", _said(history)),
            *_section("Its configuration", f"<pre>{escape(history.config_text)}</pre>" if history.config_text else ""),
            *_section("Go on with it", _go_on(history)),
        ],
    )


def compared(histories: Sequence[History]) -> str:
    """Several runs on one page."""
    steps = all(one.global_batch for one in histories)
    x_name = "samples" if steps else "steps"
    return _html(
        f"{len(histories)} runs",
        [
            f"<h1>{len(histories)} runs</h1>",
            *_section("Side by side", _side_by_side(histories)),
            *_section(f"Over {x_name}", _charts(_of_all(histories, hours=False), x_name)),
            *_section("Over hours", _charts(_of_all(histories, hours=True), "hours")),
            *_section("What differs between their configurations", _differences(histories)),
        ],
    )


def _html(title: str, parts: Sequence[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"</head><body>{''.join(parts)}<script>{_SCRIPT}</script></body></html>\n"
    )


def _section(title: str, *content: str) -> Iterator[str]:
    if any(content):
        yield f"<h2>{escape(title)}</h2>"
        yield from content


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Cells are HTML already."""
    top = f"<tr>{''.join(f'<th>{one}</th>' for one in head)}</tr>" if head else ""
    return f"<table>{top}{''.join('<tr>' + ''.join(f'<td>{cell}</td>' for cell in row) + '</tr>' for row in rows)}</table>"


# One run -------------------------------------------------------------------------------------------------------------


def _head(history: History) -> str:
    rows = [[name, escape(value)] for name, value in facts(history).items() if value]
    return f"<h1>Run {escape(history.name)}</h1>{_table(rows)}"


def facts(history: History) -> dict[str, str]:
    """The figures of a run, in words."""
    last = history.lives[-1] if history.lives else None
    speed, batch = history.usual("speed/samples_per_s"), history.global_batch
    known = last.known if last else {}
    return {
        "state": f"{history.state}, after step {history.step:,}" + (f": {last.why}" if last and last.why else ""),
        "samples": f"{history.step * batch:,} in global batches of {batch:,}" if batch else "",
        "time": str(timedelta(seconds=round(history.seconds))) if history.seconds else "",
        "speed": f"{speed:,.0f} samples/s on {_ranks(last)}" if speed and last else "",
        "starts": f"{len(history.lives)}",
        "precision": str(known.get("precision", "")),
        "device": str(known.get("device", "")),
        "versions": ", ".join(f"{name} {value}" for name, value in known.get("versions", {}).items()),
        "commit": str(known.get("commit") or ""),
        "newest checkpoint": str(history.checkpoints[0][0]) if history.checkpoints else "",
    }


def _ranks(life: Life) -> str:
    return "1 rank" if life.ranks == 1 else f"{life.ranks} ranks"


def _marks(history: History) -> list[Mark]:
    """Each start but the first."""
    return [
        Mark(life.step, f"{date(life.time)}: started again at step {life.step} on {_ranks(life)}, was {before.state}")
        for before, life in zip(history.lives, history.lives[1:], strict=False)
    ]


def _learning(history: History) -> Iterator[tuple[str, list[Line], list[Mark]]]:
    """What has been logged, other than speed: training and validation of one thing in one chart."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for tag in history.curves:
        if _of_the_module(tag):
            stage, _, name = tag.partition("/")
            known = stage in _STAGES and name
            groups.setdefault((name if known else tag), []).append((stage if known else tag, tag))
    for name, tags in groups.items():
        lines = []
        for stage, tag in sorted(tags, key=lambda one: _order(one[0])):
            colour = _order(stage) if stage in _STAGES else 0
            lines.append(Line(tag, _over_steps(history, tag), colour))
        yield name, lines, _marks(history)


def _of_the_module(tag: str) -> bool:
    return not tag.startswith(("speed/", "run/")) and tag != "epoch"


def _order(stage: str) -> int:
    return _STAGES.index(stage) if stage in _STAGES else len(_STAGES)


def _over_steps(history: History, tag: str) -> list[tuple[float, float]]:
    return [(point.step, point.value) for point in history.curves[tag]]


def _speed(history: History) -> Iterator[tuple[str, list[Line], list[Mark]]]:
    for title, tags in _SPEED.items():
        there = [(f"speed/{tag}", name) for tag, name in tags if f"speed/{tag}" in history.curves]
        lines = [Line(name, _over_steps(history, tag), colour) for colour, (tag, name) in enumerate(there)]
        yield title, lines, _marks(history)


def _charts(found: Iterator[tuple[str, list[Line], list[Mark]]], x_name: str, from_zero: bool = False) -> str:
    drawn = [one for title, lines, marks in found if (one := chart(title, lines, x_name, marks, from_zero))]
    left = f'<p class="soft">and {len(drawn) - _CHARTS} more</p>' if len(drawn) > _CHARTS else ""
    return f'<div class="charts">{"".join(drawn[:_CHARTS])}</div>{left}' if drawn else ""


def _where_time_went(history: History) -> str:
    shares = [
        ("waiting for data", history.usual("speed/data_wait"), "#d1793b"),
        ("waiting for other ranks' gradients", history.usual("speed/gradient_sync"), "#8063b0"),
    ]
    known = [(name, share, colour) for name, share, colour in shares if share is not None and math.isfinite(share)]
    if not known:
        return ""
    known.append(("computing, and the rest", max(0.0, 1 - sum(share for _, share, _ in known)), "#3c9a5f"))
    bar = "".join(f'<div style="width:{100 * share:.2f}%;background:{colour}"></div>' for _, share, colour in known)
    legend = "".join(f'<span><i style="background:{colour}"></i>{name}: {share:.1%}</span>' for name, share, colour in known)
    return f'<p>Of a step, since the last start:</p><div class="bar">{bar}</div><div class="legend">{legend}</div>'


def _life(history: History) -> str:
    rows = []
    for life in history.lives:
        hosts = life.known.get("hosts", {})
        ended = f'<span class="{escape(life.state)}">{escape(life.state)}</span>'
        rows.append(
            [
                escape(date(life.time)),
                f"{life.step:,} to {life.end_step:,}",
                f"{_ranks(life)}: {escape(', '.join(f'{count} on {name}' for name, count in hosts.items()))}",
                escape(str(timedelta(seconds=round(life.seconds)))),
                ended + (f", {escape(life.why)}" if life.why else ""),
            ]
        )
    return _table(rows, ("started", "steps", "ranks", "lasted", "ended")) if rows else ""


def _cut(history: History) -> str:
    return f" (the last {_SAID} of {len(history.said)})" if len(history.said) > _SAID else ""


def _said(history: History) -> str:
    rows = [
        [escape(when), f'<span class="{level}">{level}</span>', escape(text)] for when, level, text in history.said[-_SAID:]
    ]
    return _table(rows) if rows else ""


def _go_on(history: History) -> str:
    if not history.checkpoints or not history.config_text:
        return ""
    folder = f"{history.folder.parent.name}/{history.name}"
    newest, config = history.checkpoints[0][0].name, f"{folder}/config.yaml"
    lines = [
        "# It goes on from its newest checkpoint, on any number of ranks:",
        f"python -m project fit --config {config} --run {history.name}",
        "# Its figures on the test set, with its best weights:",
        f"python -m project test --config {config} --run {history.name}",
        "# Its weights, in Python:",
        f'weights = torch.load("{folder}/checkpoints/{newest}", weights_only=True)["state_dict"]',
    ]
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


# Several -------------------------------------------------------------------------------------------------------------


def _side_by_side(histories: Sequence[History]) -> str:
    common = [tag for tag in histories[0].curves if all(tag in one.curves for one in histories)]
    shown = [tag for tag in common if _of_the_module(tag)]
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
    return _table(rows, ("", *(escape(one.name) for one in histories)))


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


def _of_all(histories: Sequence[History], hours: bool) -> Iterator[tuple[str, list[Line], list[Mark]]]:
    logged = (tag for one in histories for tag in one.curves)
    tags = dict.fromkeys(tag for tag in logged if _of_the_module(tag) or tag == "speed/samples_per_s")
    by_steps = not all(one.global_batch for one in histories)
    for tag in tags:
        lines = []
        for colour, one in enumerate(histories):
            each = 1 if by_steps else one.global_batch or 1
            points = [(one.hours(point.time) if hours else point.step * each, point.value) for point in one.curves.get(tag, ())]
            if points:
                lines.append(Line(one.name, points, colour))
        yield tag, lines, []


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
    return _table(rows, ("", *(escape(one.name) for one in histories)))


def refuse_nothing(history: History) -> None:
    """A folder that no run has written to has nothing to tell."""
    if not history.lives and not history.curves:
        raise UserError(
            f"{history.folder} has neither curves nor a life.jsonl: no training has begun there, or it was trained by an older "
            "version of this project. HINT: give the name of a run, or its folder."
        )
