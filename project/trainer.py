"""Trainer: Lightning's, set up for this house.

It runs from Python as it does from the command line:

    trainer = Trainer(max_epochs=1, default_root_dir="runs/first")
    trainer.fit(ImageClassifier(MiniResNet()), datamodule=ImageData(batch_size=32))

`default_root_dir` is the folder of this run: TensorBoard's events and the checkpoints go into it.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint as AnyCheckpoint
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from project.cluster.cores import cores
from project.cluster.launcher import Launch, detect, host
from project.data import ImageData
from project.model.batchnorm import StepStatistics
from project.model.chance import ChanceByMicroBatch
from project.survive.checkpoints import Checkpoints, SafeCheckpointIO
from project.survive.preemption import StopTogether
from project.survive.signals import SIGNALS
from project.survive.watchdog import Watchdog
from project.watch.console import Progress, sign
from project.watch.events import Events
from project.watch.predictions import PredictionWriter

log = logging.getLogger(__name__)


def cpu_precision(precision: str) -> tuple[str, str | None]:
    """The precision to use where there is no GPU, and why it is another than the one asked for."""
    if precision not in ("16-mixed", "16", "bf16-mixed", "bf16", "16-true"):
        return precision, None
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        taken, reason = "bf16-mixed", "there is no GPU, and this CPU computes in bf16"
    else:
        taken, reason = "32-true", "there is no GPU, and this CPU has no bf16"
    return taken, None if taken == precision else reason


class Resuming(_CheckpointConnector):
    """Rank 0 chooses the checkpoint to go on from; the others learn of it when all are connected."""

    def _restore_modules_and_callbacks(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        path = self.trainer.strategy.broadcast(None if checkpoint_path is None else str(checkpoint_path))
        # Lightning converts the network after loading: float64 weights would pass through float32, and be rounded.
        self.trainer.precision_plugin.convert_module(self.trainer.lightning_module)
        super()._restore_modules_and_callbacks(path, weights_only)


class Trainer(pl.Trainer):
    """Lightning's Trainer with the launcher's word on nodes and processes, and with what every run here has: checkpoints
    of the best and the last state, TensorBoard, progress, and signals that stop all ranks at the same step.

    Args:
        limit_train_batches: take so many optimiser steps of an epoch (an int) or such a share of it (a float).
        limit_val_batches: validate on so many micro-batches (an int), over all ranks, or on such a share.
        limit_test_batches: the same for the test.
        limit_predict_batches: the same for prediction.
        val_check_interval: validate every so many optimiser steps (an int) or such a share of an epoch (a float).
        accumulate_grad_batches: micro-batches that each rank takes in an optimiser step; 'auto' follows from
            data.global_batch_size and the number of ranks.
        precision: '16-mixed', 'bf16-mixed', '32-true' and so on; without a GPU the 16-bit ones are bf16, or fp32 where
            the CPU has no bf16.
    """

    def __init__(
        self,
        *,
        accumulate_grad_batches: int | Literal["auto"] = "auto",
        precision: str | int | None = None,
        accelerator: Any = "auto",
        callbacks: list[Callback] | Callback | None = None,
        logger: Any = None,
        plugins: Any = None,
        default_root_dir: Any = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool = False,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        **kwargs: Any,
    ) -> None:
        launch = detect()
        settled, lines = launch.settle(kwargs)
        kwargs.update(settled)
        accelerator_, precision_ = accelerator, None if precision is None else str(precision)
        if precision_ is not None and _on_cpu(accelerator):
            precision_, reason = cpu_precision(precision_)
            if reason:
                lines.append(f"trainer.precision={precision_} instead of {precision}: {reason}")
        for line in lines:
            log.info(line)

        if kwargs.get("overfit_batches"):
            raise ValueError(
                "trainer.overfit_batches would replace the order of the samples. HINT: train on fewer images instead, as "
                "configs/debug.yaml does."
            )

        try:
            super().__init__(
                accelerator=accelerator_,
                precision=precision_,  # type: ignore[arg-type]
                callbacks=_with_ours(callbacks, enable_checkpointing, enable_progress_bar),
                logger=Events(str(default_root_dir or ".")) if logger in (None, True) else logger,
                plugins=_with_plugins(plugins, launch),
                default_root_dir=default_root_dir,
                accumulate_grad_batches=1,
                enable_checkpointing=enable_checkpointing,
                enable_progress_bar=enable_progress_bar,
                enable_model_summary=enable_model_summary,
                **kwargs,
            )
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise ValueError(f"The trainer's settings don't work here: {error}") from error
        sign(self.global_rank, host(), self.world_size)
        self._wanted_limits = {
            "train": limit_train_batches,
            "val": limit_val_batches,
            "test": limit_test_batches if limit_test_batches is not None else limit_predict_batches,
        }
        self._wanted_val_interval = self.val_check_interval
        self._wanted_accumulation = accumulate_grad_batches
        self._signal_connector = SIGNALS  # type: ignore[assignment]
        self._checkpoint_connector = Resuming(self)
        if isinstance(self.strategy, DDPStrategy):
            # Buffers need no broadcast at every forward pass: batch norm's are kept equal once a step (StepStatistics).
            self.strategy._ddp_kwargs.setdefault("broadcast_buffers", False)
        # Lightning broadcasts a flag and waits for the device before every micro-batch, to learn of a SIGTERM.
        # StopTogether does that without either.
        self.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        if launch.world_size and launch.world_size != self.world_size:
            raise ValueError(
                f"{launch.kind} started {launch.world_size} processes, and with trainer.strategy="
                f"{kwargs.get('strategy')} each would train a copy of its own. HINT: set trainer.strategy=ddp."
            )

    def purge_loggers(self, step: int) -> None:
        """What TensorBoard has from this step on was logged by a part of the run that is done again."""
        for logger in self.loggers:
            if isinstance(logger, Events):
                logger.purge(step)

    @property
    def global_batch(self) -> int | None:
        """Samples behind one optimiser step, where the data is ours to count."""
        data = getattr(self, "datamodule", None)
        if not isinstance(data, ImageData):
            return None
        return data.batch_size * self.world_size * self.accumulate_grad_batches

    def _run(self, model: LightningModule, *args: Any, **kwargs: Any) -> Any:
        """Called for every verb, in every process, before anything is set up."""
        data: LightningDataModule | None = getattr(self, "datamodule", None)
        wanted = self._wanted_accumulation
        if isinstance(data, ImageData):
            data.spare_cores = cores(self.num_devices) - 1
            data.limits = self._wanted_limits
            self.accumulate_grad_batches = data.accumulation(self.world_size, wanted) if self.training else 1
            if isinstance(self._wanted_val_interval, int):  # Lightning counts the micro-batches of a rank
                self.val_check_interval = self._wanted_val_interval * self.accumulate_grad_batches
            if dev_steps := int(getattr(self, "fast_dev_run", 0)):
                self.limit_train_batches = dev_steps * self.accumulate_grad_batches
            for stage in ("train", "val", "test", "predict"):  # done by the data, and so none of Lightning's business
                if self._wanted_limits.get(stage) == 0:
                    setattr(self, f"limit_{stage}_batches", 0)
        else:
            self.accumulate_grad_batches = 1 if wanted == "auto" else wanted
        for callback in self.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Watchdog):
                callback.start(self)
        return super()._run(model, *args, **kwargs)


def _on_cpu(accelerator: Any) -> bool:
    return accelerator == "cpu" or (
        accelerator == "auto" and not torch.cuda.is_available() and not torch.backends.mps.is_available()
    )


def _with_ours(
    given: Sequence[Callback] | Callback | None,
    checkpointing: bool | None,
    progress: bool | None,
) -> list[Callback]:
    """The user's callbacks, and ours where the user has none of the kind."""
    callbacks = [given] if isinstance(given, Callback) else list(given or [])
    if progress is not False and not any(isinstance(one, AnyProgressBar) for one in callbacks):
        callbacks.append(Progress())
    if checkpointing is not False and not any(isinstance(one, AnyCheckpoint) for one in callbacks):
        callbacks.append(Checkpoints())
    # First, so that what the others do counts as progress or as a hang, and not as what was before.
    watchdogs: list[Callback] = [one for one in callbacks if isinstance(one, Watchdog)] or [Watchdog()]
    callbacks = [one for one in callbacks if one not in watchdogs]
    return [*watchdogs, StepStatistics(), ChanceByMicroBatch(), *callbacks, PredictionWriter(), StopTogether(SIGNALS)]


def _with_plugins(given: Any, launch: Launch) -> list[Any]:
    plugins = list(given) if isinstance(given, (list, tuple)) else [given] if given is not None else []
    if not any(isinstance(one, CheckpointIO) for one in plugins):
        plugins.append(SafeCheckpointIO())
    return [*plugins, launch.environment()]
