"""The bounds of the numbers among the Trainer's arguments."""

import os
import re
from ast import literal_eval
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any

import lightning.pytorch as pl

from project.errors import UserError

# The least that a number can mean; what Lightning refuses by itself, in words of its own, is not here.
LEAST = {
    **dict.fromkeys(("log_every_n_steps", "check_val_every_n_epoch", "accumulate_grad_batches", "threads"), 1),
    **dict.fromkeys(("gradient_clip_val", "join_timeout", "min_epochs", "min_steps"), 0),
    **{f"limit_{stage}_batches": 0 for stage in ("train", "val", "test", "predict")},
}


def refuse_odd_numbers(settings: Mapping[str, object]) -> None:
    """Raises a UserError where Lightning would take a number for something else."""
    for name, least in LEAST.items():
        value = settings.get(name)
        if isinstance(value, (int, float)) and not value >= least:
            raise UserError(f"trainer.{name} is {least} at least, and not {value}.")
        if name.startswith("limit_") and isinstance(value, float) and value > 1:
            raise UserError(f"trainer.{name}={value}: with a point it is a share, 1.0 at most. HINT: write {value:.0f}.")
    interval = settings.get("val_check_interval")
    share = isinstance(interval, float)
    if isinstance(interval, (int, float)) and not (0 < interval <= 1 if share else interval >= 1):
        raise UserError(f"trainer.val_check_interval is a number of steps (10) or a share of an epoch (0.5), not {interval}.")


def with_environment(init: Callable[..., None]) -> Callable[..., None]:
    """Lets a Trainer take what was not given from PL_TRAINER_... of the environment, as Lightning's does.

    Lightning finds the names in the signature, in which those that are passed on do not stand.
    """

    @wraps(init)
    def filled(self: Any, *args: Any, **settings: Any) -> None:
        names = {*signature(init).parameters, *signature(pl.Trainer.__init__).parameters} - {"self", "kwargs"}
        prefix = f"PL_{type(self).__name__}_".upper()
        for name in names - settings.keys():
            if value := os.environ.get(prefix + name.upper()):
                try:
                    settings[name] = literal_eval(value)
                except (ValueError, SyntaxError):  # a word
                    settings[name] = value
        init(self, *args, **settings)

    return filled


def culprit(given: Mapping[str, object], error: str) -> str:
    """Returns the argument that Lightning's error is about, by its value; empty where that is not clear."""
    if "Timer(duration" in error:
        return f"trainer.max_time={given['max_time']}: "
    words = {name: value for name, value in given.items() if isinstance(value, str) and value}
    whole = {name: rf"(?<![\w.]){re.escape(value)}(?!\.?\w)" for name, value in words.items()}  # not the 1 of a version 1.13
    return next((f"trainer.{name}={words[name]}: " for name, pattern in whole.items() if re.search(pattern, error)), "")
