"""Decides whether an epoch's steps are taken on the fast path, our own loop of a step.

They are where the hooks and settings are the common ones; else Lightning's own loop takes them.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer

from project.errors import UserError
from project.sharded.shards import clip_by_value
from project.sharded.strategy import Sharded
from project.typed import typed

# Hooks of the model that take over a part of the step.
_TAKES_OVER = (
    *("on_train_batch_start", "optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping"),
    "lr_scheduler_step",
)


def why_not_fast_path(trainer: Trainer, fetches_batches: bool) -> str | None:
    """Returns why Lightning's own loop takes the steps, or None where ours does. `fetches_batches`: `training_step` fetches the
    batches by itself.
    """
    module: Any = trainer.lightning_module
    strategy, precision, name = trainer.strategy, trainer.precision_plugin, type(module).__name__
    own = [hook for hook in _TAKES_OVER if is_overridden(hook, module, LightningModule)]
    optimizers = trainer.optimizers
    reasons = {
        f"{name} steps by itself (automatic_optimization is False)": not module.automatic_optimization,
        f"{name} has a method {own[0] if own else ''} of its own": own,
        "StochasticWeightAveraging renews the statistics of batch norm": _renews_batch_norm(trainer),
        "typed(trainer).profiler looks on": type(typed(trainer).profiler) is not PassThroughProfiler,
        f"{type(strategy).__name__} is another strategy than DDP": type(strategy)
        not in (DDPStrategy, SingleDeviceStrategy, Sharded),
        "the strategy averages weights": getattr(strategy, "_model_averager", None) is not None,
        f"{type(precision).__name__} is in charge of the precision": type(precision)
        not in (Precision, MixedPrecision, DoublePrecision, HalfPrecision),
        f"{name} has {len(optimizers)} optimisers": len(optimizers) != 1,
        "the optimiser may ask for the loss again": not all_evaluate_once(trainer),
        f"{name}.training_step takes the batches by itself (dataloader_iter)": fetches_batches,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _renews_batch_norm(trainer: Trainer) -> bool:
    """Returns whether StochasticWeightAveraging uses this epoch to renew batch norm's statistics, without a backward pass."""
    callbacks = typed(trainer).callbacks
    averaging = [callback for callback in callbacks if isinstance(callback, StochasticWeightAveraging)]
    return any(trainer.current_epoch > callback.swa_end for callback in averaging)


def is_sharded(trainer: Trainer) -> bool:
    """Returns whether each rank holds only its shards of the weights."""
    return isinstance(trainer.strategy, Sharded) and trainer.strategy.is_sharded


def replicates_weights(trainer: Trainer) -> bool:
    """Returns whether all ranks have the same weights after each step."""
    return (
        isinstance(trainer.strategy, DDPStrategy)
        and not is_sharded(trainer)
        and getattr(trainer.strategy, "_model_averager", None) is None
    )


def _evaluates_once(optimizer: Optimizer) -> bool:
    """Returns whether an optimiser needs one gradient for a step. LBFGS evaluates the loss repeatedly; of others nothing is
    known.
    """
    return f"{type(optimizer).__module__}.".startswith("torch.optim.") and not isinstance(optimizer, LBFGS)


def all_evaluate_once(trainer: Trainer) -> bool:
    """Returns whether each optimiser needs one gradient for a step, and evaluates no loss."""
    return all(map(_evaluates_once, trainer.optimizers))


def refuse_accumulation_of_lbfgs(trainer: Trainer) -> None:
    """Refuses LBFGS where a step has several micro-batches: Lightning evaluates the last of them anew, and adds its gradient to
    those before, which are of other weights.

    Raises:
        UserError: names the batch_size with which a step has one micro-batch.
    """
    many = trainer.accumulate_grad_batches
    if many > 1 and any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        raise UserError(
            f"LBFGS evaluates the loss of a step again and again, and a step has {many} micro-batches on each rank, of which "
            f"only the last is there then. HINT: set the loader's batch_size {many} times as large, or take another optimiser."
        )


def is_fused(optimizer: Optimizer) -> bool:
    """Returns whether the optimiser itself, on the device, skips a step whose gradient is flagged as not finite: the host need
    not wait.
    """
    return isinstance(optimizer, (SGD, Adam, AdamW, Adagrad)) and bool(optimizer.defaults.get("fused"))


def unscale_before_hooks(trainer: Trainer, whether: bool) -> None:
    """Has Lightning's own loop take the loss scale off the gradients of fused optimisers, too, before a hook or clipping sees
    them. torch's fused ones do so within their step, and Lightning refuses to clip then; the host waits for the device instead.
    """
    if getattr(trainer.precision_plugin, "scaler", None) is None or isinstance(trainer.strategy, Sharded):
        return
    for optimizer in filter(is_fused, trainer.optimizers):
        optimizer._step_supports_amp_scaling = not whether  # type: ignore[attr-defined]


def clip_in_skipped_steps(trainer: Trainer) -> None:
    """Has Lightning's own loop clip by value what has a gradient: a skipped step has none left, and torch's function fails
    then.
    """
    plugin = trainer.precision_plugin
    if type(plugin).clip_grad_by_value is Precision.clip_grad_by_value:
        plugin.clip_grad_by_value = clip_by_value  # type: ignore[method-assign,assignment]


def give_zero_momentum(optimizer: Optimizer) -> None:
    """Gives the parameters of a fused SGD a momentum of zeros, from which its first step computes the same values.

    torch leaves the momentum uninitialised until the first step; where loss scaling skips that step, the second one reads
    garbage, and weights become NaN. Other fused optimisers begin with zeros by themselves (docs/dev/upstream.md).

    Raises:
        UserError: the first step would compute something else, as it has a dampening.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        if not group["fused"] or not group["momentum"]:
            continue
        if group["dampening"]:
            raise UserError(
                "SGD with fused=true and a dampening keeps an undefined momentum where its first step is skipped. HINT: set "
                "fused=false, or dampening=0."
            )
        for parameter in group["params"]:
            if parameter.requires_grad and "momentum_buffer" not in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
