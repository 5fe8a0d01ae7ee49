"""Lightning's training loop without the work that nobody asked for: two thirds of what it costs in a steady step.

For each hook of each callback Lightning opens a profiler's context, also where there is no profiler and the callback has no
such hook; for each batch it looks up the signature of training_step and tells all ranks whether a SIGTERM has come.
"""

from collections import OrderedDict
from contextlib import nullcontext
from functools import cache
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

_NOTHING = nullcontext()
_all_hooks = call._call_callback_hooks


class NoProfiler(PassThroughProfiler):
    """Lightning asks it a hundred times in a step; a generator's context each time would be a third of a millisecond."""

    def profile(self, action_name: str) -> Any:
        return _NOTHING


@cache
def _has(kind: Any, hook_name: str) -> bool:
    """Whether a class of callbacks does something in a hook."""
    return getattr(kind, hook_name, None) is not getattr(Callback, hook_name, None)


def _hooks(trainer: Any, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any) -> None:
    """Lightning's `_call_callback_hooks`, for trainers without a profiler; for others it is Lightning's own."""
    if type(trainer.profiler) is not NoProfiler:
        _all_hooks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        return
    module: LightningModule | None = trainer.lightning_module
    before = None
    if module:
        before, module._current_fx_name = module._current_fx_name, hook_name
    for callback in trainer.callbacks:
        if monitoring_callbacks is not None and isinstance(callback, (EarlyStopping, Checkpoint)) != monitoring_callbacks:
            continue
        if _has(type(callback), hook_name) or hook_name in callback.__dict__:  # type: ignore[arg-type]
            getattr(callback, hook_name)(trainer, module, *args, **kwargs)
    if module:
        module._current_fx_name = before


@cache
def _takes_index(kind: Any) -> bool:
    return bool(is_param_in_hook_signature(kind.training_step, "batch_idx", min_args=2))


def lighten(trainer: Any) -> None:
    """Has this trainer's loop do what was asked for, and no more."""
    if type(trainer.profiler) is PassThroughProfiler:
        trainer.profiler = NoProfiler()
        call._call_callback_hooks = _hooks
    loop: Any = trainer.fit_loop.epoch_loop

    def arguments(_: Any, batch: Any, batch_idx: int) -> Any:
        index = {"batch_idx": batch_idx} if _takes_index(type(trainer.lightning_module)) else {}  # type: ignore[arg-type]
        return OrderedDict(batch=batch, **index)

    loop._build_kwargs = arguments
    # A broadcast, and a wait for the device, before every micro-batch. StopTogether does without either.
    loop._broadcast_sigterm_tensor = lambda: None
