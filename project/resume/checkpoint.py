"""Saves what of a run lies in its checkpoint beside weights and optimiser, and restores it.

Rank 0 chooses the checkpoint. Each rank's own states are in it, where they differ from rank 0's. The settings of a schedule are
the configuration's: where they have changed since the run began, as the length of a longer run does, today's are taken, and
only what has happened since (how far the schedule is) comes from the checkpoint.
"""

import hashlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from project.errors import UserError
from project.masking import MASK, without_secrets
from project.parts import changed
from project.resume.attributes import Attributes, attributes, unsaved_attributes
from project.resume.made_later import Shapes, refuse_made_later, resize_buffers, shapes
from project.sharded.shards import split
from project.step.data_ranks import data_ranks
from project.step.evaluation import loaders_of
from project.step.logged import Logged, Results
from project.step.loop import Steps
from project.step.position import Position, check_loop_progress, position, set_counters
from project.typed import typed
from project.untrusted import shortened

log = logging.getLogger(__name__)

_LOADERS, _BUFFERS, _THREADS, _VALUES = "states_of_loaders", "unsaved_buffers", "threads", "unsaved_values"
_MICRO_BATCH = "samples_of_a_micro_batch"
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def current_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Returns what a checkpoint of this moment would hold. All ranks must call this together; nothing is copied or written."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def unsaved_digests(trainer: Trainer) -> Mapping[str, bytes]:
    """Returns digests of the users' values that the checkpoint mentions, and does not hold; none where no run is resumed."""
    connector = trainer._checkpoint_connector
    assert isinstance(connector, Resuming)
    return connector.unsaved_digests


def note_initial_values(trainer: Trainer, values: Attributes) -> None:
    """Adds to the values noted before the first step those of objects made since the fit began (training sets)."""
    connector = trainer._checkpoint_connector
    assert isinstance(connector, Resuming)
    connector._values_as_built = {**values, **connector._values_as_built}


class Resuming(_CheckpointConnector):
    """Lightning's connector of checkpoints, which also saves and restores position, logged sums, schedules, buffers and ranks'
    states.
    """

    _schedules_as_built: list[dict[str, Any]] | None = None
    """The states of the schedules as the configuration has them, before any step."""
    _buffers_as_built: Mapping[str, Tensor] = MappingProxyType({})
    """Those that lie in no state_dict, before any step."""
    _shapes_as_built: Shapes | None = None
    """The network at the start of the fit."""
    _optimizers_as_built = ""
    _has_warned_of_secrets = False
    """Whether it has warned that secrets are masked."""
    _values_as_built: Attributes = MappingProxyType({})  # type: ignore[assignment]
    """The values that the user's objects keep in Python, before any step."""
    unsaved_digests: Mapping[str, bytes] = MappingProxyType({})
    """Digests of such values that the checkpoint knew of, and did not hold."""
    weights_only: bool | None = None
    """The verb's own argument: Lightning does not report it where a sharded network is restored."""

    # Into a checkpoint -----------------------------------------------------------------------------------------------

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Returns a checkpoint of this moment. All ranks must call this together."""
        checkpoint: dict[str, Any] = super().dump_checkpoint(weights_only)
        self._mask_secrets(checkpoint)
        if self.trainer.state.fn == "fit" and not weights_only:
            checkpoint[_LOADERS] = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
            checkpoint[_BUFFERS] = self._changed_buffers()
            checkpoint[_THREADS] = torch.get_num_threads()
            checkpoint["training_samples"] = loaders_of(self.trainer).set_sizes
            checkpoint[_MICRO_BATCH] = loaders_of(self.trainer).micro_batch
            checkpoint["position"] = position(self.trainer).state_dict()
            if grids := typed(self.trainer).gradients.state_dict():
                checkpoint["exact_grids"] = grids
                # As on one rank: the file does not tell how many there were.
                set_counters(checkpoint["loops"]["fit_loop"], position(self.trainer), 1)
            checkpoint["logged_sums"] = self._logged_results().sums(data_ranks(self.trainer))
            checkpoint |= self._logged_connector().metrics_of_ranks()
        if self._schedules_as_built is not None and not weights_only:
            self._warn_of_other_optimizers()
            assert self._shapes_as_built is not None
            refuse_made_later(checkpoint["state_dict"], self._shapes_as_built)
            checkpoint["schedules_as_built"] = self._schedules_as_built
            checkpoint["callback_metrics"] = {
                name: torch.as_tensor(value).detach().cpu() for name, value in sorted(self.trainer.callback_metrics.items())
            }
            # They may go by a rank's own micro-batches, and exact checkpoints have the same bytes on any number of ranks.
            values = {} if typed(self.trainer).exact else unsaved_attributes(self.trainer, self._values_as_built, checkpoint)
            if values:
                checkpoint[_VALUES] = values
            checkpoint["states_of_ranks"] = _gather_states_of_ranks(
                self.trainer, split(self._states_of_this_rank(checkpoint)).marked
            )
        return checkpoint

    def _mask_secrets(self, checkpoint: dict[str, Any]) -> None:
        """Masks the secrets in what the module and its data keep by `save_hyperparameters`: a checkpoint is copied and given
        away.
        """
        masked: set[str] = set()
        for part in ("hyper_parameters", "datamodule_hyper_parameters"):
            if part in checkpoint:
                checkpoint[part] = without_secrets(checkpoint[part], masked)
        if masked and not self._has_warned_of_secrets and self.trainer.is_global_zero:
            log.warning(
                "Checkpoints have %s in place of what save_hyperparameters keeps as %s. HINT: load_from_checkpoint takes the "
                "real values by name; save_hyperparameters(ignore=[...]) leaves them out.",
                *(MASK, ", ".join(sorted(masked))),
            )
        self._has_warned_of_secrets = self._has_warned_of_secrets or bool(masked)

    def _warn_of_other_optimizers(self) -> None:
        """Warns where the optimisers are others than `configure_optimizers` made: a resumed run could not load their states."""
        now = _optimizer_names(self.trainer)
        if now != self._optimizers_as_built:
            if self.trainer.is_global_zero:
                log.warning(
                    "The optimiser is %s now, and configure_optimizers made %s: a resumed run could not take over its state. "
                    "HINT: make both there, or begin another run with these weights.",
                    *(now, self._optimizers_as_built),
                )
            self._optimizers_as_built = now

    def _states_of_this_rank(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Returns what may differ between the ranks: the states of callbacks, of the data and of its loaders."""
        data = typed(self.trainer).datamodule
        names = ["callbacks", _LOADERS, *([] if data is None else [type(data).__qualname__])]
        return {name: checkpoint[name] for name in names if checkpoint.get(name)}

    # And back --------------------------------------------------------------------------------------------------------

    def read(self, checkpoint_path: Any, weights_only: bool | None) -> None:
        """Reads the checkpoint as Lightning does; `ResumingOnHosts` overrides this."""
        super().resume_start(checkpoint_path, weights_only)

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Reads the checkpoint that rank 0 chose, and prepares it for this rank, among today's number of ranks."""
        path = self.trainer.strategy.broadcast(None if checkpoint_path is None else str(checkpoint_path))
        # Lightning converts the network after loading: float64 weights would pass through float32, and be rounded.
        self.trainer.precision_plugin.convert_module(self.trainer.lightning_module)
        self.read(path, self.weights_only if weights_only is None else weights_only)
        check_loop_progress(self._loaded_checkpoint.get("loops", {}))
        if self.trainer.state.fn == "fit" and "position" in self._loaded_checkpoint:
            self._restore_position()
        states = self._loaded_checkpoint.get("states_of_ranks")
        here = data_ranks(self.trainer)
        if states and len(states) == here.count:
            self._loaded_checkpoint.update(states[here.rank] or {})
        elif states:
            log.info(
                "The states of callbacks or loaders differ between the %d ranks of the checkpoint: all %d go on with rank 0's.",
                *(len(states), here.count),
            )
        if own := self._loaded_checkpoint.get(_LOADERS):
            self._loaded_checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = own

    def _restore_position(self) -> None:
        """Sets loops and loaders to the checkpoint's position, also on another number of ranks."""
        try:
            at = Position.from_state_dict(self._loaded_checkpoint["position"])
        except (AttributeError, TypeError, ValueError):
            raise UserError(
                f"{self.trainer.ckpt_path} is of an older version of this project, which can't go on with it. HINT: fit with "
                "model.init_from=THIS FILE begins a new run with its weights."
            ) from None
        typed(self.trainer).gradients.load_state_dict(self._loaded_checkpoint.get("exact_grids", {}))
        here = data_ranks(self.trainer)
        if at.begun:
            self._logged_results().resume_with(self._loaded_checkpoint["logged_sums"], here.rank, here.count)
            self._logged_connector().restore_metrics(self._loaded_checkpoint)
        with _errors_of_checkpoint():
            set_counters(self._loaded_checkpoint["loops"]["fit_loop"], at, here.count)
        loaders_of(self.trainer).start_at(
            at.epoch, at.micro_batches, self._loaded_checkpoint.get("training_samples", []), at.begun,
            self._loaded_checkpoint.get(_MICRO_BATCH),
        )  # fmt: skip
        then, now = self._loaded_checkpoint.get(_THREADS), torch.get_num_threads()
        if then not in (None, now) and self.trainer.strategy.root_device.type == "cpu":
            log.warning(
                "The run goes on with %d thread(s) for each rank's operations in place of %d, and so with other sums in their "
                "last bits. HINT: trainer.threads=%d.",
                *(now, then, then),
            )
        if (fetcher := self.trainer.fit_loop._data_fetcher) is not None:
            iter(fetcher)  # begun already, at the beginning of the epoch: where a sharded network is restored

    def _step_loop(self) -> Steps:
        steps = self.trainer.fit_loop.epoch_loop
        assert isinstance(steps, Steps)
        return steps

    def _logged_connector(self) -> Logged:
        connector = self.trainer._logger_connector
        assert isinstance(connector, Logged)
        return connector

    def _logged_results(self) -> Results:
        return self._step_loop()._results

    def _unsaved_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that lie in no state_dict (persistent=False), by name."""
        module = self.trainer.lightning_module
        saved = module.state_dict(keep_vars=True)
        return {
            name: buffer for name, buffer in module.named_buffers() if name not in saved and not isinstance(buffer, DTensor)
        }

    def _changed_buffers(self) -> dict[str, Tensor]:
        """Returns the unsaved buffers whose values have changed since the start."""
        before = self._buffers_as_built
        return {
            name: buffer
            for name, buffer in self._unsaved_buffers().items()
            if name not in before
            or before[name].shape != buffer.shape
            or not torch.equal(before[name].to(buffer.device), buffer)
        }

    def _restore_buffers(self) -> None:
        """Copies the checkpoint's unsaved buffers into the module."""
        buffers = self._unsaved_buffers()
        for name, saved in self._loaded_checkpoint.get(_BUFFERS, {}).items():
            if name in buffers and buffers[name].shape == saved.shape:
                buffers[name].copy_(saved)

    def restore_model(self) -> None:
        """Restores the module. Called in every fit, resumed or not, before the hooks of its start. What they make is not there
        when it resumes.
        """
        self._shapes_as_built = shapes(self.trainer.lightning_module)
        if self._loaded_checkpoint and self.trainer.lightning_module.strict_loading:
            resize_buffers(self.trainer.lightning_module, self._loaded_checkpoint["state_dict"])
        super().restore_model()

    def restore_training_state(self) -> None:
        """Restores buffers, loops, optimisers and schedules. Called in every fit, resumed or not, when optimisers and schedules
        are there.
        """
        trainer = self.trainer
        self._buffers_as_built = {name: buffer.detach().cpu().clone() for name, buffer in self._unsaved_buffers().items()}
        self._restore_buffers()
        self._values_as_built = attributes(trainer)
        self.unsaved_digests = self._loaded_checkpoint.get(_VALUES, {}) if trainer.state.fn == "fit" else {}
        self._optimizers_as_built = _optimizer_names(trainer)
        self._schedules_as_built = [deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        super().restore_training_state()
        _refuse_short_one_cycle(trainer)
        if trainer.state.fn == "fit" and "callback_metrics" in self._loaded_checkpoint:
            # What schedules and stopping look at, until the next validation.
            trainer.callback_metrics.update(self._loaded_checkpoint["callback_metrics"])

    def restore_loops(self) -> None:
        with _errors_of_checkpoint():
            super().restore_loops()

    def restore_optimizers(self) -> None:
        """Restores the optimisers, but not how the steps are computed: a checkpoint may come from other devices."""
        for optimizer, saved in zip(self.trainer.optimizers, self._loaded_checkpoint["optimizer_states"], strict=False):
            saved_groups = saved.get("param_groups", ()) if isinstance(saved, dict) else ()
            for group, restored in zip(optimizer.param_groups, saved_groups, strict=False):
                restored.update({name: group[name] for name in _IMPLEMENTATION if name in group})
        try:
            super().restore_optimizers()
        except (KeyError, ValueError) as error:
            raise UserError(
                f"The checkpoint's states of optimisers do not fit {_optimizer_names(self.trainer)} ({error}): the run had "
                "others, or other parameters. HINT: have configure_optimizers make those that the run had."
            ) from error
        self._restore_dtypes_of_optimizers()

    def _restore_dtypes_of_optimizers(self) -> None:
        """Restores the dtypes of the optimisers' states. torch gives all of them the dtype of the parameters, which rounds
        NAdam's products and ASGD's rates in bf16, and an optimiser's own float32 beside weights in 16 bits.
        """
        module, saved = self.trainer.lightning_module, self._loaded_checkpoint["state_dict"]
        same = {
            id(parameter)
            for name, parameter in module.named_parameters()
            if getattr(saved.get(name), "dtype", None) == parameter.dtype
        }
        for optimizer, state in zip(self.trainer.optimizers, self._loaded_checkpoint["optimizer_states"], strict=False):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for number, values in state["state"].items():
                parameter = parameters[number]
                restored = optimizer.state[parameter]
                for name, value in values.items():
                    now = restored.get(name)
                    if not isinstance(now, Tensor) or not isinstance(value, Tensor) or now.dtype == value.dtype:
                        continue
                    if id(parameter) in same or value.shape != parameter.shape:  # in another precision it follows the weights
                        restored[name] = value.to(now.device)

    def restore_lr_schedulers(self) -> None:
        """Restores the schedules; where the configuration has changed them since the run began, with today's settings."""
        saved: list[dict[str, Any]] = self._loaded_checkpoint["lr_schedulers"]
        then: list[Any] | None = self._loaded_checkpoint.get("schedules_as_built")
        if then is None or self._schedules_as_built is None or not len(saved) == len(then) == len(self._schedules_as_built):
            super().restore_lr_schedulers()
            return
        changed = []
        for config, state, before, now in zip(
            self.trainer.lr_scheduler_configs, saved, then, self._schedules_as_built, strict=True
        ):
            merged = merge_settings(state, before, now)
            config.scheduler.load_state_dict(merged)
            if not _is_equal(merged, state):
                changed.append(config.scheduler)
                _update_learning_rate(config.scheduler)
        self._report_schedules(changed)

    def _report_schedules(self, changed: list[Any]) -> None:
        """Warns where the learning rate is 0 and steps are left; else logs the learning rate of schedules that have changed."""
        trainer = self.trainer
        lrs = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if lrs and not any(lrs) and (left := trainer.estimated_stepping_batches - trainer.global_step) > 0:
            log.warning(
                "The learning rate is 0 at step %d, and %s steps are left, which will change nothing as long as it is. "
                "HINT: give the schedule the length of the whole run.",
                *(trainer.global_step, left),
            )
        elif changed:
            shown = ", ".join(f"{lr:.3g}" for lr in dict.fromkeys(float(lr) for lr in lrs))
            log.info(
                "The schedule is another than the run began with: at step %d its lr is now %s.", trainer.global_step, shown
            )


@contextmanager
def _errors_of_checkpoint() -> Iterator[None]:
    """Turns errors within it into UserErrors: only the content of the checkpoint can be wrong there."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"The checkpoint's loops can't be restored ({type(error).__name__}: {shortened(error)}). HINT: take an older one."
        ) from error


def _optimizer_names(trainer: Trainer) -> str:
    return ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)


def _refuse_short_one_cycle(trainer: Trainer) -> None:
    """Raises a UserError where OneCycleLR has fewer steps than the run: it fails after its last one."""
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, OneCycleLR):
            moves = trainer.estimated_stepping_batches if config.interval == "step" else trainer.max_epochs or -1
            if config.scheduler.total_steps < moves // config.frequency:
                raise UserError(
                    f"OneCycleLR has total_steps={config.scheduler.total_steps}, and moves {moves // config.frequency} times "
                    "in this run. HINT: set its total_steps to the length of the run (of all of it, where one is made longer)."
                )


def merge_settings(saved: Any, then: Any, now: Any) -> Any:
    """Returns the saved state with today's (`now`) value of each setting that has changed since the run began (`then`)."""
    if isinstance(saved, dict) and isinstance(then, dict) and isinstance(now, dict):
        return {
            key: merge_settings(value, then.get(key, value), now.get(key, then.get(key, value))) for key, value in saved.items()
        }
    if isinstance(saved, (list, tuple)) and isinstance(then, (list, tuple)) and isinstance(now, (list, tuple)):
        if len(saved) == len(then) == len(now):
            return type(saved)(merge_settings(*three) for three in zip(saved, then, now, strict=True))
        return now if len(then) != len(now) else saved
    return saved if _is_equal(then, now) else now


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_is_equal(value[key], other[key]) for key in value)
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(_is_equal, value, other))
    return bool(value == other)


def _update_learning_rate(schedule: Any) -> None:
    """Gives the optimiser the learning rate of a changed schedule at this step, where the schedule can compute it."""
    tell = getattr(schedule, "_get_closed_form_lr", None)
    if tell is None and isinstance(schedule, (LambdaLR, OneCycleLR)):
        tell = schedule.get_lr
    if tell is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that somebody else asks than its own `step`
            lrs = tell()
        for group, lr in zip(schedule.optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr


def _gather_states_of_ranks(trainer: Trainer, own_states: dict[str, Any]) -> list[dict[str, Any] | None] | None:
    """Returns on rank 0 the states of each rank (None: as rank 0's); None where all are alike. Called by all ranks."""
    ranks = data_ranks(trainer)
    if ranks.count == 1:
        return None
    own_states = changed(own_states, _to_host)  # another rank would read a tensor of this one's device onto it
    held = io.BytesIO()
    torch.save(own_states, held)
    digests = ranks.all_gather_objects(hashlib.sha256(held.getvalue()).hexdigest())
    if len(set(digests)) == 1:
        return None
    states: list[Any] = [None] * ranks.count
    first, own = ranks.rank == 0, own_states if digests[ranks.rank] != digests[0] else None
    dist.gather_object(own, states if first else None, group=ranks.group, group_dst=0)
    return states


def _to_host(value: Any, name: str) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
