"""Makes a changed optimiser setting or schedule take effect on resume: checkpoints carry the settings of their training.

A checkpoint brings its learning rate, weight decay and schedule back with it. Where the configuration has others (the run's
identity and the user allow it, see `project.runs`), they take over here: the optimiser keeps what it has gathered
(momentum, say), and the new schedule is where it would be had it been there from the beginning. ReduceLROnPlateau, which lives
on metrics, begins anew.
"""

import copy
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from project.errors import UserError
from project.typed import typed

log = logging.getLogger(__name__)

_OPTIMISATION_KEYS = ("optimizer", "lr_scheduler", "lr_reference_batch", "lr_scaling", "lr_interval")


class ChangedSettings(Callback):
    """Applies the configured settings of optimisers and schedules where they differ from those of the checkpoint.

    Args:
        configuration: the resolved configuration of this run.
    """

    def __init__(self, configuration: Mapping[str, Any]) -> None:
        self.configuration: dict[str, Any] = json.loads(json.dumps(configuration, default=str))
        for place in ("devices", "num_nodes"):  # the manifest says where it ran
            (self.configuration.get("trainer") or {}).pop(place, None)
        self._schedule_steps: int | None = None  # steps of the schedule to repeat; None: no setting has changed
        self._saved_global_batch: int | None = None  # the global batch of the checkpoint
        self._configured_groups: list[dict[str, Any]] = []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["configuration"], checkpoint["global_batch"] = self.configuration, _global_batch(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
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
        """Notes the configured settings: before the optimiser's state is restored and, of a sharded network, before the
        checkpoint is read.
        """
        self._configured_groups = [
            copy.deepcopy({key: value for key, value in group.items() if key != "params"}) for group in _param_groups(trainer)
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Applies the changed settings: the optimiser's state has just been restored, and the loaders know how large their
        batches are.
        """
        before, now, self._saved_global_batch = self._saved_global_batch, _global_batch(trainer), None
        if before not in (None, now):
            key = "data" if "global_batch_size" in (self.configuration.get("data") or {}) else "trainer"
            raise UserError(
                f"The checkpoint is of a run with a global batch of {before}, and this would be one of {now}. "
                f"HINT: set {key}.global_batch_size={before}; it then stays on any number of ranks."
            )
        if self._schedule_steps is None:
            return
        moves, self._schedule_steps = self._schedule_steps, None
        for group, fresh in zip(_param_groups(trainer), self._configured_groups, strict=True):
            group.update(fresh)
        for optimizer in trainer.optimizers:
            _check_optimizer_state(optimizer)
        for config in trainer.lr_scheduler_configs:
            if not isinstance(config.scheduler, ReduceLROnPlateau):
                for _ in range(moves):
                    config.scheduler.step()
        lrs = ", ".join(f"{lr:g}" for lr in dict.fromkeys(group["lr"] for group in _param_groups(trainer)))
        log.info("From step %d on the learning rate is %s.", trainer.global_step, lrs)


def _param_groups(trainer: Trainer) -> list[dict[str, Any]]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _global_batch(trainer: Trainer) -> int | None:
    batch = typed(trainer).global_batch
    return batch


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
