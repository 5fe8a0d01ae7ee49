"""The loop of an epoch, around its steps: counters, schedules, validations, and the hooks of callbacks."""

from collections.abc import Callable
from functools import partial

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.model_helpers import is_overridden

from project.step.capture import is_capturable
from project.step.chance import Moments
from project.step.hooks import StepHooks
from project.step.position import counts, out_of_time, timers
from project.step.results import Results
from project.step.slow_path import WeightedResults
from project.step.state import step_state
from project.step.step_start import StepStart
from project.typed import Fetcher, StateDict, typed

_FETCHING = "[_TrainingEpochLoop].train_dataloader_next"
"""The name of the wait for data in a profiler's report."""


def add_callback(trainer: Trainer, callback: Callback) -> None:
    """Adds a callback during training, as the last one."""
    _change_callbacks(trainer, [*typed(trainer).callbacks, callback])


def remove_callback(trainer: Trainer, callback: Callback) -> None:
    """Removes a callback during training."""
    _change_callbacks(trainer, [other for other in typed(trainer).callbacks if other is not callback])


def _change_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    typed(trainer).callbacks = callbacks
    steps = trainer.fit_loop.epoch_loop
    assert isinstance(steps, EpochLoop)
    steps._methods_of_hooks = {}
    steps.state.runner.change_callbacks()


class EpochLoop(_TrainingEpochLoop):
    """Lightning's loop of an epoch, which counts steps instead of a rank's micro-batches, and resumes within an epoch."""

    _results: Results

    resumes_within_epoch = False
    """The run resumes within the epoch."""
    _validation_due = False
    """The run resumes with the validation that follows the last step."""
    _schedules_due = False
    """The run resumes with the schedules that go by a metric, which follow the last step."""
    _out_of_time: bool | None = None
    saved_metrics: StateDict | None = None
    """The states of torchmetrics, where a run resumes, until they are restored."""
    _counts_own_steps = False
    """The fit is on the fast path: its only optimiser's count is the number of steps."""
    _has_validation = True
    """The fit has validation batches."""
    captures_graphs = False
    """Steps are taken as CUDA graphs, where that is possible."""

    def __init__(self, trainer: Trainer, moments: Moments, min_steps: int | None = None, max_steps: int = -1) -> None:
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self.moments = moments
        self.automatic_optimization.output_result_cls = WeightedResults(trainer)  # type: ignore[assignment]
        self.state, self.start = step_state(trainer), StepStart(trainer)
        self._methods_of_hooks: dict[tuple[str, bool], list[Callable[..., object]]] = {}

    # Where a run resumes ---------------------------------------------------------------------------------------------

    def on_load_checkpoint(self, state_dict: StateDict) -> None:
        super().on_load_checkpoint(state_dict)
        self._validation_due = state_dict.get("validation_due", False)
        self._schedules_due = state_dict.get("schedules_due", False)

    def reset(self) -> None:
        """Resets the counters at the start of an epoch, but not where the run resumes within one."""
        if not self.resumes_within_epoch:
            super().reset()
            return
        self.resumes_within_epoch = False  # the counters stand where the run was
        batches = counts(self.batch_progress.current)
        if batches.processed > batches.completed:
            # Saved by Lightning's own Trainer, in on_train_batch_end.
            self.batch_progress.increment_completed()
            self._batches_that_stepped += int(not self.accumulates())
        self.batch_progress.reset_on_restart()  # what had begun, by Lightning's count, is done again
        self.scheduler_progress.reset_on_restart()
        self.automatic_optimization.optim_progress.reset_on_restart()

    def restore_metrics(self) -> None:
        """Restores the states of torchmetrics, once."""
        if self.saved_metrics is not None:
            typed(self.trainer).logged.restore_metrics(self.saved_metrics)
            self.saved_metrics = None

    def _should_check_val_fx(self, data_fetcher: Fetcher) -> bool:
        """Returns whether to validate now, as Lightning does, but a stop within a step or for time brings none forward."""
        if self._validation_due:
            return True
        if not self._has_validation or self._schedules_due:
            return False
        if self.trainer.should_stop and (self.accumulates() or self.is_out_of_time()):
            # Lightning would validate before it stops. But a step is finished first; and where the time is over is chance,
            # and the points of a curve are not.
            self.trainer.should_stop = False
            due = self._is_validation_due(data_fetcher)
            self.trainer.should_stop = True
            return due
        return self._is_validation_due(data_fetcher)

    def _is_validation_due(self, data_fetcher: Fetcher) -> bool:
        """Returns whether a validation is due, on all ranks alike. Lightning reads each rank's clock, within a step, too; and
        it counts micro-batches.
        """
        trainer = self.trainer
        if trainer._val_check_time_interval is not None:
            due = not self.accumulates() and super()._should_check_val_fx(data_fetcher)
            return bool(trainer.strategy.broadcast(due)) if trainer.world_size > 1 else due
        steps, many = trainer.limit_train_batches, trainer.accumulate_grad_batches
        if many == 1 or not isinstance(steps, int) or trainer.val_check_batch != float("inf"):
            return super()._should_check_val_fx(data_fetcher)
        trainer.limit_train_batches = steps * many
        try:
            return super()._should_check_val_fx(data_fetcher)
        finally:
            trainer.limit_train_batches = steps

    @property
    def global_step(self) -> int:
        """Returns the number of steps taken, which is read a dozen times a step; Lightning looks first whether the module steps
        by itself.
        """
        return self.automatic_optimization.optim_progress.optimizer_steps if self._counts_own_steps else super().global_step

    @property
    def done(self) -> bool:
        """Returns whether the loop ends: a request to stop within a step takes effect after that step, and after the validation
        that follows it.
        """
        if self._validation_due or self._schedules_due or (self.trainer.should_stop and self.accumulates()):
            return False
        return super().done

    def ends_epoch(self, coming: int = 0) -> bool:
        """Returns whether the micro-batch at hand is the last of its epoch; the next one, where `coming` is 1."""
        batches = self.batch_progress
        return bool(batches.is_last_batch or batches.current.ready + coming == self.trainer.num_training_batches)

    def accumulates(self, coming: int = 0) -> bool:
        """Returns whether its step continues after the micro-batch at hand, or after the next one."""
        if (self.batch_progress.current.ready + coming) % self.trainer.accumulate_grad_batches == 0:
            return False
        return self.trainer.strategy.handles_gradient_accumulation or not self.ends_epoch(coming)

    def is_out_of_time(self) -> bool:
        """Returns whether the time is used up, by rank 0's clock. Called when training is about to stop, by all ranks."""
        if not timers(self.trainer):
            return False
        if self._out_of_time is None:
            self._out_of_time = self.trainer.strategy.broadcast(out_of_time(self.trainer))
        return self._out_of_time

    def on_advance_end(self, data_fetcher: Fetcher) -> None:
        self.moments.end_micro_batch()
        if not self.accumulates():
            self._results.discard_skipped_step()
            self._results.keep_values_of_step()
        super().on_advance_end(data_fetcher)
        self._validation_due = self._schedules_due = False

    # Counters and schedules -------------------------------------------------------------------------------------------

    def _count_step_as_begun(self, accumulates: bool) -> None:
        """Counts the step as begun, in its last micro-batch: until it is completed, the run's position is before it."""
        if not accumulates:
            self.automatic_optimization.optim_progress.optimizer.step.increment_ready()

    def _count_as_processed(self, number: int, accumulates: bool, stepped: bool = True) -> None:
        """Counts a micro-batch as processed, and moves the schedules at the end of a step (unless `stepped` is False) and of an
        epoch.
        """
        count = self.automatic_optimization.optim_progress.optimizer
        if number % self.trainer.accumulate_grad_batches == 0:
            count.zero_grad.increment_ready()
            count.zero_grad.increment_started()
            count.zero_grad.increment_completed()
        if not accumulates and stepped:
            count.step.increment_completed()
        self.batch_progress.increment_processed()
        if not accumulates and stepped:
            self._move_schedules(number + 1)
        if self.ends_epoch():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _move_schedules(self, number: int) -> None:
        """Moves the schedules that move with the steps; Lightning moves those of an epoch or of a metric."""
        for config in self._schedules:
            if number // self.trainer.accumulate_grad_batches % config.frequency == 0:
                self.scheduler_progress.increment_ready()
                if is_overridden("lr_scheduler_step", self._module, LightningModule):
                    self._call_hook("lr_scheduler_step", config.scheduler, None)
                else:
                    config.scheduler.step()
                self.scheduler_progress.increment_completed()

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Moves schedules by steps: Lightning counts a rank's micro-batches where a frequency is one of steps."""
        if interval == "step" and self.accumulates():
            return
        if interval == "step" and not update_plateau_schedulers:  # Lightning's loop has taken a step
            self._call_hook("on_step_taken")
        if self._on_fast_path and update_plateau_schedulers and not self._has_plateau_schedules:
            return
        of_steps = [config for config in self.trainer.lr_scheduler_configs if config.interval == "step"]
        many = self.trainer.accumulate_grad_batches
        for config in of_steps:
            config.frequency *= many
        try:
            super().update_lr_schedulers(interval, update_plateau_schedulers)
        finally:
            for config in of_steps:
                config.frequency //= many

    # Hooks -----------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Calls `on_step_begins` before the first micro-batch of a step: nothing of the step has been read, and loaders know
        where they are.
        """
        if self.batch_progress.current.ready % self.trainer.accumulate_grad_batches == 0:
            self._call_hook("on_step_begins")
            self.start.note(self._results)

    def _call_hook(self, hook: str, *args: object) -> None:
        """Calls a hook of the callbacks, then of the model, where they have it."""
        recording = self.state.recording
        methods = self._methods_of_hooks.get((hook, recording))
        if methods is None:
            methods = self._methods_of_hooks[hook, recording] = self._find_methods_of_hook(hook, recording)
        if methods:
            self._name_hook(hook)
            for method in methods:
                method(*args)

    def _name_hook(self, hook: str) -> None:
        """Names the hook that is called, for those who log in it."""
        self._module.__dict__["_current_fx_name"] = hook

    def _find_methods_of_hook(self, hook: str, recording: bool) -> list[Callable[..., object]]:
        """Returns the methods of a hook; while a graph is recorded, only those that can be a part of it."""
        trainer, module = self.trainer, self._module
        methods: list[Callable[..., object]] = []
        for callback in trainer.callbacks:
            method = getattr(callback, hook, None)
            if method is None or getattr(method, "__func__", method) is getattr(StepHooks, hook, None):
                continue
            if not recording or is_capturable(callback, hook):
                methods.append(partial(method, trainer, module))
        if hasattr(LightningModule, hook) and is_overridden(hook, module, LightningModule):
            methods.append(getattr(module, hook))
        return methods

    def _on_before_fetch(self) -> None:
        self.trainer.profiler.start(_FETCHING)

    def _on_after_fetch(self) -> None:
        self.trainer.profiler.stop(_FETCHING)

    def _broadcast_sigterm_tensor(self) -> None:
        pass
