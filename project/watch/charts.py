"""The charts of the pages: lines over steps or hours, with marks, which the page's script (charts.js) draws."""

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from project.watch.history import PHASES, SKIPPED

Points = Sequence[tuple[float, float]]

COLOURS = ("#3572b0", "#d1793b", "#3c9a5f", "#b8474f", "#8063b0", "#8a6a4f", "#c464a4", "#6f7780")
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
_POINTS = 400  # of a line; of more, each stretch shows its smallest and its largest value


class Line(NamedTuple):
    """A line of a chart; `colour` is the number of one."""

    name: str
    points: Points
    colour: int = 0


class Mark(NamedTuple):
    """A vertical line of a chart, with its text; a `fault` is drawn in red."""

    x: float
    text: str
    kind: str = "mark"


class Chart(NamedTuple):
    """A chart with its title."""

    title: str
    lines: Sequence[Line]
    x_name: str = "steps"
    marks: Sequence[Mark] = ()
    from_zero: bool = False

    @property
    def data(self) -> str:
        """Returns what the script of the page draws, as JSON; values that are not finite are texts."""
        lines = [
            {
                "name": line.name,
                "colour": COLOURS[line.colour % len(COLOURS)],
                "points": [[x, y if math.isfinite(y) else str(y)] for x, y in _fewer(line.points)],
            }
            for line in self.lines
        ]
        return json.dumps({"lines": lines, "marks": self.marks, "x_name": self.x_name, "from_zero": self.from_zero})


def _fewer(points: Points) -> Points:
    if len(points) <= _POINTS:
        return points
    kept = [points[0], points[-1]]  # where a mark lies: a run that failed, or its first step
    size = -(-len(points) // (_POINTS // 2))
    for at in range(0, len(points), size):
        part = points[at : at + size]
        odd = [point for point in part if not math.isfinite(point[1])]
        ends = odd[:1] or [min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])]
        kept += ends
    return sorted(set(kept))


def number(value: float | None) -> str:
    """Returns a number as a short text for people."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e6 or 0 < abs(value) < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
