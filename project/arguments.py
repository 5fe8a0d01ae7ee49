"""The Trainer's arguments: the bounds of its numbers, and what follows here from precision, compression and plugins."""

import logging
import os
import re
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import Signature, signature
from typing import Protocol, cast

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, LayerSync, Precision

from project.checkpoints.reading import SafeCheckpointIO
from project.errors import UserError, as_user_error
from project.launch.launcher import Launch
from project.step.compression import Compression, supported_compression
from project.step.precision import auto_precision, cpu_precision, on_cpu
from project.survive.requeue import REQUEUE

log = logging.getLogger(__name__)

TypedPlugin = Precision | ClusterEnvironment | CheckpointIO | LayerSync
Plugin = TypedPlugin | str
"""Lightning declares the first, and takes some names, too."""

# The least that a number can mean; what Lightning refuses by itself, in words of its own, is not here.
LEAST = {
    **dict.fromkeys(("check_val_every_n_epoch", "accumulate_grad_batches", "threads", "global_batch_size"), 1),
    **dict.fromkeys(("log_every_n_steps", "gradient_clip_val", "join_timeout", "min_epochs", "min_steps"), 0),
    **dict.fromkeys(("max_epochs", "max_steps", "num_sanity_val_steps"), -1),
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
    for unit in ("epochs", "steps"):
        low, high = settings.get(f"min_{unit}"), settings.get(f"max_{unit}")
        if isinstance(low, int) and isinstance(high, int) and low > high > -1:
            text = f"trainer.min_{unit}={low} is more than trainer.max_{unit}={high}, at which the run ends."
            raise UserError(f"{text} HINT: set trainer.max_{unit}.")
    interval = settings.get("val_check_interval")
    share = isinstance(interval, float)
    if isinstance(interval, (int, float)) and not (0 < interval <= 1 if share else interval >= 1):
        raise UserError(f"trainer.val_check_interval is a number of steps (10) or a share of an epoch (0.5), not {interval}.")


class _Signed(Protocol):
    """A function with the signature that `inspect` reports of it."""

    __signature__: Signature


def checked(init: Callable[..., None]) -> Callable[..., None]:
    """Lets a Trainer take what was not given from PL_TRAINER_... of the environment, as Lightning's does, and refuses numbers
    that mean nothing.

    Its signature has the names of those that are passed on, too: libraries ask it which settings a Trainer takes.
    """
    own, passed_on = signature(init), signature(pl.Trainer.__init__).parameters
    parameters = {name: parameter for name, parameter in own.parameters.items() if name != "kwargs"}
    parameters |= {name: parameter for name, parameter in passed_on.items() if name not in parameters}

    @wraps(init)
    def filled(self: object, *args: object, **settings: object) -> None:
        prefix = f"PL_{type(self).__name__}_".upper()
        for name in parameters.keys() - settings.keys() - {"self"}:
            if value := os.environ.get(prefix + name.upper()):
                try:
                    settings[name] = literal_eval(value)
                except (ValueError, SyntaxError):  # a word
                    settings[name] = value
        refuse_odd_numbers(settings)
        # Lightning would take those that it doesn't know from there, too, and pass them on.
        own_variables = {prefix + name.upper() for name in own.parameters} & os.environ.keys()
        hidden = {variable: os.environ.pop(variable) for variable in own_variables}
        try:
            init(self, *args, **settings)
        finally:
            os.environ |= hidden

    _, _, words = (pl.Trainer.__init__.__doc__ or "").strip().partition("\n")  # from which the command line has its help
    not_passed_on = rf"\n +({'|'.join(own.parameters)}): .*?(?=\n\n)"
    filled.__doc__ = f"{init.__doc__}\n{re.sub(not_passed_on, '', words, flags=re.DOTALL)}"
    cast(_Signed, filled).__signature__ = own.replace(parameters=[*parameters.values()])
    return filled


def resolve_precision(
    precision: str | int | None, compression: Compression, exact: bool, accelerator: str | Accelerator
) -> tuple[str | None, Compression]:
    """Returns the precision and the compression to use here, and logs where they are others than in the configuration."""
    used = None if precision is None else auto_precision() if precision == "auto" else str(precision)
    if used is not None and on_cpu(accelerator):
        used, reason = cpu_precision(used)
        if reason:
            log.info("trainer.precision=%s instead of %s: %s", used, precision, reason)
    if not exact:  # which refuses any
        compression, line = supported_compression(compression, str(precision), used or "32-true")
        if line:
            log.info(line)
    return used, compression


def resolve_plugins(given: Plugin | list[Plugin] | None, launch: Launch) -> list[TypedPlugin]:
    """Returns the plugins with a reader of checkpoints and the launcher's environment, where the user names no others."""
    plugins: list[Plugin] = [] if given is None else [*given] if isinstance(given, (list, tuple)) else [given]
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(SafeCheckpointIO())
    # Who started this process is known better than by Slurm's environment, which is given to switch requeueing off.
    slurms = [plugin for plugin in plugins if isinstance(plugin, SLURMEnvironment)]
    if any(not plugin.auto_requeue for plugin in slurms):
        REQUEUE.given_up = True
    plugins = [plugin for plugin in plugins if plugin not in slurms]
    has_environment = any(isinstance(plugin, ClusterEnvironment) for plugin in plugins)
    return cast(list[TypedPlugin], plugins if has_environment else [*plugins, launch.environment()])


@contextmanager
def named_errors(given: Mapping[str, object]) -> Iterator[None]:
    """Turns Lightning's errors of arguments into UserErrors that name the argument at fault."""
    try:
        yield
    except (ValueError, TypeError, ImportError, MisconfigurationException) as error:
        named = _culprit(given, str(error))
        raise as_user_error(error, f"The trainer's settings don't work here: {named}{error}") from error
    except RuntimeError as error:
        if (twice := re.search(r"more than one stateful callback of type `(\w+)`", str(error))) is None:
            raise
        hint = "HINT: leave one out, or give each a state_key of its own."
        raise UserError(f"trainer.callbacks has {twice[1]} twice, and both would save under one key. {hint}") from error


def _culprit(given: Mapping[str, object], error: str) -> str:
    """Returns the argument that Lightning's error is about, by its value; empty where that is not clear."""
    if "Timer(duration" in error:
        return f"trainer.max_time={given['max_time']}: "
    for name, value in given.items():  # as in `strategy='ddpp'`; of max_time, which may have keys, Lightning has one of these
        whole = [f"{name}={value!r}"] if isinstance(value, str) else [*map(repr, value)] if isinstance(value, dict) else []
        if any(text in error for text in whole):
            return f"trainer.{name}={value}: "
    if any(f"`{name}`" in error for name in given):
        return ""  # it says so
    words = {name: value for name, value in given.items() if isinstance(value, str) and value}
    patterns = {name: rf"(?<![\w.]){re.escape(value)}(?!\.?\w)" for name, value in words.items()}  # not the 1 of a version 1.13
    named = [name for name, pattern in patterns.items() if re.search(pattern, error, re.IGNORECASE)]
    # A short word, as auto, may be there by chance, among what could be chosen.
    return max((f"trainer.{name}={words[name]}: " for name in named), key=len, default="")
