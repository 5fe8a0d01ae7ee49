"""The charts of the pages: lines over steps, samples, hours or dates, which the page's script draws (page.js, by uPlot)."""

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from project.watch.history import PHASES, SKIPPED

Points = Sequence[tuple[float, float, float]]
"""Each has a place on the first axis, a value, and a place on the other axis: as in `curves.Point`."""

COLOURS = (
    *("#236fb4", "#df6e2b", "#1b7a5a", "#c92e4e", "#7454d6", "#8b661b", "#e05db5", "#6f7780", "#309ab3", "#639d25"),
    *("#f35a4f", "#ac71f3", "#c13179", "#796d1a", "#2597d1", "#0ea356", "#4761dc", "#c47f26", "#1f7780", "#ca66d8"),
)
"""They can be seen on white and on black: each has a contrast of more than 3."""
Shown = dict[str, dict[str, tuple[str, int]]]
"""Charts by their titles: the tags of their curves, with names and colours."""
SPEED: Shown = {
    "samples/s": {"speed/samples_per_s": ("all ranks", 0)},
    "shares of a step": {f"speed/{name}": named for name, named in PHASES.items()},
    "TFLOP/s of a rank": {"speed/tflops": ("TFLOP/s", 0)},
    "share of the peak (MFU)": {"speed/mfu": ("MFU", 0)},
}
HEALTH: Shown = {
    "the worst rank against the usual one": {
        "speed/worst_data": ("by its data", 1),
        "speed/worst_compute": ("by its computing", 0),
    },
    "steps left out": {SKIPPED: ("not finite", 3), "train/fp16_skipped_steps": ("by fp16's loss scaling", 5)},
    "memory of the largest rank, GB": {"run/memory_gb": ("host", 0), "run/gpu_memory_gb": ("GPU, at most", 1)},
    "busy cores of a rank": {"run/cpu_cores": ("cores", 0)},
    "share of time in which GPUs compute": {"run/gpu_use": ("GPUs", 0)},
    "seconds that a checkpoint takes": {"run/checkpoint_s": ("seconds, beside the training", 0)},
    "MB of a checkpoint": {"run/checkpoint_mb": ("MB", 0)},
}
OF_RANKS = {
    "ranks/data_ms/": "ms a step that a rank waits for its data",
    "ranks/compute_ms/": "ms a step that a rank computes",
}
_POINTS = 800  # of a line; of more, each stretch shows its smallest and its largest value
_FLAT = 1_000  # times the lower quartile


class Line(NamedTuple):
    """A line of a chart; `colour` is the number of one."""

    name: str
    points: Points
    colour: int = 0

    @property
    def stroke(self) -> str:
        return COLOURS[self.colour % len(COLOURS)]


class Mark(NamedTuple):
    """A vertical line of all charts, at a place on each axis, with its text; a `fault` is drawn in red."""

    x: tuple[float, float]
    text: str
    kind: str = "mark"


class Chart(NamedTuple):
    """A chart with its title. `legend`: whether its lines are named below it."""

    title: str
    lines: Sequence[Line]
    from_zero: bool = False
    legend: bool = True

    @property
    def data(self) -> str:
        """Returns what the script of the page draws, as JSON; values that are not finite are texts."""
        lines = []
        for line in self.lines:
            kept = _fewer(line.points)
            values = [_rounded(value, 6) if math.isfinite(value) else str(value) for _, value, _ in kept]
            places = [[_rounded(point[axis], 12) for point in kept] for axis in (0, 2)]
            lines.append({"name": line.name, "colour": line.stroke, "x": places, "y": values})
        return json.dumps({"lines": lines, "from_zero": self.from_zero, "log": self.log}, separators=(",", ":"))

    @property
    def log(self) -> bool:
        """Returns whether the chart begins logarithmic: a linear scale would show most of its values as a flat line."""
        values = sorted(value for line in self.lines for _, value, _ in line.points if math.isfinite(value))
        return bool(values) and values[0] > 0 and values[-1] > _FLAT * values[len(values) // 4]

    @property
    def odd(self) -> bool:
        """Returns whether a value is not finite."""
        return any(not math.isfinite(value) for line in self.lines for _, value, _ in line.points)


def _rounded(value: float, digits: int) -> float:
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


def _fewer(points: Points) -> Points:
    if len(points) <= _POINTS:
        return points
    kept = {0, len(points) - 1}
    size = -(-len(points) // (_POINTS // 2))
    for at in range(0, len(points), size):
        part = range(at, min(at + size, len(points)))
        odd = [number for number in part if not math.isfinite(points[number][1])]
        kept |= {*odd[:1]} or {min(part, key=lambda number: points[number][1]), max(part, key=lambda number: points[number][1])}
    return [points[number] for number in sorted(kept)]


def number(value: float | None) -> str:
    """Returns a number as a short text for people."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e6 or 0 < abs(value) < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
