"""The figures of runs that others may want to compare: best values, efficiency, and a sweep's settings on parallel axes."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from project.cluster.settings import flat
from project.watch.charts import number
from project.watch.curves import LEARNING_RATE, Point
from project.watch.history import History, best_point, of_the_module

_LOWER = re.compile(r"(^|[/_.])(loss|err|ppl|perplexity|nll|mae|mse|rmse|wer|cer|fid)", re.IGNORECASE)
_HIGHER = re.compile(
    r"(^|[/_.])(acc|f1|auc|auroc|precision|recall|iou|miou|dice|map|psnr|ssim|bleu|rouge|r2|top\d|score)", re.IGNORECASE
)
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_RATE = re.compile(r"(.*[/_])?(lr|learning_rate)(-(?!.*(momentum|weight_decay)).*)?")
_TRAIN_LOSS = ("train/loss", "train/loss_step", "train_loss", "train_loss_step", "loss")
_BLOCKS, _JUDGED_FROM = 10, 8  # of a curve, whose means are compared; and points, of fewer of which nothing is judged
_MUCH = 0.2  # share by which the second half is better: that is not called no improvement, however large the noise
_BEYOND, _LEAST = 4.0, 0.002  # deviations of such a mean, and share of the first one, that are no improvement yet
_CHOSEN_BY = ("optimizer", "lr_scheduler", "lr_scaling", "lr_reference_batch", "label_smoothing")
"""The keys of a model that do not change how much it computes."""
_AXES, _CHOICES, _LABEL = 8, 12, 20  # settings of a sweep, texts on an axis, and characters of one
_WIDE = 30  # between the smallest and the largest positive number of a logarithmic axis, at least this factor
_PLACE_OF_ZERO, _APART = 0.12, 0.055  # shares of an axis: below its smallest positive number, and between two labels
_LARGEST = 1e300  # an integer of a YAML may be larger than any float


def direction(tag: str, history: History) -> str | None:
    """Returns 'min' or 'max', whichever is better for a metric; None where neither its name nor the run tells."""
    if history.monitored and history.monitored[0] == tag:
        return history.monitored[1]
    return "min" if _LOWER.search(tag) else "max" if _HIGHER.search(tag) else None


def common_direction(tag: str, histories: Sequence[History]) -> str | None:
    """Returns 'min' or 'max', whichever is better for a metric of several runs; None where nothing tells."""
    return next((better for history in histories if (better := direction(tag, history))), None)


def best(history: History, tag: str) -> Point | None:
    """Returns the best point of a metric."""
    better = direction(tag, history)
    return best_point(history.curves.get(tag, ()), better) if better else None


def metrics(histories: Sequence[History]) -> list[str]:
    """Returns what any of the runs' modules have logged: first what the runs are judged by, then what was validated."""
    tags = dict.fromkeys(tag for history in histories for tag in history.curves if of_the_module(tag))
    monitored = {history.monitored[0] for history in histories if history.monitored}

    def order(tag: str) -> tuple[bool, bool, bool]:
        return tag not in monitored, not tag.startswith(("val", "test")), common_direction(tag, histories) is None

    return sorted(tags, key=order)


def learning_rates(history: History) -> Sequence[Point]:
    """Returns the curve of the learning rate: the module's own, or else what was measured beside it."""
    own = [tag for tag in history.curves if of_the_module(tag) and _RATE.fullmatch(tag)]
    return history.curves.get(own[0] if own else LEARNING_RATE, ())


class Rates(NamedTuple):
    """The learning rates that a run has logged, each after a step, when the schedule may have set the next one's."""

    first: float
    peak: float
    last: float

    def __str__(self) -> str:
        return " \u2192 ".join(dict.fromkeys(f"{rate:.3g}" for rate in self))


def used_rates(history: History) -> Rates | None:
    """Returns the first, the highest and the last learning rate that a run has logged."""
    rates = [point.value for point in learning_rates(history) if math.isfinite(point.value)]
    return Rates(rates[0], max(rates), rates[-1]) if rates else None


def did_not_learn(history: History) -> str:
    """Returns a verdict on a run whose loss, or the metric that it is judged by, never got better than at its start by more
    than noise; nothing where it did, or where too little was logged.
    """
    loss = next((tag for tag in _TRAIN_LOSS if tag in history.curves), None)
    texts = []
    for tag in dict.fromkeys(filter(None, (loss, history.monitored and history.monitored[0]))):
        values = [point.value for point in history.curves[tag] if math.isfinite(point.value)]
        better = direction(tag, history)
        if better is None or len(values) < _JUDGED_FROM:
            continue
        if _improved(values if better == "max" else [-value for value in values]):
            return ""
        last = history.curves[tag][-1].value
        texts.append(f"{tag} {number(values[0])} \u2192 {number(last)}")
    return f"{'has not learned yet' if history.badge == 'running' else 'did not learn'}: {texts[0]}" if texts else ""


def _improved(values: Sequence[float]) -> bool:
    """Returns whether values, of which higher ones are better, rise above their start by more than noise, or so far that it
    may be more. The noise is the median of what they differ by from one to the next, which a trend, or a leap, hardly changes.
    """
    first, second = (median(half) for half in (values[: len(values) // 2], values[len(values) // 2 :]))
    if second - first > _MUCH * abs(first):
        return True
    size = max(1, len(values) // _BLOCKS)
    means = [fmean(values[at : at + size]) for at in range(0, len(values) - size + 1, size)]
    noise = 1.05 * median(abs(after - before) for before, after in pairwise(values))  # as a standard deviation
    best, least = max(means[1:]), _LEAST * abs(means[0])
    return best - means[0] > max(_BEYOND * noise / math.sqrt(size), least) or best - values[0] > max(_BEYOND * noise, least)


def _kind(history: History) -> str | None:
    """Returns what a run computes in a step, as a text: its model and its global batch."""
    model = history.config.get("model")
    if not model or not history.global_batch:
        return None
    settings = flat(model)
    computed = {name: value for name, value in settings.items() if name.split(".")[0] not in _CHOSEN_BY}
    return json.dumps([computed, history.global_batch], sort_keys=True, default=str)


def scaling(histories: Sequence[History]) -> list[float | None]:
    """Returns the samples a second and rank, relative to the runs with the fewest ranks of the same model and global batch;
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
        fewest = min(ranks for _, _, ranks in alike)
        if max(ranks for _, _, ranks in alike) > fewest:
            ratios[place] = speed / median(base for _, base, ranks in alike if ranks == fewest)
    return ratios


class Axis(NamedTuple):
    """An axis of parallel coordinates: where each run lies on it, from 0 to 1, and its texts, with their places."""

    name: str
    places: list[float | None]
    ticks: list[tuple[float, str]]
    note: str = ""


def _apart(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Returns the ticks, from the low end on, whose labels don't overprint each other: both ends, and what has room between."""
    *inner, last = ticks
    kept: list[tuple[float, str]] = []
    for tick in inner:
        if not kept or min(tick[0] - kept[-1][0], last[0] - tick[0]) >= _APART:
            kept.append(tick)
    return [*kept, last]


def _scaled(numbers: Sequence[float]) -> dict[float, float]:
    """Returns the place of each number, from 0 to 1: logarithmic where positive ones spread widely, with a place of its own
    for 0.
    """
    low, high = min(numbers), max(numbers)
    least = min((value for value in numbers if value > 0), default=high)
    if high <= low:
        return dict.fromkeys(numbers, 0.5)
    if low < 0 or high <= _WIDE * least:
        return {value: (value - low) / (high - low) for value in numbers}
    start = 0.0 if low > 0 else _PLACE_OF_ZERO
    return {
        value: start + (1 - start) * math.log(value / least) / math.log(high / least) if value else 0.0 for value in numbers
    }


def _in_order(value: object) -> tuple[bool, Sequence[float], str]:
    """Returns a key by which lists of numbers are sorted as numbers, before texts."""
    if isinstance(value, list) and value and all(type(part) in (int, float) for part in value):
        return False, value, ""
    return True, (), _text(value)


def _text(value: object) -> str:
    return "null" if value is None else str(value)


def axis(name: str, values: Sequence[object], note: str = "") -> Axis | None:
    """Returns an axis for numbers, with a logarithmic scale where they spread widely, or for a few texts."""
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    numbers = [value for value in numbers if -_LARGEST < value < _LARGEST]
    if numbers and len(numbers) == sum(value is not None for value in values):
        known = _scaled(numbers)
        places = [known.get(value) if isinstance(value, (int, float)) else None for value in values]
        ends = sorted(known) if len(known) <= _CHOICES else [min(known), max(known)]
        return Axis(name, places, _apart([(known[value], number(value)) for value in ends]), note)
    texts = [_text(value) for value in values]
    choices = [*dict.fromkeys(_text(value) for value in sorted(values, key=_in_order))]
    if not 1 < len(choices) <= _CHOICES:
        return None
    spots = {text: at / (len(choices) - 1) for at, text in enumerate(choices)}
    short = [text.rpartition(".")[2] if _CLASS.fullmatch(text) else text for text in choices]
    names = short if len({*short}) == len(short) else choices
    ticks = [
        (spot, name if len(name) <= _LABEL else f"...{name[-_LABEL:]}")
        for name, spot in zip(names, spots.values(), strict=True)
    ]
    return Axis(name, [spots[text] for text in texts], _apart(ticks))


def sweep(histories: Sequence[History], differences: Mapping[str, Sequence[object]]) -> list[Axis]:
    """Returns the axes of a sweep: the settings that differ, and last the best of the metric that its runs are judged by."""
    metric = next((tag for tag in metrics(histories) if common_direction(tag, histories)), None)
    axes = [drawn for name, values in differences.items() if (drawn := axis(name, values))][:_AXES]
    if len(histories) < 3 or not axes or metric is None:
        return []
    values = [point.value if (point := best(history, metric)) else None for history in histories]
    better = "higher" if common_direction(metric, histories) == "max" else "lower"
    last = axis(f"best {metric}", values, f"{better} is better")
    return [*axes, last] if last else []
