"""The training loop. Replaces `_TrainingEpochLoop.advance`; calls the same hooks in the same order.

Lightning passes a micro-batch through forty layers of hooks, profiler contexts, closures and results, which takes longer than
a small step itself; and before each it sends all ranks whether a SIGTERM has come, which `StopTogether` does without a wait.
What is done here, and in which order, is what Lightning does. Where the configuration needs something that is not
(`step/fast_path.py`), Lightning's own loop does it.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from project.data.dealing import DealtLoader
from project.errors import as_user_error
from project.step.capture import choose_runner, is_capturable
from project.step.chance import Moments, run_seed
from project.step.data_ranks import data_ranks
from project.step.fast_path import why_not_fast_path
from project.step.gradients import clip_by_value, clip_in_skipped_steps
from project.step.hooks import StepHooks
from project.step.logged import Results
from project.step.metric_states import States, restore_metric_states
from project.step.micro_batch import MicroBatch, count_samples
from project.step.optimizers import all_evaluate_once, refuse_accumulation_of_lbfgs
from project.step.position import out_of_time, timers
from project.step.runner import Runner
from project.step.state import micro_batch, step_state
from project.typed import typed

log = logging.getLogger(__name__)


_FETCHING = "[_TrainingEpochLoop].train_dataloader_next"
"""The name of the wait for data in a profiler's report."""


def add_callback(trainer: Trainer, callback: Callback) -> None:
    """Adds a callback during training, as the last one."""
    _change_callbacks(trainer, lambda those: [*those, callback])


def remove_callback(trainer: Trainer, callback: Callback) -> None:
    """Removes a callback during training."""
    _change_callbacks(trainer, lambda those: [other for other in those if other is not callback])


def _change_callbacks(trainer: Trainer, change: Callable[[list[Callback]], list[Callback]]) -> None:
    typed(trainer).callbacks = change(typed(trainer).callbacks)
    steps = trainer.fit_loop.epoch_loop
    assert isinstance(steps, Steps)
    steps.forget_methods_of_hooks()


class _WeightedResults:
    """Takes the place of Lightning's ClosureResult in Lightning's own loop: the loss is multiplied by the weight of its
    micro-batch.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._last, self._warned = trainer, None, False  # type: Trainer, MicroBatch | None, bool

    def _warn_of_second_evaluation(self) -> None:
        """Warns once where an optimiser evaluates the loss again: it means that of the step, and gets that of the last
        micro-batch.
        """
        at, trainer = micro_batch(self._trainer), self._trainer
        many = trainer.accumulate_grad_batches
        if at is self._last and many > 1 and not self._warned and trainer.is_global_zero:
            self._warned = True
            log.warning(
                "%s asks for the loss more than once in a step of %d micro-batches, and is given the last one's: the step "
                "depends on the number of ranks. HINT: trainer.accumulate_grad_batches=1, and a batch_size %d times as large.",
                *(type(trainer.optimizers[0]).__name__, many, many),
            )
        self._last = at

    def from_training_step_output(self, output: Any, micro_batches: int) -> ClosureResult:
        self._warn_of_second_evaluation()
        result = ClosureResult.from_training_step_output(output, micro_batches)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        step_state(self._trainer).loss = loss.detach() if isinstance(loss, Tensor) else None
        weight = micro_batch(self._trainer).weight
        if weight != 1.0 and result.closure_loss is not None:
            result.closure_loss = result.closure_loss * weight
        return result


class _NotingFetcher:
    """Wraps Lightning's data fetcher: each micro-batch is noted before any other code sees it."""

    def __init__(self, fetcher: Any, fetch: Callable[[Any], Any], note: Callable[[Any], None]) -> None:
        self._fetcher, self._fetch, self._note = fetcher, fetch, note

    @property
    def done(self) -> bool:
        return bool(self._fetcher.done)

    def __next__(self) -> Any:
        fetched = self._fetch(self._fetcher)
        self._note(fetched[0])
        return fetched


class Steps(_TrainingEpochLoop):
    """The loop over the steps of an epoch. `advance` takes them on the fast path; else Lightning's own loop does."""

    _results: Results

    _resumes_within_epoch = False
    """The run resumes within the epoch."""
    _validation_due = False
    """The run resumes with the validation that follows the last step."""
    _out_of_time: bool | None = None
    metric_states: States | None = None
    """The states of torchmetrics, in an epoch that the run resumes."""
    _counts_own_steps = False
    """The fit is on the fast path: its only optimiser's count is the number of steps."""
    _has_validation = True
    """The fit has validation batches."""
    captures_graphs = False
    """Steps are taken as CUDA graphs, where that is possible."""

    def __init__(self, trainer: Trainer, moments: Moments, **settings: Any) -> None:
        super().__init__(trainer, **settings)
        self.moments = moments
        self.automatic_optimization.output_result_cls = _WeightedResults(trainer)  # type: ignore[assignment]
        self.state = step_state(trainer)

    # Where a run resumes ---------------------------------------------------------------------------------------------

    def resume(self, within: bool) -> None:
        """Sets whether the run resumes within an epoch."""
        self._resumes_within_epoch = within

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._validation_due = state_dict.get("validation_due", False)

    def reset(self) -> None:
        """Resets the counters at the start of an epoch, but not where the run resumes within one."""
        if not self._resumes_within_epoch:
            super().reset()
            return
        self._resumes_within_epoch = False  # the counters stand where the run was
        batches: Any = self.batch_progress.current
        if batches.processed > batches.completed:
            # Saved by Lightning's own Trainer, in on_train_batch_end.
            self.batch_progress.increment_completed()
            self._batches_that_stepped += int(not self.accumulates())
        self.batch_progress.reset_on_restart()  # what had begun, by Lightning's count, is done again
        self.scheduler_progress.reset_on_restart()
        self.automatic_optimization.optim_progress.reset_on_restart()

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        if self._validation_due:
            return True
        if not self._has_validation:
            return False
        if self.trainer.should_stop and (self.accumulates() or self.is_out_of_time()):
            # Lightning would validate before it stops. But a step is finished first; and where the time is over is chance,
            # and the points of a curve are not.
            self.trainer.should_stop = False
            due = self._is_validation_due(data_fetcher)
            self.trainer.should_stop = True
            return due
        return self._is_validation_due(data_fetcher)

    def _is_validation_due(self, data_fetcher: Any) -> bool:
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
        return not self._validation_due and super().done and not (self.trainer.should_stop and self.accumulates())

    def ends_epoch(self, coming: int = 0) -> bool:
        """Returns whether the micro-batch at hand is the last of its epoch; the next one, where `coming` is 1."""
        batches: Any = self.batch_progress
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

    def on_advance_end(self, data_fetcher: Any) -> None:
        self.moments.end_micro_batch()
        if not self.accumulates():
            self._results.discard_skipped_step()
        super().on_advance_end(data_fetcher)
        self._validation_due = False

    # A step ----------------------------------------------------------------------------------------------------------

    def on_run_start(self, data_fetcher: Any) -> None:
        """Prepares an epoch: restores what was logged before the run was stopped, and chooses which loop takes the steps."""
        self.moments.begin_epoch(self.trainer.current_epoch)
        super().on_run_start(data_fetcher)
        self._results.restore_sums(self.trainer.strategy.root_device, self.trainer.strategy.reduce)
        if self.metric_states is not None:
            here = data_ranks(self.trainer)
            restore_metric_states(self.metric_states, self.trainer.lightning_module, here.rank, here.count)
            self.metric_states = None
        # By its name, as Lightning does: a module that takes the batches by itself.
        self._module_fetches_batches = bool(
            is_param_in_hook_signature(self.trainer.lightning_module.training_step, "dataloader_iter", explicit=True)
        )
        why_not = why_not_fast_path(self.trainer, self._module_fetches_batches)
        self._on_fast_path, self._out_of_time = why_not is None, None
        # A module that steps by itself clips before it steps: of scaled gradients Lightning refuses that.
        self.gradients = typed(self.trainer).gradients
        self.gradients.unscale_before_hooks(not self._on_fast_path and self.trainer.lightning_module.automatic_optimization)
        self._has_validation = self.trainer.enable_validation
        loaders = data_fetcher.combined_loader.flattened
        self._dealt = [loader for loader in loaders if isinstance(loader, DealtLoader)]
        self._all_dealt = len(self._dealt) == len(loaders)
        self._run_seed = run_seed()
        log.debug("The steps are taken by %s.", f"Lightning's own loop: {why_not}" if why_not else "this project's loop")
        strategy = self.trainer.strategy
        if not self.trainer.lightning_module.automatic_optimization and "backward" not in vars(strategy):
            # It is what `manual_backward` calls.
            strategy.backward = partial(self._weighted_backward, strategy.backward)
        clip_in_skipped_steps(self.trainer)
        refuse_accumulation_of_lbfgs(self.trainer)
        if self.trainer.world_size > 1 and "optimizer_step" not in vars(strategy) and not all_evaluate_once(self.trainer):
            strategy.optimizer_step = partial(self._step_with_mean_loss, strategy.optimizer_step)
        self.gradients.begin_epoch(why_not)
        self._counts_own_steps = self._on_fast_path
        self._methods_of_hooks: dict[tuple[str, bool], list[Callable[..., Any]]] = {}
        self._module, self.state.clipped_norm = self.trainer.lightning_module, None
        if self.captures_graphs:
            owner = self._transfer_owner("on_after_batch_transfer") if self._on_fast_path else None
            self.state.runner = choose_runner(self.trainer, owner, why_not)
        if not self._on_fast_path:
            return
        self._strategy, self._precision = self.trainer.strategy, self.trainer.precision_plugin
        self._device = self._strategy.root_device
        self._optimizer = self.trainer.optimizers[0]
        self._scaler = getattr(self._precision, "scaler", None)
        self._takes_batch_idx = bool(is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2))
        configs = self.trainer.lr_scheduler_configs
        self._schedules = [config for config in configs if config.interval == "step" and not config.reduce_on_plateau]
        self._has_plateau_schedules = any(config.reduce_on_plateau for config in configs)
        names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        self._on_before_transfer, self._transfer, self._on_after_transfer = (
            getattr(self._transfer_owner(name), name) for name in names
        )
        self.state.runner.begin_epoch()

    def _transfer_owner(self, hook: str) -> Any:
        """Returns what moves a batch to the device by this hook: the data module, where it has one of its own, or the
        module.
        """
        loaders: Any = self.trainer._data_connector
        data, module = loaders.attached, self.trainer.lightning_module
        if data is None or not is_overridden(hook, data, LightningDataModule):
            return module
        if is_overridden(hook, module, LightningModule):
            rank_zero_warn(f"`{hook}` is the LightningDataModule's. That of the LightningModule is not called.")
        return data

    def _on_before_fetch(self) -> None:
        self.trainer.profiler.start(_FETCHING)

    def _on_after_fetch(self) -> None:
        self.trainer.profiler.stop(_FETCHING)

    def _begin_step(self) -> None:
        """Calls `on_step_begins` before the first micro-batch of a step: nothing of the step has been read, and loaders know
        where they are.
        """
        if self.batch_progress.current.ready % self.trainer.accumulate_grad_batches == 0:
            self._call_hook("on_step_begins")

    def _fetch(self, data_fetcher: Any) -> Any:
        """Fetches a micro-batch."""
        self._begin_step()
        self._call_hook("on_fetch_begins")
        if not self._all_dealt:
            self.moments.begin_fetch(self.batch_progress.current.ready)
        try:
            return next(data_fetcher)
        finally:
            self._call_hook("on_fetch_ends")

    def _broadcast_sigterm_tensor(self) -> None:
        pass

    def advance(self, data_fetcher: Any) -> None:
        """Trains on one micro-batch: from the loader to the metrics."""
        if self._validation_due:
            return  # what follows is `on_advance_end`
        if self._module_fetches_batches:
            self._begin_step()
            self._call_hook("on_fetch_begins")  # whenever it does so
            self._call_hook("on_fetch_ends")
            super().advance(data_fetcher)
            return
        if not self._on_fast_path:
            super().advance(_NotingFetcher(data_fetcher, self._fetch, self._note))  # type: ignore[arg-type]
            return
        trainer, progress, logged = self.trainer, self.batch_progress, self._results
        batch, _, _ = self._fetch(data_fetcher)
        number = progress.current.ready
        self._note(batch)
        progress.is_last_batch = data_fetcher.done
        if batch is None:
            self._pass_over_empty_batch(number)
            return
        batch = self._on_before_transfer(self._precision.convert_input(batch), 0)
        batch = self._transfer(batch, self._device, 0)
        within, accumulates = number % trainer.accumulate_grad_batches, self.accumulates(coming=1)
        batch = self.state.runner.prepare(batch, within, accumulates, self._on_after_transfer)
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        self._call_hook("on_train_batch_start", batch, number)
        self._strategy.on_train_batch_start(batch, number)
        progress.increment_started()
        self._count_step_as_begun(accumulates)

        outputs, batch = self.state.runner.run(
            batch, self._on_after_transfer, partial(self._train_on_batch, number=number, accumulates=accumulates)
        )
        self._count_as_processed(number, accumulates)

        logged.reduce_step(hook_is_over=False)
        self._call_hook("on_train_batch_end", outputs, batch, number)
        logged.reduce_step(hook_is_over=True)
        if logged:  # by self.log, in whatever was called here
            trainer._logger_connector.on_batch_end()
        else:
            logged.batch = None
        progress.increment_completed()
        if logged:
            trainer._logger_connector.update_train_step_metrics()

    def _train_on_batch(self, batch: Any, number: int, accumulates: bool) -> dict[str, Any]:
        """Computes the gradient of a batch on the device; after the last micro-batch of a step, takes the step."""
        if accumulates:
            with getattr(self._strategy, "block_backward_sync", nullcontext)():
                return self._forward_and_backward(batch, number, accumulates)
        outputs = self._forward_and_backward(batch, number, accumulates)
        self._take_step()
        self._call_hook("on_step_taken")
        return outputs

    def _pass_over_empty_batch(self, number: int) -> None:
        """Counts a micro-batch of no samples, for which the loader gave None, and does not train on it."""
        self._refuse_on_several_ranks("The training loader gave None", "give a batch without what is not wanted")
        rank_zero_warn("train_dataloader yielded None. If this was on purpose, ignore this warning...")
        progress = self.batch_progress
        progress.increment_ready()
        progress.increment_started()
        if number % self.trainer.accumulate_grad_batches == 0:
            self._zero_grad()
            self.state.has_loss = False
        accumulates = self.accumulates()
        steps = self.state.has_loss and not accumulates  # without a micro-batch there is no step
        self._count_step_as_begun(not steps)
        if steps:
            self._take_step()
            self._call_hook("on_step_taken")
        self._count_as_processed(number, accumulates, steps)
        self._call_hook("on_train_batch_end", None, None, number)
        progress.increment_completed()

    def _refuse_on_several_ranks(self, what: str, hint: str) -> None:
        """Raises a UserError where there are several ranks: the others would wait for the gradient of this one."""
        if (trainer := self.trainer).world_size > 1:
            where = f"rank {trainer.global_rank} in step {trainer.global_step + 1}"
            text = f"{what} on {where}, and the other ranks would wait for its gradient."
            lightnings = "Skipping the `training_step` by returning None in distributed training is not supported."
            raise as_user_error(RuntimeError(), f"{text} {lightnings} HINT: {hint}.")

    def _note(self, batch: Any) -> None:
        """Notes which micro-batch was fetched, and seeds for it. Of several loaders, which advance together, the first one
        names it.
        """
        current = None
        for loader in self._dealt:
            if loader.taken:
                key = loader.taken.popleft()
                current = current or MicroBatch(key, loader.seed, loader.keys.order)
        if current is None:
            many, trainer = self.trainer.accumulate_grad_batches, self.trainer
            step, number = divmod(self.batch_progress.current.ready, many)
            key = (self.trainer.current_epoch, step, data_ranks(trainer).rank * many + number)
            current = MicroBatch(key, self._run_seed, counted=count_samples(batch))
        self.state.micro_batch, self.state.loss = current, None
        self.moments.begin_micro_batch(current.seed)

    def _weighted_backward(self, backward: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the strategy's `backward`, which `manual_backward` calls: multiplies the loss by the micro-batch's
        weight.
        """
        weight = self.state.micro_batch.weight
        self.state.loss = loss.detach()
        return backward(loss if weight == 1.0 else loss * weight, *args, **kwargs)

    def _step_with_mean_loss(
        self, step: Callable[..., Any], optimizer: Any, closure: Callable[[], Any], **settings: Any
    ) -> Any:
        """Takes the place of the strategy's `optimizer_step`: an optimiser that evaluates the loss again gets its mean over the
        ranks. By its own loss a rank would end a search earlier than the others, which would wait for it.
        """

        def evaluate() -> Any:
            loss = closure()
            weighed = loss * self.state.micro_batch.weight if isinstance(loss, Tensor) else loss
            return self.trainer.strategy.reduce(weighed, reduce_op="mean") if isinstance(loss, Tensor) else loss

        return step(optimizer, evaluate, **settings)

    def teardown(self) -> None:
        for replaced in ("backward", "optimizer_step"):
            self.trainer.strategy.__dict__.pop(replaced, None)
        self._methods_of_hooks, self.state.runner, self._counts_own_steps = {}, Runner(), False
        super().teardown()

    def _forward_and_backward(self, batch: Any, number: int, accumulates: bool) -> dict[str, Any]:
        """Computes the forward and the backward pass of a micro-batch, with the hooks around them."""
        micro_batches = self.trainer.accumulate_grad_batches
        self._module.__dict__["_current_fx_name"] = "training_step"  # for those who log in it
        first = number % micro_batches == 0
        if first:
            self.gradients.begin_step()
        output = self._strategy.training_step(batch, number) if self._takes_batch_idx else self._strategy.training_step(batch)
        if first:
            self.gradients.check_weights("in its forward pass")
        outputs = dict(output) if isinstance(output, Mapping) else {"loss": output}
        if output is not None and not isinstance(outputs.get("loss"), Tensor):
            what = (
                "a dict where the 'loss' key needs to be present"
                if isinstance(output, Mapping)
                else "a Tensor, a dict, or None"
            )
            raise MisconfigurationException(
                f"In automatic optimization, `training_step` must return {what}. None leaves the micro-batch out."
            )
        if first:
            self.state.has_loss = False
            self._call_hook("on_before_zero_grad", self._optimizer)
            self.gradients.check_weights("in on_before_zero_grad, which comes after the first forward pass of each rank")
            self._zero_grad()
        if output is None:
            self.gradients.pass_over()
            self._refuse_on_several_ranks("training_step returned None", "return a loss that has none: (output * 0).sum()")
            rank_zero_warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
            return {}
        self.state.has_loss = True
        # Lightning divides by the micro-batches of a step, DDP by the ranks: what remains is a micro-batch's own size.
        loss, weight = outputs["loss"], self.state.micro_batch.weight
        self.state.loss = loss.detach()
        if micro_batches != 1 and self.gradients.divides_loss:
            loss = loss / micro_batches
        outputs["loss"] = loss.detach()
        if weight != 1.0:
            loss = loss * weight
        self._strategy.pre_backward(loss)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self._call_hook("on_before_backward", loss)
        self.gradients.begin_backward(last=not accumulates)
        loss.backward()
        self.gradients.end_backward(last=not accumulates)
        with self.gradients.within_hook(last=not accumulates):
            self._call_hook("on_after_backward")
        self._strategy.post_backward(loss)
        return outputs

    def _zero_grad(self) -> None:
        """Sets all gradients to None, as optimisers of torch do, and no others come here. Their own `zero_grad` takes longer:
        it is recorded for a profile, and kept from the compiler.
        """
        if "zero_grad" in vars(self._optimizer):  # somebody has put another one on it
            self._optimizer.zero_grad()
            return
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _take_step(self) -> None:
        """Takes the optimiser's step: unscales and clips the gradients, with the hook before it, and updates the weights."""
        self.state.clipped_norm = None
        self.gradients.end_step()
        if not self.state.has_loss:  # no micro-batch of this step had a loss
            return
        if self._scaler is not None:
            self.gradients.unscale(self._scaler, self._optimizer)
        self._call_hook("on_before_optimizer_step", self._optimizer)
        if self.trainer.gradient_clip_val:
            self._clip(self.trainer.gradient_clip_val)
        with self.state.runner.rates():
            self._update_weights()

    def _update_weights(self) -> None:
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()

    def _clip(self, value: float) -> None:
        """Clips the gradients, which are unscaled by now. Lightning refuses to where the optimiser is fused, as it may get
        scaled ones.
        """
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if self.trainer.gradient_clip_algorithm == "value":
            if self.state.runner.keeps_norm:
                self.state.clipped_norm = self.gradients.norm(parameters)
            clip_by_value(self._optimizer, value)
        else:
            self.state.clipped_norm = self.gradients.clip_by_norm(parameters, value)

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

    def _call_hook(self, hook: str, *args: Any) -> None:
        """Calls a hook of the callbacks, then of the model, where they have it."""
        recording = self.state.recording
        methods = self._methods_of_hooks.get((hook, recording))
        if methods is None:
            methods = self._methods_of_hooks[hook, recording] = self._find_methods_of_hook(hook, recording)
        if methods:
            self._module.__dict__["_current_fx_name"] = hook
            for method in methods:
                method(*args)

    def forget_methods_of_hooks(self) -> None:
        """Forgets which callbacks have which hook, as the callbacks have changed."""
        self._methods_of_hooks = {}
        self.state.runner.change_callbacks()

    def _find_methods_of_hook(self, hook: str, recording: bool) -> list[Callable[..., Any]]:
        """Returns the methods of a hook; while a graph is recorded, only those that can be a part of it."""
        trainer, module = self.trainer, self._module
        methods: list[Callable[..., Any]] = []
        for callback in trainer.callbacks:
            method = getattr(callback, hook, None)
            if method is None or getattr(method, "__func__", method) is getattr(StepHooks, hook, None):
                continue
            if not recording or is_capturable(callback, hook):
                methods.append(partial(method, trainer, module))
        if hasattr(LightningModule, hook) and is_overridden(hook, module, LightningModule):
            methods.append(getattr(module, hook))
        return methods
