"""The figures of runs that others may want to compare: best values, efficiency, and a sweep's settings on parallel axes."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from project.cluster.settings import flat
from project.watch.charts import number
from project.watch.curves import Point
from project.watch.history import History, best_point, of_the_module

_LOWER = re.compile(r"(^|[/_.])(loss|err|ppl|perplexity|nll|mae|mse|rmse|wer|cer|fid)", re.IGNORECASE)
_HIGHER = re.compile(
    r"(^|[/_.])(acc|f1|auc|auroc|precision|recall|iou|miou|dice|map|psnr|ssim|bleu|rouge|r2|top\d|score)", re.IGNORECASE
)
_CHOSEN_BY = ("optimizer", "lr_scheduler", "lr_scaling", "lr_reference_batch", "label_smoothing")
"""The keys of a model that do not change how much it computes."""
_AXES, _CHOICES, _LABEL = 8, 12, 20  # settings of a sweep, texts on an axis, and characters of one
_LARGEST = 1e300  # an integer of a YAML may be larger than any float


def direction(tag: str, history: History) -> str | None:
    """Returns 'min' or 'max', whichever is better for a metric; None where neither its name nor the run tells."""
    known = history.lives[-1].known if history.lives else {}
    for place in (known, history.config.get("checkpoints")):
        if isinstance(place, Mapping) and place.get("monitor") == tag and place.get("mode") in ("min", "max"):
            return str(place["mode"])
    return "min" if _LOWER.search(tag) else "max" if _HIGHER.search(tag) else None


def best(history: History, tag: str) -> Point | None:
    """Returns the best point of a metric."""
    better = direction(tag, history)
    points = [point for point in history.curves.get(tag, ()) if math.isfinite(point.value)]
    return best_point(points, better) if better else None


def metrics(histories: Sequence[History]) -> list[str]:
    """Returns what any of the runs' modules have logged: first what was validated."""
    tags = dict.fromkeys(tag for history in histories for tag in history.curves if of_the_module(tag))
    return sorted(tags, key=lambda tag: (not tag.startswith(("val", "test")), direction(tag, histories[0]) is None))


def _kind(history: History) -> str | None:
    """Returns what a run computes in a step, as a text: its model and its global batch."""
    model = history.config.get("model")
    if not model or not history.global_batch:
        return None
    settings = flat(model)
    computed = {name: value for name, value in settings.items() if name.split(".")[0] not in _CHOSEN_BY}
    return json.dumps([computed, history.global_batch], sort_keys=True, default=str)


def scaling(histories: Sequence[History]) -> list[float | None]:
    """Returns the samples a second and rank, relative to the run with the fewest ranks of the same model and global batch;
    None where no other number of ranks has trained them.
    """
    each: dict[int, tuple[str, float, int]] = {}
    for place, history in enumerate(histories):
        speed, kind = history.recent_median("speed/samples_per_s"), _kind(history)
        if speed and kind and history.lives:
            each[place] = (kind, speed / history.lives[-1].ranks, history.lives[-1].ranks)
    ratios: list[float | None] = [None] * len(histories)
    for place, (kind, speed, _) in each.items():
        alike = [other for other in each.values() if other[0] == kind]
        if len({ranks for _, _, ranks in alike}) > 1:
            ratios[place] = speed / min(alike, key=lambda other: other[2])[1]
    return ratios


class Axis(NamedTuple):
    """An axis of parallel coordinates: where each run lies on it, from 0 to 1, and its texts, with their places."""

    name: str
    places: list[float | None]
    ticks: list[tuple[float, str]]


def axis(name: str, values: Sequence[object]) -> Axis | None:
    """Returns an axis for numbers, with a logarithmic scale where they spread widely, or for a few texts."""
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    numbers = [value for value in numbers if -_LARGEST < value < _LARGEST]
    if numbers and len(numbers) == sum(value is not None for value in values):
        logs = min(numbers) > 0 and max(numbers) / min(numbers) >= 10
        scale = math.log if logs else float
        low, high = scale(min(numbers)), scale(max(numbers))
        span = high - low or 1.0
        known = {value: (scale(value) - low) / span if high > low else 0.5 for value in numbers}
        places = [known.get(value) if isinstance(value, (int, float)) else None for value in values]
        ends = sorted(known) if len(known) <= _CHOICES else [min(known), max(known)]
        return Axis(name, places, [(known[value], number(value)) for value in ends])
    texts = ["null" if value is None else str(value) for value in values]
    choices = sorted({*texts})
    if not 1 < len(choices) <= _CHOICES:
        return None
    spots = {text: at / (len(choices) - 1) for at, text in enumerate(choices)}
    ticks = [(spot, text if len(text) <= _LABEL else f"...{text[-_LABEL:]}") for text, spot in spots.items()]
    return Axis(name, [spots[text] for text in texts], ticks)


def sweep(histories: Sequence[History], differences: Mapping[str, Sequence[object]]) -> list[Axis]:
    """Returns the axes of a sweep: the settings that differ, and last the best of its first metric."""
    metric = next((tag for tag in metrics(histories) if direction(tag, histories[0])), None)
    axes = [drawn for name, values in differences.items() if (drawn := axis(name, values))][:_AXES]
    if len(histories) < 3 or not axes or metric is None:
        return []
    values = [point.value if (point := best(history, metric)) else None for history in histories]
    last = axis(f"best {metric}", values)
    return [*axes, last] if last else []
