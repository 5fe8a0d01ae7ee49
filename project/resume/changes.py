"""Makes a changed optimiser setting or schedule take effect on resume: checkpoints carry the settings of their training.

Where the configuration of the model has changed (see `project.runs`), its settings take over: the optimiser keeps what it has
gathered (momentum, say). A schedule that has changed, as that of a longer run does, is where it would be had it been so from
the beginning; ReduceLROnPlateau, which lives on metrics, begins anew where its configuration has changed.
"""

import copy
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from project.errors import UserError
from project.step.optimizers import learning_rates
from project.typed import Configuration, StateDict, typed

log = logging.getLogger(__name__)

_OPTIMISATION_KEYS = ("optimizer", "lr_scheduler", "lr_reference_batch", "lr_scaling", "lr_interval")


class ChangedSettings(Callback):
    """Applies the configured settings of optimisers and schedules where they differ from those of the checkpoint."""

    def __init__(self, configuration: Mapping[str, object]) -> None:
        self.configuration: Configuration = json.loads(json.dumps(configuration, default=str))
        for place in ("devices", "num_nodes"):  # the manifest says where it ran
            (self.configuration.get("trainer") or {}).pop(place, None)
        self._schedule_steps: int | None = None  # steps of the schedule to repeat; None: no setting has changed
        self._saved_global_batch: int | None = None
        self._configured_groups: list[StateDict] = []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: StateDict) -> None:
        checkpoint["configuration"], checkpoint["global_batch"] = self.configuration, typed(trainer).global_batch

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: StateDict) -> None:
        """Compares the settings; if they differ, drops the schedules' states from the checkpoint and counts their steps."""
        self._schedule_steps = None
        if trainer.state.fn != "fit" or "configuration" not in checkpoint:
            return
        self._saved_global_batch = checkpoint["global_batch"]
        old, new = checkpoint["configuration"].get("model") or {}, self.configuration.get("model") or {}
        # Which arguments of a user's own model concern the optimiser is not known here.
        keys = ("init_args",) if "class_path" in new else _OPTIMISATION_KEYS
        if any(old.get(key, new.get(key)) != new.get(key) for key in keys):
            at = checkpoint["position"]
            moves = at["epoch"] if new.get("lr_interval") == "epoch" else at["global_step"]
            if old.get("lr_interval") == new.get("lr_interval"):
                moves = next((state.get("last_epoch", moves) for state in checkpoint["lr_schedulers"]), moves)
            checkpoint["lr_schedulers"] = []  # it may be another class
            self._schedule_steps = moves

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes the configured settings, before the optimiser's state is restored."""
        self._configured_groups = [
            copy.deepcopy({key: value for key, value in group.items() if key != "params"}) for group in _param_groups(trainer)
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Applies the changed settings, when the optimiser's state has been restored, and the loaders know their batches."""
        before, self._saved_global_batch = self._saved_global_batch, None
        if before not in (None, now := typed(trainer).global_batch):
            key = "data" if "global_batch_size" in (self.configuration.get("data") or {}) else "trainer"
            raise UserError(
                f"The checkpoint is of a run with a global batch of {before}, and this would be one of {now}. "
                f"HINT: set {key}.global_batch_size={before}; it then stays on any number of ranks."
            )
        moves, self._schedule_steps = self._schedule_steps, None
        if moves is None:
            return
        for group, fresh in zip(_param_groups(trainer), self._configured_groups, strict=True):
            group.update(fresh)
        for optimizer in trainer.optimizers:
            _check_optimizer_state(optimizer)
        for config in trainer.lr_scheduler_configs:
            if not isinstance(config.scheduler, ReduceLROnPlateau):
                _replay(config.scheduler, moves)
        lrs = ", ".join(f"{lr:g}" for lr in dict.fromkeys(learning_rates(trainer))) or "the optimiser's own"
        log.info("From step %d on the learning rate is %s.", trainer.global_step, lrs)


def _param_groups(trainer: Trainer) -> list[StateDict]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _check_optimizer_state(optimizer: Optimizer) -> None:
    """Refuses settings that need more than the optimiser has gathered (Adam's amsgrad, say), by trying them on a twin."""
    for group in optimizer.param_groups:
        parameter = next((tensor for tensor in group["params"] if optimizer.state.get(tensor)), None)
        if parameter is None:
            continue
        twin = nn.Parameter(torch.zeros_like(parameter))
        twin.grad = torch.zeros_like(parameter)
        try:
            probe = type(optimizer)([{**group, "params": [twin]}])  # type: ignore[call-arg]
            probe.step()
        except Exception as error:  # an optimiser that takes other arguments, or wants a closure
            log.debug("The optimiser's state can't be checked: %s", error)
            continue
        if missing := probe.state[twin].keys() - optimizer.state[parameter].keys():
            raise UserError(
                f"The optimiser's new settings need {', '.join(sorted(map(str, missing)))}, which it has not gathered so far. "
                "HINT: go back to the old settings, or choose another --run."
            )


# Schedules -----------------------------------------------------------------------------------------------------------


def restore_schedules(
    trainer: Trainer, saved: Sequence[StateDict], then: Sequence[StateDict], now: Sequence[StateDict]
) -> None:
    """Restores the schedules, with today's settings where they have changed since the run began, and reports the result.

    `saved`: the states in the checkpoint; `then`, `now`: those before any step, as the run had and has configured them.
    """
    changed = False
    for config, state, before, built in zip(trainer.lr_scheduler_configs, saved, then, now, strict=True):
        merged = cast(StateDict, _merge(state, before, built))
        config.scheduler.load_state_dict(merged)
        if not _is_equal(merged, state):
            changed = True
            _apply_schedule(config.scheduler)
    lrs = learning_rates(trainer)
    if lrs and not any(lrs) and (left := trainer.estimated_stepping_batches - trainer.global_step) > 0:
        log.warning(
            "The learning rate is 0 at step %d, and %s steps are left, which will change nothing as long as it is. "
            "HINT: give the schedule the length of the whole run.",
            *(trainer.global_step, left),
        )
    elif changed and trainer.is_global_zero:
        shown = ", ".join(f"{lr:.3g}" for lr in dict.fromkeys(float(lr) for lr in lrs))
        log.warning("The schedule is another than the run began with: at step %d its lr is now %s.", trainer.global_step, shown)


def _replay(schedule: LRScheduler, moves: int) -> None:
    """Moves a fresh schedule to where it would be had it been there from the beginning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that it moves before its optimiser
        for _ in range(moves):
            schedule.step()


def _merge(saved: object, then: object, now: object) -> object:
    """Returns what was saved, but with today's settings where those are others than the run began with."""
    if isinstance(saved, dict) and isinstance(then, dict) and isinstance(now, dict):
        return {key: _merge(value, then.get(key, value), now.get(key, then.get(key, value))) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)) and isinstance(then, (list, tuple)) and isinstance(now, (list, tuple)):
        if len(saved) == len(then) == len(now):
            return type(saved)(_merge(*three) for three in zip(saved, then, now, strict=True))
        return now if len(then) != len(now) else saved
    return saved if _is_equal(then, now) else now


def _apply_schedule(schedule: LRScheduler) -> None:
    """Gives the optimiser the learning rate that a changed schedule has at this step, where the schedule can compute it."""
    compute = getattr(schedule, "_get_closed_form_lr", None)
    if compute is None and isinstance(schedule, (LambdaLR, OneCycleLR)):
        compute = schedule.get_lr
    if compute is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that somebody else asks than its own `step`
            lrs = compute()
        for group, lr in zip(schedule.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr


def _is_equal(value: object, other: object) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_is_equal(value[key], other[key]) for key in value)
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    return bool(value == other)


def refuse_short_one_cycle(trainer: Trainer) -> None:
    """Raises a UserError where OneCycleLR has fewer steps than the run: it fails after its last one."""
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, OneCycleLR):
            moves = trainer.estimated_stepping_batches if config.interval == "step" else trainer.max_epochs or -1
            if config.scheduler.total_steps < moves // config.frequency:
                raise UserError(
                    f"OneCycleLR has total_steps={config.scheduler.total_steps}, and moves {moves // config.frequency} times "
                    "in this run. HINT: set its total_steps to the length of the run (of all of it, where one is made longer)."
                )
