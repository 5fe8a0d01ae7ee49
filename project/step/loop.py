"""The training loop. Replaces `_TrainingEpochLoop.advance`; calls the same hooks in the same order.

Lightning passes a micro-batch through forty layers of hooks, profiler contexts, closures and results, which takes longer than
a small step itself; and before each it sends all ranks whether a SIGTERM has come, which `StopTogether` does without a wait.
What is done here, and in which order, is what Lightning does. Where the configuration needs something that is not
(`step/fast_path.py`), Lightning's own loop does it.
"""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from project.data.dealing import DealtLoader
from project.errors import as_user_error
from project.step.capture import choose_runner
from project.step.chance import run_seed
from project.step.data_ranks import data_ranks
from project.step.ddp import wrap_again_before_backward
from project.step.epoch_loop import EpochLoop
from project.step.evaluation import loaders_of
from project.step.fast_path import why_not_fast_path
from project.step.gradients import clip_by_value
from project.step.micro_batch import MicroBatch, count_samples
from project.step.runner import Outputs, Runner
from project.step.slow_path import Fetched, NotingFetcher, adapt_strategy, restore_strategy
from project.typed import Batch, Fetcher, typed

log = logging.getLogger(__name__)


class Steps(EpochLoop):
    """The steps of an epoch. `advance` takes them on the fast path; else Lightning's own loop does."""

    def on_run_start(self, data_fetcher: Fetcher) -> None:
        """Prepares an epoch: restores what was logged before the run was stopped, and chooses which loop takes the steps."""
        self.moments.begin_epoch(self.trainer.current_epoch)
        super().on_run_start(data_fetcher)
        strategy = self.trainer.strategy
        if self._results.restore_sums(self.trainer.lightning_module, strategy.root_device, strategy.reduce):
            typed(self.trainer).logged.resume_within_epoch()
        self.restore_metrics()
        self.start.begin_epoch()
        typed(self.trainer).logged.find_metrics()
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
        adapt_strategy(self.trainer)
        self.gradients.begin_epoch(why_not)
        self._counts_own_steps = self._on_fast_path
        self._methods_of_hooks = {}
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

    def _transfer_owner(self, hook: str) -> LightningDataModule | LightningModule:
        """Returns what moves a batch to the device by this hook: the data module, where it has one of its own, or the
        module.
        """
        data = loaders_of(self.trainer).attached
        module: LightningModule = self.trainer.lightning_module
        if data is None or not is_overridden(hook, data, LightningDataModule):
            return module
        if is_overridden(hook, module, LightningModule):
            rank_zero_warn(f"`{hook}` is the LightningDataModule's. That of the LightningModule is not called.")
        return data

    def _fetch(self, data_fetcher: Fetcher) -> Fetched:
        """Fetches a micro-batch."""
        self._begin_step()
        self._call_hook("on_fetch_begins")
        if not self._all_dealt:
            self.moments.begin_fetch(self.batch_progress.current.ready)
        try:
            fetched: Fetched = next(data_fetcher)
        finally:
            self._call_hook("on_fetch_ends")
        return fetched

    def advance(self, data_fetcher: Fetcher) -> None:
        """Trains on one micro-batch, by our own loop or, where it does not apply, by Lightning's. Does nothing where only what
        follows the last step is due.
        """
        if self._validation_due or self._schedules_due:
            return  # what follows is `on_advance_end`
        if self._module_fetches_batches:
            self._begin_step()
            self._call_hook("on_fetch_begins")  # whenever it does so
            self._call_hook("on_fetch_ends")
            super().advance(data_fetcher)
            return
        if not self._on_fast_path:
            super().advance(NotingFetcher(data_fetcher, self._fetch, self._note))  # type: ignore[arg-type]
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

    def _train_on_batch(self, batch: Batch, number: int, accumulates: bool) -> Outputs:
        """Computes the gradient of a batch on the device; after the last micro-batch of a step, takes the step."""
        if accumulates:
            with self._strategy.block_backward_sync() if isinstance(self._strategy, ParallelStrategy) else nullcontext():
                return self._forward_and_backward(batch, number, accumulates)
        outputs = self._forward_and_backward(batch, number, accumulates)
        self._take_step()
        self._call_hook("on_step_taken")
        return outputs

    def _pass_over_empty_batch(self, number: int) -> None:
        """Counts a micro-batch for which the loader gave None, and takes the step if it was the last of one with a loss.
        Refused on several ranks.
        """
        self.gradients.pass_over()
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

    def _note(self, batch: Batch) -> None:
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

    def teardown(self) -> None:
        restore_strategy(self.trainer)
        typed(self.trainer).gradients.teardown()
        self._methods_of_hooks, self.state.runner, self._counts_own_steps = {}, Runner(), False
        super().teardown()

    def _forward_and_backward(self, batch: Batch, number: int, accumulates: bool) -> Outputs:
        """Computes the forward and the backward pass of a micro-batch, with the hooks around them."""
        micro_batches = self.trainer.accumulate_grad_batches
        self._name_hook("training_step")
        first = number % micro_batches == 0
        if first:
            self.gradients.begin_step()
        output = self._strategy.training_step(batch, number) if self._takes_batch_idx else self._strategy.training_step(batch)
        if first:
            self.gradients.check_weights("in its forward pass")
        outputs: Outputs = dict(output) if isinstance(output, Mapping) else {"loss": output}
        given = outputs.get("loss")
        if output is not None and not isinstance(given, Tensor):
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
        assert isinstance(given, Tensor)
        if given.numel() != 1:
            shape = tuple(given.shape)
            text = f"training_step has returned a loss of shape {shape}. HINT: return one number, as loss.mean() is."
            raise as_user_error(RuntimeError(), text)
        self.state.has_loss = True
        # Lightning divides by the micro-batches of a step, DDP by the ranks: what remains is a micro-batch's own size.
        loss, weight = given, self.state.micro_batch.weight
        self.state.loss = loss.detach()
        if micro_batches != 1 and self.gradients.divides_loss:
            loss = loss / micro_batches
        outputs["loss"] = loss.detach()
        if weight != 1.0:
            loss = loss * weight
        wrap_again_before_backward(self._strategy, loss)
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
        """Sets all gradients to None, as optimisers of torch do. Their own `zero_grad` takes longer: it is recorded for a
        profile, and kept from the compiler.
        """
        if "zero_grad" in vars(self._optimizer) or type(self._optimizer).zero_grad is not Optimizer.zero_grad:
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
        arguments = self.gradients.step_arguments(self._optimizer)
        with self.state.runner.rates(), self.gradients.update(self._optimizer):
            if self._scaler is None:
                self._optimizer.step(*arguments)
            else:
                self._scaler.step(self._optimizer, *arguments)
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
