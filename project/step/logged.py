"""Logs with the true size of each batch, and under the number of steps taken. Replaces Lightning's logger connector."""

from typing import cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor

from project.step.data_ranks import data_ranks
from project.step.evaluated import begin_evaluated_micro_batch
from project.step.gathering import refuse_uneven
from project.step.measurements import measurement_loggers
from project.step.metric_states import (
    NotedMetrics,
    RankStates,
    gather_metric_states,
    restore_metric_states,
    states_of_metrics,
)
from project.step.results import Results, Shown
from project.step.state import micro_batch, step_state
from project.typed import StateDict


class _DelayedNumber:
    """A number that a GPU computes, on its way to the host, which waits for it only in `read`."""

    def __init__(self, value: Tensor) -> None:
        self._value = value.detach().to("cpu", non_blocking=True)
        self._arrival = torch.cuda.Event()
        self._arrival.record()

    def read(self) -> float | int:
        self._arrival.synchronize()
        return self._value.item()


class Logged(_LoggerConnector):
    """Lightning's logger connector, with the true size of each batch: Lightning guesses it from what its `collate_fn` made (of
    strings, by their length).
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._delayed_numbers: dict[str, _DelayedNumber] = {}
        """Numbers of the last step that a bar shows, by name, where a GPU computes them."""
        self._metrics_before_validation: dict[str, RankStates] = {}
        self._metrics_before_step: NotedMetrics | None = None

    def on_batch_end(self) -> None:
        super().on_batch_end()
        if step_state(self.trainer).uneven and (results := self.trainer._results) is not None:
            shared = [metric.meta.name for metric in results.values() if metric.meta.on_step and metric.meta.sync.should]
            if shared:
                refuse_uneven(f"self.log({shared[0]!r}, on_step=True, sync_dist=True)")
        if self._progress_bar_metrics and not self.trainer.fit_loop.epoch_loop.accumulates():
            bar = cast(Shown, self._progress_bar_metrics)
            self._delayed_numbers = {name: _DelayedNumber(value) for name, value in bar.items() if isinstance(value, Tensor)}

    def log_metrics(self, metrics: dict[str, Tensor], step: int | None = None) -> None:
        """Logs under the number of steps taken, as all curves of a run are numbered that this project's loggers write.

        Lightning counts a step only after it has logged it: loggers that the user made in Python receive its number.
        """
        steps = self.trainer.fit_loop.epoch_loop
        counted = step is None and self.trainer.state.fn == "fit" and measurement_loggers(self.trainer)
        steps._batches_that_stepped += bool(counted)
        try:
            super().log_metrics(metrics, step)
        finally:
            steps._batches_that_stepped -= bool(counted)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Returns the metrics that a bar shows: of what a GPU computes, the number of the last step, for which the host hardly
        waits.
        """
        bar = super().progress_bar_metrics
        for name, value in cast(Shown, bar).items():
            if isinstance(value, Tensor):
                late = self._delayed_numbers.get(name)
                bar[name] = value.item() if late is None else late.read()
        return bar

    def resume_within_epoch(self) -> None:
        """Resumes within an epoch, as after a batch: what was logged so far is no result before the epoch's end."""
        super().on_batch_start(None)

    def names_of_step(self) -> set[str]:
        """Returns the names of the bar's metrics that steps of this epoch have logged: those of others are older."""
        return {*self.metrics["pbar"]} if self.trainer._results else set()

    def begin_micro_batch(self, stage: str, key: tuple[int, ...]) -> None:
        """Called before each micro-batch, which `key` names. `ExactLogged` has metrics begin it."""

    def reduce_metrics(self, stage: str) -> None:
        """Called at the end of an epoch. `ExactLogged` adds up what metrics have counted."""

    def note_metrics(self) -> None:
        """Notes the states of metrics, where a validation begins."""
        self._metrics_before_validation = states_of_metrics(self.trainer.lightning_module)

    def find_metrics(self) -> None:
        """Finds the module's metrics, where an epoch begins."""
        self._metrics_before_step = NotedMetrics(self.trainer.lightning_module)

    def note_step(self) -> None:
        """Notes the states of metrics, where a step begins."""
        if self._metrics_before_step is not None:
            self._metrics_before_step.note()

    def own_metrics(self, before_step: bool) -> dict[str, RankStates]:
        """Returns this rank's states from which a run resumes: a validation begins anew, and so does a step (`before_step`)."""
        if self.trainer.validating:
            return self._metrics_before_validation
        states = states_of_metrics(self.trainer.lightning_module)
        noted = self._metrics_before_step.states if self._metrics_before_step is not None and before_step else {}
        return {name: noted.get(name, now) for name, now in states.items()}

    def metrics_of_ranks(self, before_step: bool) -> dict[str, object]:
        """Returns the states of metrics for a checkpoint, by its key. Called by all ranks."""
        return {"metric_states": gather_metric_states(self.own_metrics(before_step), data_ranks(self.trainer))}

    def restore_metrics(self, checkpoint: StateDict) -> None:
        """Restores the states of metrics where a run resumes, after the hooks at its start, which may reset them."""
        here = data_ranks(self.trainer)
        restore_metric_states(checkpoint["metric_states"], self.trainer.lightning_module, here.rank, here.count)

    def on_batch_start(self, batch: object, dataloader_idx: int | None = None) -> None:
        """Begins a micro-batch of training or evaluation: sets its true size, tells the results its weight and its place in
        the step, and takes the key of an evaluated one from its loader.
        """
        super().on_batch_start(batch, dataloader_idx)
        results = self.trainer._results
        assert results is not None
        if self.trainer.training:
            assert isinstance(results, Results)
            at, steps = micro_batch(self.trainer), self.trainer.fit_loop.epoch_loop
            results.batch_size = at.size or None
            begins = (steps.batch_progress.current.ready - 1) % self.trainer.accumulate_grad_batches == 0
            results.begin_micro_batch(at.weight, begins, not steps.accumulates())
            self.begin_micro_batch(self._stage, at.key)
            return
        if size := begin_evaluated_micro_batch(self.trainer, dataloader_idx):
            results.batch_size = size
            self.begin_micro_batch(self._stage, step_state(self.trainer).evaluated_key or ())

    @property
    def _stage(self) -> str:
        """Returns "train", "val" (in a sanity check, too) or "test"."""
        return str(self.trainer.state.stage and self.trainer.state.stage.dataloader_prefix)

    def should_reset_tensors(self, fx: str) -> bool:
        """Returns whether a first log resets what is there: Lightning discards it when a hook logs for the first time in an
        epoch.
        """
        reset: bool = super().should_reset_tensors(fx)
        results = self.trainer._results
        if isinstance(results, Results) and fx in results.hooks_before_resume:
            results.hooks_before_resume.discard(fx)
            return False
        return reset

    def epoch_end_reached(self) -> None:
        """Ends an epoch. Lightning brings the ranks' numbers of samples to their mean as whole numbers: of 3 and 4, that would
        be 3.
        """
        super().epoch_end_reached()
        step_state(self.trainer).uneven = False
        results = self.trainer._results
        assert results is not None
        if isinstance(results, Results):
            results.reduce_epoch()
        if not self.trainer.predicting:
            self.reduce_metrics(self._stage)
        for metric in results.values():
            if metric.is_tensor and metric.meta.is_mean_reduction:
                dtype = metric.value.dtype if metric.value.is_floating_point() else torch.float32
                metric.cumulated_batch_size = metric.cumulated_batch_size.to(dtype)

    def on_epoch_end(self) -> None:
        results = self.trainer._results
        if isinstance(results, Results):
            results.refuse_values_of_single_ranks()
        super().on_epoch_end()
