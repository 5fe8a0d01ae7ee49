"""Lightning's loop over the micro-batches, with all that happens to one in one place, and nothing that nobody asked for.

Lightning passes a micro-batch through forty layers of hooks, profiler contexts, closures and results, which takes longer than
a small step itself; and before each it tells all ranks whether a SIGTERM has come, which `StopTogether` does without a wait.
What is done here, and in which order, is what Lightning does. Where something is asked for that is not (see `_is_usual`),
Lightning's own loop does it.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from project.data.dealing import DealtLoader
from project.train.logged import Results
from project.train.metrics import States, put_back
from project.train.micro_batch import MicroBatch, micro_batch, samples_of
from project.train.position import out_of_time, timers
from project.train.rng import run_seed, seed_for_all

log = logging.getLogger(__name__)

# Hooks of the model that take over a part of the step.
_TAKES_OVER = (
    *("on_train_batch_start", "optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping"),
    "lr_scheduler_step",
)


def _nothing() -> None:
    pass


def fetching(trainer: Trainer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """From now on these are called before and after this trainer's loader is asked for a micro-batch."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop.before_fetch, loop.after_fetch = before, after


class _Weighted(_AutomaticOptimization):
    """Lightning's own way through a micro-batch, with the micro-batch's weight."""

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        result = super()._training_step(kwargs)
        weight = micro_batch(self.trainer).weight
        if weight != 1.0 and result.closure_loss is not None:
            result.closure_loss = result.closure_loss * weight
        return result


class _Named:
    """The batches of a loader, each noted as the one at hand before anybody sees it."""

    def __init__(self, fetcher: _DataFetcher, note: Callable[[Any], None]) -> None:
        self._fetcher, self._note = fetcher, note

    @property
    def done(self) -> bool:
        return self._fetcher.done

    def __next__(self) -> Any:
        found = next(self._fetcher)
        self._note(found[0])
        return found


class Steps(_TrainingEpochLoop):
    """The steps of an epoch."""

    _results: Results

    micro_batch = MicroBatch()
    """The one at hand."""

    _within = False
    """The run goes on within the epoch."""
    _validation_due = False
    """The run goes on with the validation that follows the last step."""
    _out_of_time: bool | None = None
    metric_states: States | None = None
    """Of torchmetrics, in an epoch that the run goes on with."""
    _learned = False
    """A micro-batch of this step had a loss."""

    before_fetch: Callable[[], None] = staticmethod(_nothing)
    after_fetch: Callable[[], None] = staticmethod(_nothing)
    """Called before and after the loader is asked for a micro-batch."""

    def __init__(self, trainer: Trainer, **settings: Any) -> None:
        super().__init__(trainer, **settings)
        self.automatic_optimization = _Weighted(trainer)
        self._results = Results(training=True)

    # Where a run goes on ---------------------------------------------------------------------------------------------

    def goes_on(self, within: bool) -> None:
        self._within = within

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._validation_due = state_dict.get("validation_due", False)

    def reset(self) -> None:
        if not self._within:
            super().reset()
            return
        self._within = False  # the counters stand where the run was
        self.scheduler_progress.reset_on_restart()
        self.automatic_optimization.optim_progress.reset_on_restart()

    @property
    def _is_validation_done(self) -> bool:
        return not self._validation_due

    def _should_check_val_fx(self, data_fetcher: _DataFetcher) -> bool:
        if self._validation_due:
            return True
        if self.trainer.should_stop and (self._should_accumulate() or self.is_out_of_time()):
            # Lightning would validate before it stops. But a step is finished first; and where the time is over is chance,
            # and the points of a curve are not.
            self.trainer.should_stop = False
            due = super()._should_check_val_fx(data_fetcher)
            self.trainer.should_stop = True
            return due
        return super()._should_check_val_fx(data_fetcher)

    @property
    def done(self) -> bool:
        """Who asks for the end within a step gets it after that step."""
        return super().done and not (self.trainer.should_stop and self._should_accumulate())

    def is_out_of_time(self) -> bool:
        """Asked when training is about to stop, by all ranks; rank 0's clock counts."""
        if not timers(self.trainer):
            return False
        if self._out_of_time is None:
            self._out_of_time = self.trainer.strategy.broadcast(out_of_time(self.trainer))
        return self._out_of_time

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        super().on_advance_end(data_fetcher)
        self._validation_due = False

    # A step ----------------------------------------------------------------------------------------------------------

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        seed_for_all(self.trainer, self.trainer.current_epoch)
        super().on_run_start(data_fetcher)
        self._results.put_back(self.trainer.strategy.root_device, self.trainer.strategy.reduce)
        if self.metric_states is not None:
            here = self.trainer.global_rank, self.trainer.world_size
            put_back(self.metric_states, self.trainer.lightning_module, *here)
            self.metric_states = None
        self._usual, self._out_of_time = self._is_usual(data_fetcher), None
        self._dealt = [one for one in data_fetcher.combined_loader.flattened if isinstance(one, DealtLoader)]
        self._run_seed = run_seed()
        log.debug("The steps are taken by %s.", "this project's loop" if self._usual else "Lightning's own loop")
        strategy = self.trainer.strategy
        if not self.trainer.lightning_module.automatic_optimization and "backward" not in vars(strategy):
            # It is what `manual_backward` calls.
            strategy.backward = partial(self._weigh, strategy.backward)
        if not self._usual:
            return
        self._told: dict[str, list[Callable[..., Any]]] = {}
        self._strategy, self._precision = self.trainer.strategy, self.trainer.precision_plugin
        self._module, self._optimizer = self.trainer.lightning_module, self.trainer.optimizers[0]
        self._scaler = getattr(self._precision, "scaler", None)
        self._index = bool(is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2))
        configs = self.trainer.lr_scheduler_configs
        self._schedules = [one for one in configs if one.interval == "step" and not one.reduce_on_plateau]
        hooks = self.trainer._data_connector._datahook_selector
        assert hooks is not None
        names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        self._before, self._transfer, self._after = (getattr(hooks.get_instance(name), name) for name in names)

    def _is_usual(self, data_fetcher: _DataFetcher) -> bool:
        trainer, module = self.trainer, self.trainer.lightning_module
        strategy, precision = trainer.strategy, trainer.precision_plugin
        return (
            module.automatic_optimization
            and not any(is_overridden(name, module, LightningModule) for name in _TAKES_OVER)
            and not self.automatic_optimization._skip_backward
            and type(trainer.profiler) is PassThroughProfiler
            and type(strategy) in (DDPStrategy, SingleDeviceStrategy)
            and getattr(strategy, "_model_averager", None) is None
            and type(precision) in (Precision, MixedPrecision, DoublePrecision, HalfPrecision)
            and len(trainer.optimizers) == 1
            and _steps_once(trainer.optimizers[0])
            and not isinstance(data_fetcher, _DataLoaderIterDataFetcher)
        )

    def _on_before_fetch(self) -> None:
        super()._on_before_fetch()
        self.before_fetch()

    def _on_after_fetch(self) -> None:
        self.after_fetch()
        super()._on_after_fetch()

    def _broadcast_sigterm_tensor(self) -> None:
        pass

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """A micro-batch, from the loader to the metrics."""
        if self._validation_due:
            return  # what follows is `on_advance_end`
        if not self._usual:
            whole = isinstance(data_fetcher, _DataLoaderIterDataFetcher)  # the module takes the batches by itself
            super().advance(data_fetcher if whole else _Named(data_fetcher, self._note))  # type: ignore[arg-type]
            return
        trainer, progress, logged = self.trainer, self.batch_progress, self._results
        batch, _, _ = next(data_fetcher)
        number = progress.current.ready
        self._note(batch)
        progress.is_last_batch = data_fetcher.done
        if batch is None:
            self._pass_over(number)
            return
        batch = self._before(self._precision.convert_input(batch), 0)
        batch = self._after(self._transfer(batch, self._strategy.root_device, 0), 0)
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        self._tell("on_train_batch_start", batch, number)
        progress.increment_started()

        if accumulates := self._should_accumulate():
            with getattr(self._strategy, "block_backward_sync", nullcontext)():
                outputs = self._gradient(batch, number)
        else:
            outputs = self._gradient(batch, number)
            self._step()
        self._processed(number, accumulates)

        self._tell("on_train_batch_end", outputs, batch, number)
        if logged:  # by self.log, in whatever was called here
            trainer._logger_connector.on_batch_end()
        else:
            logged.batch = None
        progress.increment_completed()
        if logged:
            trainer._logger_connector.update_train_step_metrics()

    def _pass_over(self, number: int) -> None:
        """The loader gave None: a micro-batch of no samples."""
        rank_zero_warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        progress = self.batch_progress
        progress.increment_ready()
        progress.increment_started()
        if number % self.trainer.accumulate_grad_batches == 0:
            self._optimizer.zero_grad()
            self._learned = False
        if not (accumulates := self._should_accumulate()):
            self._step()
        self._processed(number, accumulates)
        self._tell("on_train_batch_end", {}, None, number)
        progress.increment_completed()

    def _note(self, batch: Any) -> None:
        """Which micro-batch this is. Where there are several loaders, they go on together, and the first names it."""
        found = None
        for loader in self._dealt:
            if loader.taken:
                key = loader.taken.popleft()
                found = found or MicroBatch(key, loader.seed, loader.keys.order)
        if found is None:
            many, trainer = self.trainer.accumulate_grad_batches, self.trainer
            step, number = divmod(self.batch_progress.current.ready, many)
            key = (self.trainer.current_epoch, step, trainer.global_rank * many + number)
            found = MicroBatch(key, self._run_seed, counted=samples_of(batch))
        self.micro_batch = found

    def _weigh(self, backward: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        weight = self.micro_batch.weight
        return backward(loss if weight == 1.0 else loss * weight, *args, **kwargs)

    def teardown(self) -> None:
        self.trainer.strategy.__dict__.pop("backward", None)
        self._told = {}
        super().teardown()

    def _gradient(self, batch: Any, number: int) -> dict[str, Any]:
        """Forwards and backwards."""
        micro_batches = self.trainer.accumulate_grad_batches
        self._module.__dict__["_current_fx_name"] = "training_step"  # for those who log in it
        output = self._strategy.training_step(batch, number) if self._index else self._strategy.training_step(batch)
        outputs = dict(output) if isinstance(output, Mapping) else {"loss": output}
        if output is not None and not isinstance(outputs.get("loss"), Tensor):
            raise MisconfigurationException(
                "In automatic optimization, training_step must return a Tensor, a dict where the 'loss' key needs to be "
                "present, or None, which leaves the micro-batch out."
            )
        if number % micro_batches == 0:
            self._learned = False
            count = self.automatic_optimization.optim_progress.optimizer.zero_grad
            count.increment_ready()
            self._tell("on_before_zero_grad", self._optimizer)
            count.increment_started()
            self._optimizer.zero_grad()
            count.increment_completed()
        if output is None:
            rank_zero_warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
            return {}
        self._learned = True
        # Lightning divides by the micro-batches of a step, DDP by the ranks: what remains is a micro-batch's own size.
        loss, weight = outputs["loss"], self.micro_batch.weight
        if micro_batches != 1:
            loss = loss / micro_batches
        outputs["loss"] = loss.detach()
        if weight != 1.0:
            loss = loss * weight
        self._strategy.pre_backward(loss)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self._tell("on_before_backward", loss)
        loss.backward()
        self._tell("on_after_backward")
        self._strategy.post_backward(loss)
        return outputs

    def _step(self) -> None:
        count = self.automatic_optimization.optim_progress.optimizer.step
        count.increment_ready()
        if not self._learned:  # no micro-batch of this step had a loss
            count.increment_completed()
            return
        if self._scaler is not None and not getattr(self._optimizer, "_step_supports_amp_scaling", False):
            self._scaler.unscale_(self._optimizer)
        self._tell("on_before_optimizer_step", self._optimizer)
        if self.trainer.gradient_clip_val:
            how = self.trainer.gradient_clip_algorithm
            self._module.configure_gradient_clipping(self._optimizer, self.trainer.gradient_clip_val, how)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        count.increment_completed()

    def _processed(self, number: int, accumulates: bool) -> None:
        """What follows a micro-batch, at the end of a step and at the end of the epoch."""
        self.batch_progress.increment_processed()
        if not accumulates:
            self._move_schedules(number + 1)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _move_schedules(self, number: int) -> None:
        """Those that move with the steps; Lightning moves those of an epoch or of a metric."""
        for config in self._schedules:
            if number // self.trainer.accumulate_grad_batches % config.frequency == 0:
                self.scheduler_progress.increment_ready()
                config.scheduler.step()
                self.scheduler_progress.increment_completed()

    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Lightning counts a rank's micro-batches where a frequency is one of steps."""
        of_steps = [one for one in self.trainer.lr_scheduler_configs if one.interval == "step"]
        many = self.trainer.accumulate_grad_batches
        for config in of_steps:
            config.frequency *= many
        try:
            super()._update_learning_rates(interval, update_plateau_schedulers)
        finally:
            for config in of_steps:
                config.frequency //= many

    def _tell(self, hook: str, *args: Any) -> None:
        """Calls a hook of all that have it: the callbacks, then the model."""
        told = self._told.get(hook)
        if told is None:
            told = self._told[hook] = self._who_has(hook)
        if told:
            self._module.__dict__["_current_fx_name"] = hook
            for one in told:
                one(*args)

    def _who_has(self, hook: str) -> list[Callable[..., Any]]:
        trainer, module = self.trainer, self._module
        told: list[Callable[..., Any]] = []
        for callback in trainer.callbacks:
            method = getattr(callback, hook)
            if getattr(method, "__func__", method) is not getattr(Callback, hook):
                told.append(partial(method, trainer, module))
        if is_overridden(hook, module, LightningModule):
            told.append(getattr(module, hook))
        return told


def _steps_once(optimizer: Optimizer) -> bool:
    """Whether one gradient is all that it asks for. LBFGS evaluates the loss again and again; of others nobody knows."""
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)
