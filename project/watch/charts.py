"""The charts as SVG: lines over steps or hours, with marks. One function, no library, and pages that open anywhere."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#3572b0", "#d1793b", "#3c9a5f", "#b8474f", "#8063b0", "#8a6a4f", "#c464a4", "#6f7780")
_WIDTH, _HEIGHT = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 10, 34
_POINTS = 400  # of a line; of more, each stretch shows its smallest and its largest value


@dataclass(frozen=True)
class Line:
    """A line of a chart; `colour` is the number of one."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0


@dataclass(frozen=True)
class Mark:
    """A vertical line of a chart, with its text."""

    x: float
    text: str
    fault: bool = False
    """Drawn in red."""


def chart(title: str, lines: Sequence[Line], x_name: str, marks: Sequence[Mark] = (), from_zero: bool = False) -> str:
    """Returns a figure with its title and its legend. Values that are not finite are marked at the upper edge."""
    finite = [(x, y) for line in lines for x, y in line.points if math.isfinite(y)]
    xs = [x for line in lines for x, _ in line.points]
    if not xs:
        return ""
    across = _Axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    low = 0.0 if from_zero else min((y for _, y in finite), default=0.0)
    up = _Axis(low, max((y for _, y in finite), default=1.0), _HEIGHT - _BOTTOM, _TOP)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']
    for value, at in up.ticks(5):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{escape(number(value))}</text>')
    for value, at in across.ticks(6):
        parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{escape(number(value))}</text>')
    parts.append(f'<text class="axis" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{escape(x_name)}</text>')
    for mark in marks:
        if across.low <= mark.x <= across.high:
            at, kind = across.at(mark.x), "fault" if mark.fault else "mark"
            parts.append(
                f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">'
                f"<title>{escape(mark.text)}</title></line>"
            )
    for line in lines:
        parts.append(_drawn(line, across, up))
    parts.append("</svg>")
    legend = "".join(
        f'<span><i style="background:{COLOURS[line.colour % len(COLOURS)]}"></i>{escape(line.name)}</span>' for line in lines
    )
    data = [{"name": line.name, "points": [[x, _json_number(y)] for x, y in _fewer(line.points)]} for line in lines]
    box = json.dumps({"lines": data, "x": [across.low, across.high, _LEFT, _WIDTH - _RIGHT], "name": x_name})
    return (
        f'<figure data-chart="{escape(box)}"><figcaption>{escape(title)}</figcaption>{"".join(parts)}'
        f'<div class="legend">{legend}</div><div class="reading"></div></figure>'
    )


class _Axis:
    """An axis, which maps values to places in the figure."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        if low == high:
            low, high = low - (abs(low) or 1.0) * 0.05, high + (abs(high) or 1.0) * 0.05
        self.low, self.high, self._start, self._end = low, high, start, end

    def at(self, value: float) -> float:
        return self._start + (self._end - self._start) * (value - self.low) / (self.high - self.low)

    def ticks(self, wanted: int) -> list[tuple[float, float]]:
        """Returns round numbers and their places, about as many as wanted."""
        rough = (self.high - self.low) / wanted
        power = 10.0 ** math.floor(math.log10(rough))
        step = next((power * each for each in (1, 2, 5) if power * each >= rough), power * 10)
        first = math.ceil(self.low / step - 1e-9)
        values = [each * step for each in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [(value, self.at(value)) for value in values]


def _drawn(line: Line, across: _Axis, up: _Axis) -> str:
    """Returns a line as SVG: broken where a value is not finite; there it has a cross."""
    colour = COLOURS[line.colour % len(COLOURS)]
    parts, path, before = [], [], False
    few = _fewer(line.points)
    for x, y in few:
        if not math.isfinite(y):
            parts.append(
                f'<text class="nan" x="{across.at(x):.1f}" y="{_TOP + 8}" text-anchor="middle">&times;<title>{y}</title></text>'
            )
            before = False
            continue
        path.append(f"{'L' if before else 'M'}{across.at(x):.1f} {up.at(y):.1f}")
        before = True
    parts.append(f'<path fill="none" stroke="{colour}" stroke-width="1.8" d="{"".join(path)}"/>')
    if len(few) < 30:
        parts += [
            f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="2" fill="{colour}"/>' for x, y in few if math.isfinite(y)
        ]
    return "".join(parts)


def _fewer(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= _POINTS:
        return list(points)
    kept = []
    size = -(-len(points) // (_POINTS // 2))
    for at in range(0, len(points), size):
        part = points[at : at + size]
        odd = [point for point in part if not math.isfinite(point[1])]
        ends = odd[:1] or [min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])]
        kept += sorted(set(ends))
    return kept


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def number(value: float) -> str:
    """Returns a number as a short text for people."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e6 or 0 < abs(value) < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
