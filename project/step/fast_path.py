"""Decides whether an epoch's steps are taken on the fast path, our own loop of a step.

They are where the hooks and settings are the common ones; else Lightning's own loop takes them.
"""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.model_helpers import is_overridden

from project.typed import typed

# Hooks of the model that take over a part of the step.
_TAKES_OVER = ("on_train_batch_start", "optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping")


def why_not_fast_path(trainer: Trainer, fetches_batches: bool) -> str | None:
    """Returns why Lightning's own loop takes the steps, or None where ours does. `fetches_batches`: `training_step` fetches the
    batches by itself.
    """
    module = trainer.lightning_module
    strategy, precision, name = trainer.strategy, trainer.precision_plugin, type(module).__name__
    own = [hook for hook in _TAKES_OVER if is_overridden(hook, module, LightningModule)]
    optimizers = trainer.optimizers
    foreign = [type(optimizer).__name__ for optimizer in optimizers if not typed(trainer).gradients.takes_step_of(optimizer)]
    reasons = {
        f"{name} steps by itself (automatic_optimization is False)": not module.automatic_optimization,
        f"{name} has a method {own[0] if own else ''} of its own": own,
        "StochasticWeightAveraging renews the statistics of batch norm": any(
            isinstance(callback, StochasticWeightAveraging) and trainer.current_epoch > callback.swa_end
            for callback in typed(trainer).callbacks
        ),
        "a profiler looks on": type(typed(trainer).profiler) is not PassThroughProfiler,
        f"{type(strategy).__name__} is another strategy than DDP": type(strategy) not in typed(trainer).gradients.strategies,
        "the strategy averages weights": getattr(strategy, "_model_averager", None) is not None,
        f"{type(precision).__name__} is in charge of the precision": type(precision)
        not in (Precision, MixedPrecision, DoublePrecision, HalfPrecision),
        f"{name} has {len(optimizers)} optimisers": len(optimizers) != 1,
        f"{', '.join(foreign)} may ask for the loss again in a step, or add up over the shards of a sharded network": foreign,
        f"{name}.training_step takes the batches by itself (dataloader_iter)": fetches_batches,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
