"""Chooses the metric by which the best checkpoint is kept. Imports nothing heavy."""

from collections.abc import Iterable

_DEFAULT_METRICS = {"val/acc": "max", "val_acc": "max", "val/loss": "min", "val_loss": "min"}


def chosen_metric(monitor: str | None, mode: str, known: Iterable[str]) -> tuple[str | None, str]:
    """Returns the metric that `checkpoints.monitor` means, of the known ones, and 'max' or 'min', whichever is better."""
    if monitor != "auto":
        return monitor, mode
    names = set(known)
    return next((item for item in _DEFAULT_METRICS.items() if item[0] in names), ("val/acc", "max"))
