"""Trainer: Lightning's, set up for this house.

It runs from Python as it does from the command line:

    trainer = Trainer(max_epochs=1, default_root_dir="runs/first")
    trainer.fit(ImageClassifier(MiniResNet()), datamodule=ImageData(batch_size=32))

`default_root_dir` is the folder of this run: TensorBoard's events and the checkpoints go into it. Without it the run gets a new
one, lightning_logs/run-DATE-TIME.
"""

import logging
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor

from project.aliases import take_either_lightning
from project.arguments import Plugin, checked, named_errors, resolve_plugins, resolve_precision
from project.callbacks import default_kinds, keeps_records, with_ours
from project.checkpoints.callback import Checkpoints, checkpoints_of
from project.cluster.connection import connect_hosts, connect_on_loopback
from project.cluster.cores import cores
from project.cluster.memory import keep_freed_memory
from project.cluster.place import host, restarts
from project.data.self_dealing import SelfDealing
from project.doctor.memory_forecast import report
from project.errors import UserError
from project.exact import checks
from project.exact.logged import ExactResults
from project.exact.metrics import ExactLogged
from project.exact.step import ExactStep
from project.launch.launcher import detect
from project.resume.checkpoint import Resuming
from project.resume.stopping import NotesWhoStops
from project.run_folders import FolderOfRun, loggers_in, newest_folder
from project.runs import folder_of_trainer, refuse_url, weights
from project.sharded.gradients import ShardedGradients
from project.sharded.strategy import Sharded
from project.step.capture import Capture
from project.step.chance import Moments
from project.step.compression import Compression
from project.step.data_ranks import data_ranks
from project.step.ddp import use_exact_gradients, use_ordered_ddp
from project.step.epochs import install_loops
from project.step.evaluated import note_failure
from project.step.gathering import gather_evenly
from project.step.gradients import Gradients
from project.step.loaders import Loaders
from project.step.logged import Logged
from project.step.position import is_over, warn_if_cut_short
from project.step.precision import on_cpu
from project.step.results import Results
from project.step.state import StepState
from project.step.supported_strategies import refuse_strategy
from project.survive.failure import BY_COMMAND
from project.survive.hang.watchdog import Watchdog
from project.survive.nonfinite import Act
from project.survive.signals import SIGNALS
from project.typed import TypedTrainer, callbacks_of
from project.watch.console import name_speaker, sign_lines
from project.watch.fingerprints import WhenRanksDiffer
from project.watch.flops import least_seconds
from project.watch.history import FILE as LIFE
from project.watch.life import Life
from project.watch.loggers import LoggerName

log = logging.getLogger(__name__)
take_either_lightning()  # of a library that is imported after this
logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "Tip:" not in record.getMessage())


class Trainer(NotesWhoStops, FolderOfRun):
    """Lightning's Trainer, with nodes and processes from the launcher, checkpoints of the best and the last state, TensorBoard,
    progress, and signals that stop all ranks at the same step.

    Args:
        limit_train_batches: optimiser steps of an epoch (an int), or a share of it (a float).
        limit_val_batches: micro-batches of a validation (an int), over all ranks, or a share of it (a float).
        limit_test_batches: the same for the test.
        limit_predict_batches: the same for prediction.
        val_check_interval: optimiser steps between two validations (an int), a share of an epoch (a float), or a time
            ("DD:HH:MM:SS").
        logger: tensorboard, csv, wandb or mlflow, a logger, or a list of these; TensorBoard's events stay beside them. False:
            none at all.
        accumulate_grad_batches: micro-batches of each rank in an optimiser step; 'auto' follows from
            the global batch and the number of ranks.
        global_batch_size: samples behind one optimiser step, over all ranks, for data without this key of its own; None is the
            product of the loader's batch_size, the number of ranks and accumulate_grad_batches.
        join_timeout: seconds that several hosts wait for all ranks at the start.
        shared_folder: all hosts must see the run's folder. False: only rank 0's host has it; rank 0 must stay there, unless
            there is a copy (checkpoints.copy_to), and the other hosts receive the checkpoint to resume from.
        precision: '16-mixed', 'bf16-mixed', '32-true' and so on; 'auto' is bf16-mixed on GPUs that have it, else 16-mixed;
            without a GPU fp16 becomes bf16, or fp32 if that is faster on the CPU.
        gradient_compression: 'fp16' or 'bf16' halves what the ranks send each other, and rounds the sum of the gradients.
        exact: the same to the last bit on any number of ranks.
        threads: threads of a rank's CPU operations. None divides the cores among the ranks; with `exact` it is one, because a
            sum may depend on it.
        capture: 'auto' records each step as one graph on a GPU, if all of it can be recorded; 'none' does not.
        nonfinite: when a loss or gradient is not finite, 'stop' before that step, with a checkpoint, or 'skip' it.
        fingerprints: write checksums of each step into the run's folder, by which `python -m project same` compares runs. None:
            if this project's logger or its checkpoints are active.
        ranks_differ: when these show that a rank's weights differ from the others', 'stop', or 'warn' once and continue.
    """

    @checked
    def __init__(
        self,
        *,
        accumulate_grad_batches: int | Literal["auto"] = "auto",
        global_batch_size: int | None = None,
        join_timeout: float = 300.0,
        shared_folder: bool = True,
        precision: str | int | None = None,
        gradient_compression: Compression = "none",
        exact: bool = False,
        threads: int | None = None,
        capture: Capture = "none",
        nonfinite: Act = "stop",
        fingerprints: bool | None = None,
        ranks_differ: WhenRanksDiffer = "stop",
        accelerator: str | Accelerator = "auto",
        callbacks: list[Callback] | Callback | None = None,
        logger: LoggerName | Logger | Iterable[LoggerName | Logger] | bool | None = None,
        plugins: Plugin | list[Plugin] | None = None,
        default_root_dir: str | Path | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool = False,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes what the class documents; every other argument is one of lightning.pytorch.Trainer."""
        launch = detect()
        if launch.rank and not BY_COMMAND.is_set():
            sign_lines(launch.rank, host())
        settled, lines = launch.settle(kwargs)
        for line in lines:
            log.info(line)
        kwargs.update(settled, val_check_interval=val_check_interval)
        precision_, gradient_compression = resolve_precision(precision, gradient_compression, exact, accelerator)
        if capture != "none" and on_cpu(accelerator):
            log.info("trainer.capture=%s does nothing: there is no GPU", capture)
        refuse_url(default_root_dir)
        self.given_folder = default_root_dir or folder_of_trainer(launch)
        default_root_dir = newest_folder(self.given_folder)
        self.exact, self._threads = exact, threads or (1 if exact else None)
        if exact and not on_cpu(accelerator):
            kwargs.setdefault("deterministic", True)
        bare = bool(kwargs.get("barebones"))
        self.loggers_in = partial(loggers_in, logger, launch.rank, bare)
        loggers = self.loggers_in(Path(default_root_dir))
        self.keeps_records = records = keeps_records(callbacks, loggers, enable_checkpointing) and not bare
        if fingerprints is None:
            fingerprints = records
        wanted = default_kinds(enable_progress_bar, enable_checkpointing, bare)
        listed = with_ours(
            callbacks, wanted, nonfinite, gradient_compression, exact, fingerprints and not bare, records, ranks_differ
        )
        of_timer = kwargs.get("max_time") is None or any(isinstance(callback, Timer) for callback in listed)
        self._time_limit = "the duration of Timer" if of_timer else "trainer.max_time"
        with named_errors({**kwargs, "accelerator": accelerator, "precision": precision, "plugins": plugins, "logger": logger}):
            super().__init__(
                accelerator=accelerator,
                precision=precision_,  # type: ignore[arg-type]
                callbacks=listed,
                logger=loggers,
                plugins=resolve_plugins(plugins, launch),
                default_root_dir=default_root_dir,
                accumulate_grad_batches=1 if accumulate_grad_batches == "auto" else accumulate_grad_batches,
                limit_train_batches=limit_train_batches,
                limit_val_batches=limit_val_batches,
                limit_test_batches=limit_test_batches,
                limit_predict_batches=limit_predict_batches,
                enable_checkpointing=enable_checkpointing,
                enable_progress_bar=enable_progress_bar,
                enable_model_summary=enable_model_summary,
                **kwargs,
            )
        for watchdog in callbacks_of(self, Watchdog) if callbacks_of(self, Life) else ():
            watchdog.life = Path(default_root_dir) / LIFE
        self.made_loggers = [*self.loggers]
        refuse_strategy(self, bool(launch.world_size), saves=bool(checkpoints_of(self)))
        name_speaker(self.global_rank, host(), self.world_size)
        if on_cpu(accelerator):
            keep_freed_memory(large=not (isinstance(self.strategy, Sharded) and self.world_size > 1))
        self._join_timeout, self.shared_folder, self.max_time = join_timeout, shared_folder, kwargs.get("max_time")
        self.rank_0_may_move = any(saved.copy_to for saved in callbacks_of(self, Checkpoints))
        self.host_of, self.host_names, self.configuration, self.global_batch = launch.host_of, [host()], {}, None
        by_time = self._val_check_time_interval is not None  # type: ignore[attr-defined]
        self._wanted_val_interval = None if by_time else self.val_check_interval
        self._signal_connector = SIGNALS  # type: ignore[assignment]
        self._checkpoint_connector = self.resuming = Resuming(self)
        self._moments = Moments(self, exact)
        self.step_state = StepState()
        self._logger_connector = self.logged = ExactLogged(self) if exact else Logged(self)
        self._data_connector: Loaders = Loaders(
            *(self, global_batch_size, accumulate_grad_batches, self._wanted_val_interval, cores(self.num_devices) - 1),
            self._moments,
        )
        if exact:
            if self.is_global_zero:
                checks.warn_of_hash_randomization()
            checks.refuse_inexact_settings(kwargs, gradient_compression, self.strategy)
            self.strategy.all_gather = checks.refuse_all_gather  # type: ignore[method-assign]
        elif self.world_size > 1:
            self.strategy.all_gather = partial(gather_evenly, self, self.strategy.all_gather)  # type: ignore[method-assign]
        if isinstance(self.strategy, Sharded):
            if self.num_nodes > 1 and not shared_folder:
                raise UserError(
                    "trainer.strategy=sharded has each rank write its part of a checkpoint into one folder, and "
                    "trainer.shared_folder=false has none. HINT: put the runs where all hosts see them."
                )
            self.strategy.exact, self.strategy.before_sharding = exact, None if restarts() else partial(report, self)
            self.strategy.refuse_other_settings(gradient_compression, on_cpu(accelerator))
            for loop in (self.validate_loop, self.test_loop, self.predict_loop):
                loop.inference_mode = False  # what was gathered so can't be trained with
        elif isinstance(self.strategy, DDPStrategy):
            use_exact_gradients(self.strategy) if exact else use_ordered_ddp(self.strategy, capture != "none")
        results = install_loops(self, self._wanted_val_interval, self._moments, ExactResults if exact else Results)
        if isinstance(results, ExactResults):
            self.gradients: Gradients = ExactStep(self, results)
        else:
            self.gradients = ShardedGradients(self) if isinstance(self.strategy, Sharded) else Gradients(self)
        self.fit_loop.epoch_loop.captures_graphs = capture != "none" and not on_cpu(accelerator)
        if launch.world_size and launch.world_size != self.world_size:
            raise UserError(
                f"{launch.kind} started {launch.world_size} processes, and with trainer.strategy="
                f"{kwargs.get('strategy')} each would train a copy of its own. HINT: set trainer.strategy=ddp."
            )
        self.own_attributes = {*vars(self), *TypedTrainer.__annotations__}

    # Asked several times a step, and Lightning's compares the letters of names.
    training = property(lambda self: self.state.stage is RunningStage.TRAINING, pl.Trainer.training.fset)  # type: ignore[attr-defined]
    world_size, global_rank, num_training_batches = map(
        checks.guarded_property, ("world_size", "global_rank", "num_training_batches")
    )

    def best_checkpoint(self, monitor: str | None, mode: str) -> Path:
        return weights(Path(self.default_root_dir), "best", monitor, mode)

    @property
    def skipped(self) -> bool | Tensor:
        """Returns whether the step at hand is left out, as it is not finite. A tensor on a GPU, where only the device knows."""
        return self.step_state.skipped

    @property
    def shared_by(self) -> int:
        """Returns how many ranks see the same samples: more than 1 with tensor_parallel."""
        return data_ranks(self).shared_by

    @property
    def least_seconds(self) -> float:
        """Returns the least time of a fit, at the peak of its devices; 0 if not known."""
        data = self.datamodule
        return least_seconds(self, data.sample_shape) if data is not None and isinstance(data, SelfDealing) else 0.0

    def _run_sanity_check(self) -> None:
        """Runs the sanity check, where anything is to be trained; with `exact` of the same samples on any number of ranks."""
        if is_over(self):
            return
        with self._moments.without_check():
            if not self.exact or not self.num_sanity_val_steps:
                super()._run_sanity_check()
                return
            loaders = self._data_connector
            loaders.sanity_steps, self.num_sanity_val_steps = self.num_sanity_val_steps, float("inf")
            try:
                super()._run_sanity_check()
            finally:
                self.num_sanity_val_steps, loaders.sanity_steps = loaders.sanity_steps, None
                self.fit_loop.epoch_loop.val_loop._combined_loader = None  # it has these samples and no more

    def _run(self, model: LightningModule, *args: Any, **kwargs: Any) -> Any:
        """Called for every verb, in every process, before anything is set up."""
        with self._moments.verb():
            self.resuming.begin_verb(kwargs.get("ckpt_path"), kwargs.get("weights_only"))
            self.stopped_by = ""
            if isinstance(self.precision_plugin, DoublePrecision):
                self.precision_plugin.convert_module(model)  # Lightning: after averages were made, which round in float32
            if self.num_nodes > 1:
                connect_hosts(self, self._join_timeout)
            elif self.world_size > 1:
                connect_on_loopback(self)
            self._data_connector.begin_verb()
            for callback in self.callbacks:
                if isinstance(callback, Watchdog):
                    callback.start(self)
            if self._threads is not None and self.strategy.root_device.type == "cpu":
                checks.fix_threads(self._threads, self.exact)
            try:
                results = super()._run(model, *args, **kwargs)
            except Exception as error:
                note_failure(self)
                if isinstance(error, torch.AcceleratorError):
                    # Nothing comes back from a device that has failed: to try it would hide its error behind another.
                    self._teardown = self._signal_connector.teardown  # type: ignore[method-assign]
                raise
            if self.state.fn == TrainerFn.FITTING:
                warn_if_cut_short(self, self._time_limit)
            return results
