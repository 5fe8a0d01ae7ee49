"""Names the metrics by which a run is judged. Imports nothing heavy."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

_DEFAULT_METRICS = {"val/acc": "max", "val_acc": "max", "val/loss": "min", "val_loss": "min"}


@runtime_checkable
class Monitoring(Protocol):
    """Describes a callback that monitors a metric: checkpoints, ours and Lightning's, and an early stop."""

    monitor: str | None
    mode: str


@runtime_checkable
class Judging(Monitoring, Protocol):
    """Describes a callback that keeps the best checkpoint by its metric."""

    @property
    def best_model_score(self) -> object: ...


def chosen_metric(monitor: str | None, mode: str, known: Iterable[str]) -> tuple[str | None, str]:
    """Returns the metric that `checkpoints.monitor` means, of the known ones, and 'max' or 'min', whichever is better."""
    if monitor != "auto":
        return monitor, mode
    names = set(known)
    return next((item for item in _DEFAULT_METRICS.items() if item[0] in names), ("val/acc", "max"))


def monitored_metrics(callbacks: Iterable[object], known: Iterable[str]) -> dict[str, str]:
    """Returns the known metrics that callbacks monitor, each with 'max' or 'min', whichever is better."""
    names = set(known)
    chosen = [
        chosen_metric(callback.monitor, callback.mode, names) for callback in callbacks if isinstance(callback, Monitoring)
    ]
    return {name: mode for name, mode in chosen if name in names}


def monitored_setting(callbacks: Iterable[object]) -> tuple[str, str] | None:
    """Returns what the callback that keeps the best checkpoint monitors, else another one, and 'max' or 'min'."""
    settings = [
        (not isinstance(callback, Judging), callback.monitor, callback.mode)
        for callback in callbacks
        if isinstance(callback, Monitoring) and callback.monitor
    ]
    return min(settings, key=lambda setting: setting[0])[1:] if settings else None


def is_better(value: float, best: float | None, mode: str) -> bool:
    """Returns whether a value is better than the best one so far; NaN is not."""
    if best is None or best != best:
        return value == value
    return value > best if mode == "max" else value < best
