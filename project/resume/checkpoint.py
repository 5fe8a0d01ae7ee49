"""Saves what of a run lies in its checkpoint beside weights and optimiser, and restores it.

Rank 0 chooses the checkpoint, which all hosts read, or its own for all of them. Each rank's own states are in it, where they
differ from rank 0's. A run that resumes makes its network anew, which gets what was saved: a tensor that training made later is
refused.
"""

import hashlib
import io
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.tensor import DTensor

from project.checkpoints.callback import checkpoints_of
from project.checkpoints.exchange import bring_parts, has_all_parts
from project.checkpoints.reading import (
    Manifest,
    SafeCheckpointIO,
    is_url,
    memory_folder,
    newest_good,
    set_aside_later,
    whole_manifest,
)
from project.checkpoints.store import Store
from project.checkpoints.writing import check, unreadable_items
from project.cluster import shared_folder
from project.errors import FaultError, UserError, listed
from project.masking import MASK, without_secrets
from project.parts import changed
from project.resume.attributes import Attributes, attributes, changed_attributes
from project.resume.changes import refuse_short_one_cycle, restore_schedules
from project.resume.network import Shapes, check_made_again, loading, shapes, warn_if_not_loadable
from project.resume.stopping import Settings, decision, stands, stop_settings
from project.sharded.shards import split
from project.sharded.strategy import Sharded
from project.step.data_ranks import data_ranks
from project.step.ddp import all_gather_objects
from project.step.evaluation import loaders_of
from project.step.loop import Steps
from project.step.measurements import resume_loggers
from project.step.metric_states import with_parts
from project.step.optimizers import restore_dtypes
from project.step.position import (
    Position,
    check_loop_progress,
    is_over,
    out_of_time,
    position,
    position_of_lightning,
    set_counters,
)
from project.typed import StateDict, callbacks_of, typed
from project.untrusted import shortened

log = logging.getLogger(__name__)

T = TypeVar("T")

_SHOWN = 12  # names
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")  # of an optimiser's step


class Resuming(_CheckpointConnector):
    """Saves and restores also position, logged sums, schedules, buffers and ranks' states. Replaces Lightning's connector."""

    _schedules_as_built: list[StateDict] | None = None
    """The states of the schedules as the configuration has them, before any step."""
    _buffers_as_built: Mapping[str, Tensor] = MappingProxyType({})
    """Those that lie in no state_dict, before any step."""
    _shapes_as_built: Shapes = MappingProxyType({})
    """The network at the start of the fit."""
    _names_saved: frozenset[str] = frozenset()
    """Of the tensors in the last checkpoint."""
    _optimizers_as_built = ""
    _unreadable: dict[tuple[str, str], str] | None = None
    """What checkpoints have in place of hyper-parameters that can't be read again, by part and name; None before the first."""
    values_as_built: Attributes = MappingProxyType({})
    """The values that the user's objects keep in Python, before any step."""
    changed_values: Mapping[str, bytes] = MappingProxyType({})
    """Digests of those that had changed when the checkpoint was saved; none where no run is resumed."""
    chosen: str | Path | None = None
    """The checkpoint that the verb reads, where this rank knows it: rank 0 does."""
    _stop_settings: Settings = MappingProxyType({})
    """Of the callbacks that may stop the run, as it was configured."""
    _takes_newest = False

    _weights_only: bool | None = None
    """The verb's own argument: Lightning does not report it where a sharded network is restored."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._made = time.time()

    @property
    def _steps(self) -> Steps:
        steps = self.trainer.fit_loop.epoch_loop
        assert isinstance(steps, Steps)
        return steps

    @property
    def trusts_checkpoints(self) -> bool:
        """Returns whether the verb was given `weights_only=False`: checkpoints may hold what only Python's pickle reads."""
        return self._weights_only is False

    def check_readable(self, checkpoint: StateDict) -> None:
        """Raises a UserError that names the part of a checkpoint from which a run could not resume."""
        if not self.trusts_checkpoints:
            check(checkpoint)

    def begin_verb(self, chosen: str | Path | None, weights_only: bool | None) -> None:
        """Begins another fit, or another verb."""
        self.chosen, self._weights_only, self._loaded_checkpoint, self._unreadable = chosen, weights_only, {}, None
        self._steps.start.clear()

    # Into a checkpoint -----------------------------------------------------------------------------------------------

    def dump_checkpoint(self, weights_only: bool | None = None) -> StateDict:
        """Returns a checkpoint of this moment. All ranks must call this together; nothing is copied or written."""
        with self._steps.start.buffers():
            checkpoint: StateDict = super().dump_checkpoint(weights_only)
            self._replace_hyperparameters(checkpoint)
            if self.trainer.state.fn == "fit" and not weights_only:
                self._add_position(checkpoint)
                self._warn_of_moved_states(checkpoint)
        if self._schedules_as_built is not None and not weights_only:
            self._warn_of_other_optimizers()
            self._check_loadable(checkpoint["state_dict"])
            checkpoint["schedules_as_built"] = self._schedules_as_built
            checkpoint["callback_metrics"] = {
                name: torch.as_tensor(value).detach().cpu().as_subclass(Tensor)
                for name, value in sorted(self.trainer.callback_metrics.items())
            }
            logged = self.trainer.logged_metrics
            checkpoint["logged_names"] = [name for name in checkpoint["callback_metrics"] if name in logged]
            # They may go by a rank's own micro-batches, and exact checkpoints have the same bytes on any number of ranks.
            if not typed(self.trainer).exact:
                checkpoint["changed_values"] = changed_attributes(attributes(self.trainer), self.values_as_built)
            checkpoint["states_of_ranks"] = _gather_states_of_ranks(self.trainer, checkpoint)
        return checkpoint

    def _check_loadable(self, saved: Mapping[str, object]) -> None:
        """Checks whether a run could resume with a checkpoint's state_dict; tries it where its names become others."""
        module = self.trainer.lightning_module
        check_made_again(module, saved, self._shapes_as_built)
        names, self._names_saved = self._names_saved, frozenset(saved)
        if self._names_saved not in (names, self._shapes_as_built.keys()) and self.trainer.is_global_zero:
            warn_if_not_loadable(module, saved)

    def _add_position(self, checkpoint: StateDict) -> None:
        """Adds the position, and what belongs to it: the loaders' states, the sums and metrics of this epoch so far."""
        loaders, at, start = loaders_of(self.trainer), position(self.trainer), self._steps.start
        fit_loop = checkpoint["loops"]["fit_loop"]
        checkpoint["states_of_loaders"] = fit_loop["state_dict"].get("combined_loader", [])
        before = self._buffers_as_built
        checkpoint["unsaved_buffers"] = {
            name: buffer
            for name, buffer in self._unsaved_buffers().items()
            if name not in before or not torch.equal(before[name].to(buffer.device), buffer)
        }
        checkpoint["threads"] = torch.get_num_threads()
        checkpoint["training_samples"] = loaders.set_sizes
        checkpoint["samples_of_a_micro_batch"] = loaders.micro_batch
        checkpoint["position"] = at.state_dict()
        stopped_early = self.trainer.should_stop and typed(self.trainer).stopped_by
        if stopped_early and not at.validation_due and not out_of_time(self.trainer):
            checkpoint["stopped_early"] = decision(self.trainer, self._stop_settings)
        if grids := start.grids if start.applies else typed(self.trainer).gradients.state_dict():
            checkpoint["exact_grids"] = grids
            set_counters(fit_loop, at, 1)  # as on one rank: the file does not tell how many there were
        results = self._steps._results
        with results.before_step() if start.has_values else nullcontext():
            checkpoint["logged_sums"] = results.sums(data_ranks(self.trainer))
        checkpoint |= typed(self.trainer).logged.metrics_of_ranks(start.applies)

    def _warn_of_moved_states(self, checkpoint: StateDict) -> None:
        """Warns where a checkpoint within a step has states of now, and the rest of it is of the step's beginning."""
        start = self._steps.start
        names = start.moved()
        if start.applies and checkpoint["states_of_loaders"]:
            names.append("the state of the training loader")
        if names and self.trainer.is_global_zero:
            log.warning(
                "A checkpoint is saved within step %d, which a resumed run takes again from its beginning, but %s has moved "
                "since: such a run is another one. HINT: save between two steps; move it in on_before_optimizer_step.",
                *(self.trainer.global_step + 1, listed(names, _SHOWN)),
            )

    def _replace_hyperparameters(self, checkpoint: StateDict) -> None:
        """Replaces what `save_hyperparameters` keeps and no checkpoint has: secrets, since it is copied and given away, and
        what can't be read again, such as a class.
        """
        masked: set[str] = set()
        is_first = self._unreadable is None
        self._unreadable = unreadable = self._unreadable or {}
        for part in ("hyper_parameters", "datamodule_hyper_parameters"):
            if part not in checkpoint:
                continue
            checkpoint[part] = kept = without_secrets(checkpoint[part], masked)
            if self.trusts_checkpoints or not isinstance(kept, dict):
                continue
            choices = {name: value for name, value in kept.items() if isinstance(value, Enum)}
            plain = {name: value.value for name, value in choices.items() if isinstance(value, (str, int))}  # makes it again
            if is_first:
                items = unreadable_items({**kept, **plain})
                unreadable |= {(part, name): f"(not saved: {kind})" for name, kind in items.items()}
            texts = {name: text for (of, name), text in unreadable.items() if of == part and name in kept}
            if plain or texts:
                checkpoint[part] = {**kept, **plain, **texts}
        if not (is_first and self.trainer.is_global_zero):
            return
        for names, text in ((masked, MASK), (sorted({name for _, name in unreadable}), "(not saved: ...)")):
            if names:
                log.warning(
                    "Checkpoints have %s in place of what save_hyperparameters keeps as %s. HINT: load_from_checkpoint takes "
                    "the real values by name; save_hyperparameters(ignore=[...]) leaves them out.",
                    *(text, ", ".join(sorted(names))),
                )

    def _warn_of_other_optimizers(self) -> None:
        """Warns where the optimisers are others than `configure_optimizers` made: a resumed run could not load their states."""
        now = _optimizer_names(self.trainer)
        if now != self._optimizers_as_built and self.trainer.is_global_zero:
            log.warning(
                "The optimiser is %s now, and configure_optimizers made %s: a resumed run could not take over its state. "
                "HINT: make both there, or begin another run with these weights.",
                *(now, self._optimizers_as_built),
            )
        self._optimizers_as_built = now

    def _unsaved_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers that lie in no state_dict (persistent=False), by name."""
        module = self.trainer.lightning_module
        saved = module.state_dict(keep_vars=True)
        return {
            name: buffer for name, buffer in module.named_buffers() if name not in saved and not isinstance(buffer, DTensor)
        }

    # And back --------------------------------------------------------------------------------------------------------

    def _parse_ckpt_path(
        self, state_fn: TrainerFn, ckpt_path: str | Path | None, model_provided: bool, model_connected: bool
    ) -> str | Path | None:
        """Returns the checkpoint: "last" is the newest of this run's folder, "best" the best one where this Trainer has saved
        none; Lightning looks for those of its ModelCheckpoint.
        """
        saved = checkpoints_of(self.trainer)
        if ckpt_path == "best" and saved and saved is self.trainer.checkpoint_callback and not saved.best_model_path:
            # Rank 0 tells the others, whose hosts may not have the folder.
            is_first = self.trainer.is_global_zero
            return str(typed(self.trainer).best_checkpoint(saved.monitor, saved.mode)) if is_first else None
        is_of_run = ckpt_path == "last" and saved
        if is_of_run and saved and saved.copy_to and state_fn == TrainerFn.FITTING:
            if not self.trainer.is_global_zero:  # whom rank 0 tells
                return None
            Store(saved.copy_to, Path(self.trainer.default_root_dir)).fetch()
        # All ranks look, so nothing is set aside.
        newest = newest_good(Path(self.trainer.default_root_dir) / "checkpoints", set_aside=False) if is_of_run else None
        self._takes_newest = newest is not None
        if newest is not None:
            return str(newest[0])
        if is_of_run and state_fn == TrainerFn.FITTING and not callbacks_of(self.trainer, ModelCheckpoint):
            log.warning("There is no checkpoint in %s: the run begins at its beginning.", self.trainer.default_root_dir)
            path = None
        else:
            path = super()._parse_ckpt_path(state_fn, ckpt_path, model_provided, model_connected)
        if path is None and ckpt_path == "last" and state_fn == TrainerFn.FITTING and self.trainer.is_global_zero:
            # The run may have been ended before its first checkpoint. What this Trainer has logged before the fit stays.
            events = Path(self.trainer.default_root_dir).glob("events.*")
            if any(file.stat().st_mtime < self._made for file in events):
                resume_loggers(self.trainer.loggers, 0)
        return path

    def _read(self, path: str | None, weights_only: bool | None) -> None:
        """Reads the checkpoint; where the network is sharded, what this rank has of it."""
        strategy, reader = self.trainer.strategy, self.trainer.strategy.checkpoint_io
        sharded = strategy if isinstance(strategy, Sharded) and strategy.is_sharded else None
        if isinstance(reader, SafeCheckpointIO):
            reader.slice_of = sharded.slice_of if sharded else None
        self._read_on_hosts(path, weights_only)
        if path and sharded:
            self._loaded_checkpoint = sharded.shards_of(self._loaded_checkpoint)

    def _read_on_hosts(self, path: str | None, weights_only: bool | None) -> None:
        """Reads the checkpoint on all hosts, or, where only rank 0's host has it, there."""
        trainer = typed(self.trainer)
        strategy = trainer.strategy
        if not path or not dist.is_initialized():
            super().resume_start(path, weights_only)
            return
        in_memory = strategy.broadcast(Path(path).parent == memory_folder())
        if in_memory and isinstance(strategy, Sharded) and (trainer.num_nodes > 1 or not has_all_parts(Path(path))):
            slice_of = strategy.slice_of if strategy.is_sharded else lambda stored: stored.read()
            here = bring_parts(Path(path), trainer.global_rank, trainer.local_rank, slice_of)
            super().resume_start(here, weights_only)
        elif trainer.num_nodes == 1 or is_url(path):
            super().resume_start(path, weights_only)
        elif trainer.shared_folder and not in_memory:
            gather = partial(all_gather_objects, ranks=trainer.world_size)
            if problem := shared_folder.file_problem(Path(path), trainer.host_names, gather):
                raise FaultError(f"{problem}. HINT: put it where all hosts see it, or set trainer.shared_folder=false.")
            super().resume_start(path, weights_only)
        else:  # through the hosts' memory: the device may have no room for it
            load = strategy.load_checkpoint
            strategy.load_checkpoint = partial(_from_rank_0, load)  # type: ignore[method-assign]
            try:
                super().resume_start(path, weights_only)
            finally:
                del strategy.load_checkpoint

    def resume_start(self, checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        """Reads the checkpoint that rank 0 chose, and prepares it for this rank, among today's number of ranks. A search for a
        learning rate reads one of its own, when a fit starts.
        """
        if self._loaded_checkpoint:
            raise UserError(
                f"{checkpoint_path} would be restored before the run's own has been restored, and take its place. HINT: search "
                "(for a learning rate, say) when the run begins, and not when it resumes: trainer.ckpt_path is set then."
            )
        chosen = None if checkpoint_path is None else str(checkpoint_path)
        manifest = (whole_manifest(Path(chosen)) if chosen and self.trainer.is_global_zero else None) or {}
        path, in_order = self.trainer.strategy.broadcast((chosen, [*manifest.get("metrics", ())]))
        # Lightning converts the network after loading: float64 weights would pass through float32, and be rounded.
        self.trainer.precision_plugin.convert_module(self.trainer.lightning_module)
        self._read(path, self._weights_only if weights_only is None else weights_only)
        saved = self._loaded_checkpoint
        check_loop_progress(saved.get("loops", {}))
        if metrics := saved.get("callback_metrics"):  # sorted in the file: a rank may have logged them in another order
            saved["callback_metrics"] = {name: metrics[name] for name in [*in_order, *metrics] if name in metrics}
        at = None
        of_lightning = None
        if self.trainer.state.fn == "fit" and "position" not in saved and (of_lightning := position_of_lightning(saved)):
            saved |= {"position": of_lightning.state_dict(), "logged_sums": {}}
            if self.trainer.is_global_zero:
                log.warning(
                    "The checkpoint is of Lightning's own Trainer, from within an epoch: the run continues after step %d of "
                    "epoch %d, as if a step had as many samples there as here. A loader that shuffles has another order here, "
                    "so that some samples of this epoch come twice, and others not at all; its means are of what follows. "
                    "HINT: a checkpoint of an epoch's end has all of it.",
                    *(of_lightning.step, of_lightning.epoch + 1),
                )
        if self.trainer.state.fn == "fit" and "position" in saved:
            if "current_model_state" in saved and not any(map(_reads_checkpoints, typed(self.trainer).callbacks)):
                saved["state_dict"] = saved["current_model_state"]
                log.warning(
                    "The checkpoint has averaged weights, of a callback that trainer.callbacks no longer has: training "
                    "continues with the weights that were trained."
                )
            at = self._restore_position(saved, counts_steps=of_lightning is not None)
        states, ranks = saved.get("states_of_ranks"), data_ranks(self.trainer)
        if states and len(states) == ranks.count:
            saved.update(states[ranks.rank] or {})
        elif states:
            log.info(
                "States of callbacks or loaders differ between the %d ranks of the checkpoint: all %d continue with rank 0's.",
                *(len(states), ranks.count),
            )
        if of_loaders := saved.get("states_of_loaders"):
            saved["loops"]["fit_loop"]["state_dict"]["combined_loader"] = of_loaders
        self._stop_settings = stop_settings(self.trainer)
        if (early := saved.get("stopped_early")) and not self.trainer.strategy.broadcast(stands(early, self._stop_settings)):
            del saved["stopped_early"]
        is_own = of_lightning is None and chosen == str(self.chosen)  # and not a search's
        if at and self.trainer.is_global_zero and self.chosen and is_own:
            self._resume_curves(at, manifest, "stopped_early" in saved)
        for callback in callbacks_of(self.trainer, EarlyStopping):
            state = saved.get("callbacks", {}).get(callback.state_key)
            if type(callback) is EarlyStopping and isinstance(state, dict):
                state["patience"] = callback.patience  # a setting, which Lightning restores as a state

    def _resume_curves(self, at: Position, manifest: Manifest, stopped_early: bool) -> None:
        """Has the loggers continue their curves from a position, and sets later checkpoints aside. Called by rank 0."""
        trainer = self.trainer
        if not (self._takes_newest or typed(trainer).configuration):  # the command line has done that
            set_aside_later(at.global_step, Path(trainer.default_root_dir, "checkpoints"))
        if manifest.get("finished") and (stopped_early or 0 < trainer.max_steps <= at.global_step):
            return  # what its epoch's end has logged is in no checkpoint, and is not logged again
        first, logged = min(at.global_step, at.logged_steps), manifest.get("logged")
        step_end_due = at.validation_due or at.schedules_due
        if logged is None:  # another callback's checkpoint does not keep those of its step
            first += 1 + step_end_due
        resume_loggers(trainer.loggers, first, logged or (), starts_again=not step_end_due)

    def _restore_position(self, saved: StateDict, counts_steps: bool) -> Position:
        """Sets loops and loaders to the checkpoint's position, also on another number of ranks, and returns it.

        `counts_steps`: it counts steps in the place of micro-batches.
        """
        try:
            at = Position.from_state_dict(saved["position"])
        except (AttributeError, TypeError, ValueError):
            raise UserError(
                f"{self.trainer.ckpt_path} is of an older version of this project, which can't continue with it. HINT: fit "
                "with model.init_from=THIS FILE begins a new run with its weights."
            ) from None
        typed(self.trainer).gradients.load_state_dict(saved.get("exact_grids", {}))
        ranks = data_ranks(self.trainer)
        if at.begun:
            self._steps._results.resume_with(saved["logged_sums"], ranks.rank, ranks.count)
        # Metrics that were logged are reset at the end of their epoch.
        logged = () if at.begun else {entry["meta"]["metric_attribute"] for entry in saved["logged_sums"].values()}
        ended = with_parts(logged, self.trainer.lightning_module)
        self._steps.saved_metrics = {
            part: {name: states for name, states in saved.get(part, {}).items() if name not in ended}
            for part in ("metric_states", "exact_metrics", "exact_validations")
        }
        with _loop_errors_as_user_errors():
            set_counters(saved["loops"]["fit_loop"], at, 1 if counts_steps else ranks.count)
        sizes, size = saved.get("training_samples", []), saved.get("samples_of_a_micro_batch")
        if counts_steps:
            steps = (at.total_micro_batches - at.step) / at.epoch if at.epoch else None
            loaders_of(self.trainer).start_at_step(at.epoch, at.step, steps)
        else:
            loaders_of(self.trainer).start_at(at.epoch, at.micro_batches, sizes, at.begun, size)
        if (fetcher := self.trainer.fit_loop._data_fetcher) is not None:
            iter(fetcher)  # begun already, at the beginning of the epoch: where a sharded network is restored
        return at

    def restore_model(self) -> None:
        """Restores the module. Called in every fit, resumed or not, before the hooks of its start, which may make more."""
        module = self.trainer.lightning_module
        with loading(module):
            super().restore_model()
        self._shapes_as_built, self._names_saved = shapes(module), frozenset()

    def restore_training_state(self) -> None:
        """Restores buffers, loops, optimisers and schedules. Called in every fit, resumed or not, when these are there."""
        trainer, saved = self.trainer, self._loaded_checkpoint
        buffers = self._unsaved_buffers()
        self._buffers_as_built = {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}
        for name, value in saved.get("unsaved_buffers", {}).items():
            if name in buffers and buffers[name].shape == value.shape:
                buffers[name].copy_(value)
        self.values_as_built = attributes(trainer)
        if trainer.state.fn == "fit":
            self.changed_values = saved.get("changed_values", {})
        self._optimizers_as_built = _optimizer_names(trainer)
        self._schedules_as_built = [deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        super().restore_training_state()
        refuse_short_one_cycle(trainer)
        if trainer.state.fn == "fit" and (early := saved.get("stopped_early")):
            trainer.should_stop, typed(trainer).stopped_by = True, early["by"]
            if is_over(trainer) and trainer.is_global_zero:
                log.warning(
                    "The run stopped early, by %s, after step %d: nothing is left to do. HINT: a larger trainer.max_epochs (or "
                    "max_steps, or max_time), or another setting of what stopped it, makes it longer.",
                    *(early["by"].partition("{")[0], trainer.global_step),
                )
        then, now = saved.get("threads"), torch.get_num_threads()
        on_cpu, over = trainer.strategy.root_device.type == "cpu", trainer.state.fn != "fit" or is_over(trainer)
        rank_0_has = trainer.strategy.broadcast(now) if on_cpu else now
        if on_cpu and then not in (None, now) and not over and (trainer.is_global_zero or now != rank_0_has):
            log.warning(
                "The run continues with %d thread(s) for each rank's operations in place of %d, and so with other sums in "
                "their last bits. HINT: trainer.threads=%d.",
                *(now, then, then),
            )
        if trainer.state.fn == "fit" and "callback_metrics" in saved:
            # What schedules and stopping look at, until the next validation.
            metrics = saved["callback_metrics"]
            trainer.callback_metrics.update(metrics)
            self._steps._results.values_of_last_step.update(metrics)
            trainer.logged_metrics.update({name: metrics[name] for name in saved.get("logged_names", ()) if name in metrics})

    def restore_loops(self) -> None:
        with _loop_errors_as_user_errors():
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
        weights = self._loaded_checkpoint["state_dict"]
        same = {  # in another precision states follow the weights
            id(parameter)
            for name, parameter in self.trainer.lightning_module.named_parameters()
            if name in weights and weights[name].dtype == parameter.dtype
        }
        for optimizer, saved in zip(self.trainer.optimizers, self._loaded_checkpoint["optimizer_states"], strict=False):
            restore_dtypes(optimizer, saved, lambda parameter: id(parameter) in same)

    def restore_lr_schedulers(self) -> None:
        then: list[StateDict] | None = self._loaded_checkpoint.get("schedules_as_built")
        saved: list[StateDict] = self._loaded_checkpoint["lr_schedulers"]
        now = self._schedules_as_built
        if then is not None and now is not None and len(saved) == len(then) == len(now):
            restore_schedules(self.trainer, saved, then, now)
        else:
            super().restore_lr_schedulers()


def _reads_checkpoints(callback: Callback) -> bool:
    """Returns whether a callback takes what it wants from a checkpoint by itself, as Lightning's WeightAveraging does."""
    return is_overridden("on_load_checkpoint", callback, Callback) and not type(callback).__module__.startswith("project.")


@contextmanager
def _loop_errors_as_user_errors() -> Iterator[None]:
    """Turns a KeyError, TypeError or AttributeError into a UserError while the loops of a checkpoint are restored: only its
    content can be wrong there.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"The checkpoint's loops can't be restored ({type(error).__name__}: {shortened(error)}). HINT: take an older one."
        ) from error


def _from_rank_0(load: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Returns on all ranks what rank 0 reads."""
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    sent = [load(*args, **kwargs) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent, 0, group=group)
    dist.destroy_process_group(group)
    return cast(T, sent[0])


def _optimizer_names(trainer: Trainer) -> str:
    return ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)


def _gather_states_of_ranks(trainer: Trainer, checkpoint: StateDict) -> list[StateDict | None] | None:
    """Returns on rank 0 what differs between the ranks: the states of callbacks, of the data and of its loaders, by rank.

    None for a rank whose states are rank 0's; None where all are alike. Called by all ranks.
    """
    data, ranks = typed(trainer).datamodule, data_ranks(trainer)
    if ranks.count == 1:
        return None
    names = ("callbacks", "states_of_loaders", *([] if data is None else [type(data).__qualname__]))
    own = split({name: checkpoint[name] for name in names if checkpoint.get(name)}).marked
    # Another rank would read a tensor of this one's device onto it.
    own = changed(own, lambda value, _: value.cpu() if isinstance(value, Tensor) else value)
    file = io.BytesIO()
    torch.save(own, file)
    digests = ranks.all_gather_objects(hashlib.sha256(file.getvalue()).hexdigest())
    if len(set(digests)) == 1:
        return None
    states: list[StateDict | None] = [None] * ranks.count
    differing = own if digests[ranks.rank] != digests[0] else None
    dist.gather_object(differing, states if ranks.rank == 0 else None, group=ranks.group, group_dst=0)
    return states
