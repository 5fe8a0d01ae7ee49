"""Trainer: Lightning's, set up for this house.

It runs from Python as it does from the command line:

    trainer = Trainer(max_epochs=1, default_root_dir="runs/first")
    trainer.fit(ImageClassifier(MiniResNet()), datamodule=ImageData(batch_size=32))

`default_root_dir` is the folder of this run: TensorBoard's events and the checkpoints go into it. Without it the run gets a new
one, lightning_logs/run-DATE-TIME.
"""

import atexit
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, DoublePrecision, LayerSync, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console
from torch import Tensor
from torch.distributed import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore

from project.arguments import LEAST, culprit, refuse_odd_numbers, with_environment
from project.callbacks import with_ours
from project.checkpoints.callback import Checkpoints, checkpoints_of
from project.checkpoints.reading import SafeCheckpointIO, newest_good
from project.cluster import environment, shared_folder
from project.cluster.cores import cores
from project.cluster.interfaces import Route, use, use_loopback
from project.cluster.memory import keep_freed_memory
from project.cluster.place import host
from project.cluster.rendezvous import Rendezvous, store_on_loopback
from project.config_files import RUNS
from project.data import ImageData
from project.doctor.doctor import examine
from project.doctor.examination import Examination
from project.doctor.examined import examined_run
from project.doctor.findings import Finding, show, write
from project.doctor.memory_forecast import Forecast, dry_run, report
from project.errors import UserError, as_user_error
from project.exact.checks import (
    fix_threads,
    guarded_property,
    refuse_all_gather,
    refuse_inexact_settings,
    refuse_no_global_batch,
    warn_of_hash_randomization,
)
from project.exact.logged import ExactResults
from project.exact.metrics import ExactLogged
from project.exact.step import ExactStep
from project.export.capture import Capture
from project.export.export import BATCHES, export, exportable
from project.export.formats import Format
from project.export.plain import as_one_file
from project.launch.kubernetes import written
from project.launch.launcher import Launch, detect
from project.launch.manifest import Engine, Wanted, claim_of, image_of, pods, refuse_odd_batches, root_of
from project.launch.manifest import name as name_of
from project.launch.needs import needs
from project.resume.checkpoint import Resuming
from project.sharded.gradients import ShardedGradients
from project.sharded.strategy import Sharded
from project.step.batching import accumulation
from project.step.capture import Capture as CaptureSteps
from project.step.chance import Moments
from project.step.compression import Compression, supported_compression
from project.step.data_ranks import data_ranks, shared_by
from project.step.ddp import all_gather_objects, use_exact_gradients, use_ordered_ddp
from project.step.epochs import install_loops
from project.step.gathering import gather_evenly
from project.step.gradients import Gradients
from project.step.loaders import Loaders
from project.step.logged import Logged, Results
from project.step.position import out_of_time
from project.step.precision import auto_precision, cpu_precision, on_cpu
from project.step.state import StepState
from project.step.supported_strategies import refuse_strategy
from project.survive.failure import close_connections
from project.survive.hang.watchdog import Watchdog
from project.survive.nonfinite import Act
from project.survive.requeue import REQUEUE
from project.survive.signals import EXIT_CODES, SIGNALS
from project.typed import TypedTrainer
from project.watch.console import Progress, name_speaker
from project.watch.events import Events
from project.watch.fingerprints import WhenRanksDiffer
from project.watch.flops import flops, peak
from project.watch.steady import Csv
from project.watch.throughput import Throughput

log = logging.getLogger(__name__)
logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "Tip:" not in record.getMessage())


_STARTED = "PROJECT_STARTED"
_TRAINERS = count(1)  # of this program that were given no folder

Plugin = Precision | ClusterEnvironment | CheckpointIO | LayerSync | str


class ResumingOnHosts(Resuming):
    """Reads a checkpoint on all hosts, or, where only rank 0's has it, there."""

    def _parse_ckpt_path(self, state_fn: TrainerFn, ckpt_path: Any, model_provided: bool, model_connected: bool) -> Any:
        """`ckpt_path="last"` is the newest of this run's folder; Lightning looks for those of its ModelCheckpoint."""
        ours = ckpt_path == "last" and checkpoints_of(self.trainer)
        # All ranks look, so nothing is set aside.
        newest = newest_good(Path(self.trainer.default_root_dir) / "checkpoints", set_aside=False) if ours else None
        if newest is not None:
            return str(newest[0])
        return super()._parse_ckpt_path(state_fn, ckpt_path, model_provided, model_connected)

    def read(self, checkpoint_path: Any, weights_only: bool | None) -> None:
        trainer: Trainer = self.trainer  # type: ignore[assignment]
        strategy, io = trainer.strategy, trainer.strategy.checkpoint_io
        spread = isinstance(strategy, Sharded) and strategy.is_sharded
        if isinstance(io, SafeCheckpointIO):
            io.slice_of = strategy.slice_of if isinstance(strategy, Sharded) and spread else None
        self._read_on_hosts(trainer, checkpoint_path, weights_only)
        if checkpoint_path and isinstance(strategy, Sharded) and spread:
            self._loaded_checkpoint = strategy.shards_of(self._loaded_checkpoint)

    def _read_on_hosts(self, trainer: "Trainer", checkpoint_path: Any, weights_only: bool | None) -> None:
        if not checkpoint_path or trainer.num_nodes == 1 or not dist.is_initialized():
            super().read(checkpoint_path, weights_only)
        elif trainer.shared_folder:
            gather = partial(all_gather_objects, ranks=trainer.world_size)
            if problem := shared_folder.file_problem(Path(checkpoint_path), trainer.host_names, gather):
                raise UserError(f"{problem}. HINT: put it where all hosts see it, or set trainer.shared_folder=false.")
            super().read(checkpoint_path, weights_only)
        else:  # through the hosts' memory: the device may have no room for it
            load = trainer.strategy.load_checkpoint
            trainer.strategy.load_checkpoint = partial(_from_rank_0, load)  # type: ignore[method-assign]
            try:
                super().read(checkpoint_path, weights_only)
            finally:
                del trainer.strategy.load_checkpoint


class Trainer(TypedTrainer):
    """Lightning's Trainer with the launcher's word on nodes and processes, and with what every run here has: checkpoints
    of the best and the last state, TensorBoard, progress, and signals that stop all ranks at the same step.

    Args:
        limit_train_batches: take so many optimiser steps of an epoch (an int) or such a share of it (a float).
        limit_val_batches: validate on so many micro-batches (an int), over all ranks, or on such a share.
        limit_test_batches: the same for the test.
        limit_predict_batches: the same for prediction.
        val_check_interval: validate every so many optimiser steps (an int) or such a share of an epoch (a float), or where so
            much time has passed ("DD:HH:MM:SS").
        accumulate_grad_batches: micro-batches that each rank takes in an optimiser step; 'auto' follows from
            the global batch and the number of ranks.
        global_batch_size: samples behind one optimiser step, over all ranks, for data that doesn't say it itself; None takes
            what the loader's batch_size, the number of ranks and accumulate_grad_batches amount to.
        join_timeout: with several hosts, seconds to wait for all ranks at the start.
        shared_folder: all hosts must see the run's folder. False: only rank 0's host has it; there rank 0 must stay, and a
            checkpoint to go on from is sent to the others.
        precision: '16-mixed', 'bf16-mixed', '32-true' and so on; 'auto' is bf16-mixed on GPUs that have it, else 16-mixed;
            without a GPU fp16 is bf16, or fp32 where the CPU is faster so.
        gradient_compression: 'fp16' or 'bf16' halves what the ranks send each other; the sum of the gradients is rounded so.
        exact: the same to the last bit on any number of ranks.
        threads: of a rank's CPU operations. None: as many as there are cores for each rank; with `exact` one, as a sum may
            depend on it.
        capture: 'auto' has a GPU take each step as one graph, where all that is in it can be recorded; 'none' leaves it.
        nonfinite: when a loss or gradient is not finite, 'stop' before that step, with a checkpoint, or 'skip' it.
        fingerprints: each step leaves checksums in the run's folder, by which `python -m project same` compares runs. None:
            where this project's logger or its checkpoints are there, too.
        ranks_differ: where these show that a rank has other weights than the others, 'stop' or 'warn' once and go on.
    """

    @with_environment
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
        capture: CaptureSteps = "none",
        nonfinite: Act = "stop",
        fingerprints: bool | None = None,
        ranks_differ: WhenRanksDiffer = "stop",
        accelerator: str | Accelerator = "auto",
        callbacks: list[Callback] | Callback | None = None,
        logger: Logger | Iterable[Logger] | bool | None = None,
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
        limits = (limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches)
        kwargs["val_check_interval"] = val_check_interval
        numbers: dict[str, Any] = {
            "accumulate_grad_batches": accumulate_grad_batches,
            "join_timeout": join_timeout,
            "threads": threads,
        }
        numbers |= dict(zip((name for name in LEAST if name.startswith("limit_")), limits, strict=True))
        refuse_odd_numbers({**kwargs, **numbers})
        launch = detect()
        settled, lines = launch.settle(kwargs)
        kwargs.update(settled)
        accelerator_, precision_ = accelerator, None if precision is None else str(precision)
        if precision_ == "auto":
            precision_ = auto_precision()
        if precision_ is not None and on_cpu(accelerator):
            precision_, reason = cpu_precision(precision_)
            if reason:
                lines.append(f"trainer.precision={precision_} instead of {precision}: {reason}")
        if not exact:  # which refuses any
            gradient_compression, line = supported_compression(gradient_compression, str(precision), precision_ or "32-true")
            lines += [line] if line else []
        if capture != "none" and on_cpu(accelerator):
            lines.append(f"trainer.capture={capture} does nothing: there is no GPU")
        for line in lines:
            log.info(line)
        default_root_dir = default_root_dir or _new_folder(launch)

        self.exact, self._threads = exact, threads or (1 if exact else None)
        if exact and not on_cpu(accelerator):
            kwargs.setdefault("deterministic", True)

        bare = bool(kwargs.get("barebones"))
        if fingerprints is None:
            listed = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
            saves = enable_checkpointing is not False and all(
                isinstance(callback, Checkpoints) for callback in listed if isinstance(callback, Checkpoint)
            )
            loggers = logger if isinstance(logger, (list, tuple)) else [logger]
            fingerprints = saves or any(entry in (None, True) or isinstance(entry, Events) for entry in loggers)
        wanted = [
            kind
            for kind, given in ((Progress, enable_progress_bar), (Checkpoints, enable_checkpointing), (Throughput, None))
            if given is not False and not bare
        ]
        try:
            super().__init__(
                accelerator=accelerator_,
                precision=precision_,  # type: ignore[arg-type]
                callbacks=with_ours(
                    callbacks, wanted, nonfinite, gradient_compression, exact, fingerprints and not bare, ranks_differ
                ),
                logger=logger if bare else Events(str(default_root_dir)) if logger in (None, True) else logger,
                plugins=_with_plugins(plugins, launch),
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
        except (ValueError, TypeError, ImportError, MisconfigurationException) as error:
            given = {**kwargs, "accelerator": accelerator, "precision": precision, "plugins": plugins, "logger": logger}
            named = culprit(given, str(error))
            raise as_user_error(error, f"The trainer's settings don't work here: {named}{error}") from error
        refuse_strategy(self, bool(launch.world_size), saves=bool(checkpoints_of(self)))
        name_speaker(self.global_rank, host(), self.world_size)
        if on_cpu(accelerator):
            keep_freed_memory(large=not (isinstance(self.strategy, Sharded) and self.world_size > 1))
        self._launch, self._join_timeout, self.shared_folder = launch, join_timeout, shared_folder
        self.host_names: list[str] = [host()]  # by rank, once the ranks of several hosts have met
        self.configuration: dict[str, Any] = {}  # the resolved one, from who knows it
        self._wanted_limits: dict[str, int | float | None] = {}
        by_time = self._val_check_time_interval is not None  # type: ignore[attr-defined]
        self._wanted_val_interval = None if by_time else self.val_check_interval
        self._wanted_accumulation, self._wanted_global_batch = accumulate_grad_batches, global_batch_size
        self._own_accumulation = self.accumulate_grad_batches  # any other value is one that somebody has set since
        self.global_batch: int | None = None
        """Samples behind one optimiser step, where they can be counted."""
        self._signal_connector = SIGNALS  # type: ignore[assignment]
        self._checkpoint_connector = ResumingOnHosts(self)
        self._moments = Moments(self, exact)
        self.step_state = StepState()
        self._logger_connector = ExactLogged(self) if exact else Logged(self)
        self._data_connector: Loaders = Loaders(
            self, global_batch_size, accumulate_grad_batches, self._wanted_limits, self._settled, self._moments
        )
        if exact:
            if self.is_global_zero:
                warn_of_hash_randomization()
            refuse_inexact_settings(kwargs, gradient_compression, self.strategy)
            self.strategy.all_gather = refuse_all_gather  # type: ignore[method-assign]
        elif self.world_size > 1:
            self.strategy.all_gather = partial(gather_evenly, self, self.strategy.all_gather)  # type: ignore[method-assign]
        if isinstance(self.strategy, Sharded):
            if self.num_nodes > 1 and not shared_folder:
                raise UserError(
                    "trainer.strategy=sharded has each rank write its part of a checkpoint into one folder, and "
                    "trainer.shared_folder=false has none. HINT: put the runs where all hosts see them."
                )
            self.strategy.exact, self.strategy.before_sharding = exact, self._report_memory
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

    def loggers_go_on(self, step: int, logged: Sequence[tuple[int, str, float]] = (), starts_again: bool = True) -> None:
        """Has TensorBoard and CSV replace what they have from this step on by `logged`: that part of the run is repeated."""
        for logger in self.loggers:
            if isinstance(logger, (Events, Csv)):
                logger.resume_at(step, logged, starts_again)

    # Asked several times a step, and Lightning's compares the letters of names.
    training = property(lambda self: self.state.stage is RunningStage.TRAINING, pl.Trainer.training.fset)  # type: ignore[attr-defined]
    world_size, global_rank, num_training_batches = map(guarded_property, ("world_size", "global_rank", "num_training_batches"))

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
        """Returns the least time of a fit: its floating-point operations, at the peak of its devices; 0 if not known."""
        data = getattr(self, "datamodule", None)
        fastest = peak(self)
        if not fastest or not isinstance(data, ImageData):
            return 0.0
        samples = self.estimated_stepping_batches * (self.global_batch or 0)
        ranks: int = self.world_size
        return flops(getattr(self.lightning_module, "network", None), data.shape) * samples / (fastest * ranks)

    def _run_sanity_check(self) -> None:
        """Runs the sanity check; with `exact` it looks at the same samples on any number of ranks."""
        with self._moments.without_check():
            self._check_sanity()

    def _check_sanity(self) -> None:
        if not self.exact or not self.num_sanity_val_steps:
            super()._run_sanity_check()
            return
        loaders: Any = self._data_connector
        loaders.sanity_steps, self.num_sanity_val_steps = self.num_sanity_val_steps, float("inf")
        try:
            super()._run_sanity_check()
        finally:
            self.num_sanity_val_steps, loaders.sanity_steps = loaders.sanity_steps, None
            self.fit_loop.epoch_loop.val_loop._combined_loader = None  # it has these samples and no more

    def _run(self, model: LightningModule, *args: Any, **kwargs: Any) -> Any:
        """Called for every verb, in every process, before anything is set up."""
        self._checkpoint_connector.weights_only = kwargs.get("weights_only")  # type: ignore[attr-defined]
        if isinstance(self.precision_plugin, DoublePrecision):
            self.precision_plugin.convert_module(model)  # Lightning: after averages were made, which round in float32
        if self.num_nodes > 1:
            self._meet_as_equals()
        elif self.world_size > 1:
            use_loopback()
            self._connect_on_loopback()
        self._settle_data()
        for callback in self.callbacks:
            if isinstance(callback, Watchdog):
                callback.start(self)
        if self._threads is not None and self.strategy.root_device.type == "cpu":
            fix_threads(self._threads, self.exact)
        try:
            results = super()._run(model, *args, **kwargs)
        except torch.AcceleratorError:
            # Nothing comes back from a device that has failed: to try it would hide its error behind another.
            self._teardown = self._signal_connector.teardown  # type: ignore[method-assign]
            raise
        if self.state.fn == TrainerFn.FITTING and out_of_time(self) and self.global_step < self.estimated_stepping_batches:
            log.warning(
                "Stopped by trainer.max_time after step %d of %s, before the end of the run. HINT: more time for all starts "
                "together, and the same command goes on from the checkpoint.",
                *(self.global_step, self.estimated_stepping_batches),
            )
        return results

    @property
    def _ddp(self) -> DDPStrategy:
        """Returns the strategy of a run with several ranks: all that are taken are DDP's."""
        return cast(DDPStrategy, self.strategy)

    # Before the ranks are connected ----------------------------------------------------------------------------------

    def _meet(self, seconds: float) -> tuple[Rendezvous, Route | None]:
        """Connects the ranks when all have come and every host reaches every other, and returns the route."""
        environment = self._ddp.cluster_environment
        assert environment is not None
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        place = environment.main_address, environment.main_port
        who = self.global_rank, self.world_size
        one_host = self.num_nodes == 1
        rendezvous = Rendezvous(*who, *place, seconds, self._launch.host_of, hosted=hosted, one_host=one_host)
        self.host_names = rendezvous.hosts
        route = rendezvous.find_route()
        if route is None:
            use_loopback()
        else:
            use(route)
        self._connect(PrefixStore("ranks", rendezvous.store), self.global_rank)
        return rendezvous, route

    def _connect(self, store: PrefixStore, rank: int) -> None:
        """Connects the ranks as Lightning does, by a store that exists already."""
        device = self.strategy.root_device
        self.accelerator.setup_device(device)
        backend = self._ddp.process_group_backend or dist.get_default_backend_for_device(device)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=self.world_size,
            timeout=self._ddp._timeout,
            device_id=None if device.type == "cpu" else device,
        )
        if "nccl" in backend:  # as Lightning does where it connects the ranks itself
            atexit.register(_disconnect)

    def _connect_on_loopback(self) -> None:
        """Connects the ranks of one host on loopback, where nothing listens to another host; not if the store is torchrun's."""
        if dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        assert self._ddp.cluster_environment is not None
        rank, port = self._ddp.local_rank, self._ddp.cluster_environment.main_port
        store = store_on_loopback(rank, port, self._ddp._timeout or default_pg_timeout)
        self._connect(PrefixStore("ranks", store), rank)

    def _meet_as_equals(self) -> None:
        """Connects the ranks of several hosts, and ends the run where one would train something else than the others."""
        if dist.is_initialized():
            return
        rendezvous, _ = self._meet(self._join_timeout)
        facts = environment.of_this_rank(self.strategy.root_device, self.configuration)
        place = Path(self.default_root_dir), self.global_rank, rendezvous.hosts, rendezvous.exchange
        problems = []
        if differing := environment.compare(facts, self.configuration, rendezvous.hosts, rendezvous.exchange):
            problems.append(f"{'; '.join(differing)}. HINT: every rank needs the same versions, code and configuration.")
        if not self.shared_folder and (moved := shared_folder.moved(*place)):
            problems.append(f"{moved[0]}. HINT: {shared_folder.MOVE}")
        if self.shared_folder and (unseen := shared_folder.folder_problem(*place)):
            problems.append(f"{unseen[0]}. HINT: {shared_folder.SHARE}")
        if problems:
            rendezvous.end("\n".join(problems))

    # Verbs that are ours ---------------------------------------------------------------------------------------------

    def doctor(
        self, model: LightningModule, datamodule: LightningDataModule, fast: bool = False, join_timeout: float = 30.0
    ) -> list[Finding]:
        """Examines the cluster: is it fit for this run? The findings are complete on rank 0, and lie in doctor.json.

        Args:
            model: the model of the run.
            datamodule: its data.
            fast: leave out what takes time: how fast network, device and loader are, and the memory.
            join_timeout: seconds to wait for all ranks; who is missing then is named.
        """
        launcher, given = self.strategy.launcher, (model, datamodule, fast, join_timeout)
        try:
            findings = self._examine(*given) if launcher is None else launcher.launch(self._examine, *given, trainer=self)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever presses it again need not
            if kill := getattr(launcher, "kill", None):  # the ranks that this process has started
                kill(signal.SIGKILL)
            raise SystemExit(1) from None
        return list(findings)

    def dry_run(self, model: LightningModule, datamodule: LightningDataModule | None = None, ranks: str = "") -> list[Forecast]:
        """Says what each rank of a fit would hold, and trains nothing. The rows of its table, in bytes.

        Args:
            model: the model of the run; one built under `torch.device("meta")` takes no memory.
            datamodule: its data, for a micro-batch.
            ranks: numbers of ranks, as in "8,64,1024"; none is needed. By default the settings' number.
        """
        wanted, loaders = self._wanted_accumulation, self._data_connector
        self._wanted_accumulation = loaders.configured_accumulation = "auto"  # here there is one rank, whatever there will be
        self.strategy.connect(model)
        self._as_for_a_fit(model, datamodule)
        try:
            return dry_run(self, ranks, self._wanted_global_batch, wanted, self.exact)
        finally:
            self._wanted_accumulation = loaders.configured_accumulation = wanted
            self.training = False

    def _report_memory(self) -> None:
        report(self, self._wanted_global_batch, self._wanted_accumulation, self.exact)

    def export(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        to: Format | None = None,
        ckpt_path: str | Path | None = None,
        out: Path | None = None,
        batch_size: int | None = None,
        weights_only: bool | None = None,
    ) -> Path:
        """Exports the weights that an evaluation uses: a file that is loaded without this package, and was checked.

        Args:
            model: the model of the run.
            datamodule: its data, whose validation set the file is checked on.
            to: safetensors (the weights), onnx or torch-export (the network), or checkpoint (all that a run goes on from, as
                one file, where a sharded run has left a folder).
            ckpt_path: best (the default of a run), last, or the path of a checkpoint.
            out: the folder that gets the file; by default export-FORMAT in the run's folder.
            batch_size: the network takes batches of so many samples; None: of any number.
            weights_only: as in torch.load.
        """
        target = Path(out or Path(self.default_root_dir) / f"export-{to}").absolute()
        form = exportable(to, batch_size, target)
        if self.world_size > 1:
            raise UserError("export takes one process. HINT: start it with plain Python, with trainer.devices=1.")
        checkpoint = Path(ckpt_path) if ckpt_path else None
        if form == "checkpoint":
            return as_one_file(self, checkpoint, target)
        capture, of = self._capture(model, datamodule, ckpt_path, weights_only)
        return export(self, model, datamodule, capture, of, form, checkpoint, target, batch_size)

    def manifest(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        engine: Engine = "k8s",
        nodes: str = "1",
        gpus: int = 8,
        cpus: int | None = None,
        image: str | None = None,
        claim: str | None = None,
        out: Path | None = None,
        run: str = "run",
        words: Sequence[str] = (),
        configs: Mapping[str, str] | None = None,
    ) -> str:
        """Writes a manifest for Kubernetes that fits this run: its memory, disk, /dev/shm and grace. Nothing is started.

        Args:
            model: the model of the run.
            datamodule: its data; where it is not here, some figures are guessed.
            engine: 'k8s', a Job and a service, or 'trainjob', for Kubeflow Trainer v2.
            nodes: pods, one a node; MIN:MAX goes on while at least MIN are there.
            gpus: of each pod; 0 trains on the CPU, with one process a pod.
            cpus: cores of each pod; None: 8 for each GPU, or 4.
            image: the image with its digest, REPOSITORY@sha256:DIGEST.
            claim: an existing volume claim for the runs; None writes one of the size that the checkpoints take.
            out: the file to write; None: it is printed.
            run: the run's name, and that of all that the manifest makes.
            words: after `python -m project fit`, in the container.
            configs: those that are not in the image, by name.
        """
        if gpus < 0 or (cpus is not None and cpus < 1):
            raise UserError(f"--gpus {gpus} --cpus {cpus}: these are numbers of a pod. HINT: --gpus 0 is none.")
        count = cpus or (8 * gpus or 4)
        root = root_of(self.configuration.get("trainer", {}).get("default_root_dir"))
        wanted = Wanted(
            engine,
            name_of(run),
            *pods(nodes, engine),
            gpus,
            count,
            image_of(image),
            claim_of(claim),
            list(words),
            dict(configs or {}),
            root,
        )
        self._as_for_a_fit(model, datamodule)
        if isinstance(datamodule, ImageData):
            datamodule.spare_cores = max(1, count // wanted.processes) - 1
        examined = examined_run(self, model, datamodule, Path(self.default_root_dir), wanted.processes)
        needed, share = needs(examined, wanted), shared_by(self.strategy)
        if isinstance(datamodule, ImageData):
            refuse_odd_batches(wanted, datamodule.global_batch_size, datamodule.batch_size, "data.global_batch_size", share)
        else:
            refuse_odd_batches(wanted, self._wanted_global_batch, examined.micro_batch, "trainer.global_batch_size", share)
        self.training = False
        text = written(wanted, needed)
        if out is not None:
            out.write_text(text)
        return text

    def _capture(self, model: LightningModule, *given: Any) -> tuple[Capture, str]:
        """Weights and batches from within an evaluation of the validation set, else of the test set."""
        datamodule, ckpt_path, weights_only = given
        capture, limits = Capture(), (self.limit_val_batches, self.limit_test_batches)
        self.limit_val_batches = self.limit_test_batches = BATCHES
        self.callbacks.append(capture)
        try:
            for verb, step, of in ((self.validate, "validation_step", "validation"), (self.test, "test_step", "test")):
                if is_overridden(step, model, LightningModule) and not capture.weights:
                    verb(model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False, weights_only=weights_only)
                    if SIGNALS.noted:
                        raise SystemExit(EXIT_CODES[SIGNALS.noted])
                if capture.weights:
                    return capture, f"the {of} set"
        finally:
            self.callbacks.remove(capture)
            self.limit_val_batches, self.limit_test_batches = limits
        raise UserError(
            "There is nothing to check the export on. HINT: it takes a validation or a test set, and a module with "
            "validation_step or test_step."
        )

    def _examine(self, model: LightningModule, data: LightningDataModule, fast: bool, seconds: float) -> list[Finding]:
        start = time.monotonic()
        folder, findings = Path(self.default_root_dir), []
        try:
            rendezvous, route = self._meet(seconds) if self.world_size > 1 else (None, None)
        except ValueError as error:
            text, _, fix = str(error).partition(" HINT: ")
            findings = [Finding("ranks", "bad", text, fix, [{"rank": self.global_rank, "host": host()}])]
        else:
            findings = self._doctor_for(model, data, fast, rendezvous, route).findings
        if self.is_global_zero or not dist.is_initialized():
            show(findings, Console(stderr=True))
        if self.is_global_zero:
            write(findings, folder / "doctor.json", time.monotonic() - start)
        return findings

    def _doctor_for(
        self, model: LightningModule, data: LightningDataModule, fast: bool, rendezvous: Rendezvous | None, route: Route | None
    ) -> Examination:
        folder = self.strategy.broadcast(str(self.default_root_dir)) if rendezvous else self.default_root_dir
        self._as_for_a_fit(model, data)
        on_this_host = rendezvous.hosts.count(rendezvous.hosts[self.global_rank]) if rendezvous else 1
        examination = Examination(examined_run(self, model, data, Path(folder), on_this_host), rendezvous, route, fast)
        examine(examination)
        self.training = False
        return examination

    def _as_for_a_fit(self, model: LightningModule, data: LightningDataModule | None) -> None:
        """Puts them together as far as the data's loaders need it."""
        self.state.fn, self.training = TrainerFn.FITTING, True
        self._data_connector.attach_data(model, datamodule=data)
        self._settle_data()

    def _settle_data(self) -> None:
        """Translates the launcher's settings and the number of ranks into those of the data and of Lightning's loops."""
        data: LightningDataModule | None = getattr(self, "datamodule", None)
        self._data_connector.start_over()
        self._heed_accumulation()
        self._accumulate(1)
        self.global_batch = None
        if isinstance(data, ImageData):
            if self.overfit_batches:
                raise UserError(
                    "trainer.overfit_batches would replace the order of the samples. HINT: train on fewer images instead, as "
                    "configs/debug.yaml does."
                )
            data.spare_cores = cores(self.num_devices) - 1
            data.limits = self._wanted_limits
            data.exact = self.exact
            data.shared_by = self.shared_by
            if self.training:
                where = "data.global_batch_size data.batch_size"
                wanted, size = self._wanted_accumulation, data.batch_size
                self._settled(accumulation(data.global_batch_size, size, data_ranks(self).count, wanted, where), size)
        elif self.training:
            if self.exact:
                refuse_no_global_batch(self._wanted_global_batch)
            if self._wanted_accumulation != "auto":
                self._settled(self._wanted_accumulation, None)

    def _heed_accumulation(self) -> None:
        """Takes `trainer.accumulate_grad_batches = 4` as an argument that is given late, as Lightning's Trainer does."""
        given = self.accumulate_grad_batches
        if given != self._own_accumulation and not self._accumulates_by_epoch:
            refuse_odd_numbers({"accumulate_grad_batches": given})
            self._wanted_accumulation = self._data_connector.configured_accumulation = given

    def _accumulate(self, micro_batches: int) -> None:
        self.accumulate_grad_batches = self._own_accumulation = micro_batches

    @property
    def _accumulates_by_epoch(self) -> bool:
        return any(isinstance(callback, GradientAccumulationScheduler) for callback in self.callbacks)

    def _settled(self, accumulation: int, micro_batch: int | None) -> None:
        """Sets the accumulation, for which Lightning counts the micro-batches of a rank."""
        if accumulation > 1 and self._accumulates_by_epoch:
            raise UserError(
                f"GradientAccumulationScheduler sets the accumulation by epoch, and the global batch makes it {accumulation}. "
                "HINT: leave out the callback, or have each rank take its share of the global batch as one micro-batch."
            )
        self._accumulate(accumulation)
        if micro_batch is not None:  # a callback may accumulate more for an epoch
            self.global_batch = micro_batch * data_ranks(self).count * accumulation
        if isinstance(self._wanted_val_interval, int):
            self.val_check_interval = self._wanted_val_interval * accumulation


def _from_rank_0(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns on all ranks what rank 0 reads."""
    group: Any = dist.new_group(backend="gloo")
    sent = [load(*args, **kwargs) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent, 0, group=group)
    dist.destroy_process_group(group)
    return sent[0]


def _disconnect() -> None:
    """Disconnects at the end of the program, undisturbed by Ctrl-C: torch warns where NCCL's connections are left open."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    close_connections()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _new_folder(launch: Launch) -> Path:
    """Returns a folder for a run that was given none: another one for each Trainer of a program, the same on all ranks."""
    if launch.kind == "torchrun" and launch.name is None:
        if (launch.nodes or 1) > 1:
            raise UserError("The hosts can't agree on a folder for this run. HINT: give Trainer a default_root_dir.")
        stem = f"run-{os.getppid()}"
    else:
        stem = f"run-{launch.name or _started()}"
    number = next(_TRAINERS)
    return Path(RUNS, stem if number == 1 else f"{stem}-{number}").absolute()


@cache
def _started() -> str:
    """Returns when this program was started.

    Ranks find it in the environment that they have from who started them; another program that this one starts is no rank.
    """
    if "LOCAL_RANK" not in os.environ or _STARTED not in os.environ:
        os.environ[_STARTED] = f"{datetime.now():%Y%m%d-%H%M%S}"
    return os.environ[_STARTED]


def _with_plugins(given: Any, launch: Launch) -> list[Any]:
    plugins = list(given) if isinstance(given, (list, tuple)) else [given] if given is not None else []
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(SafeCheckpointIO())
    # Who started this process is known better than by Slurm's environment, which is asked for to switch requeueing off.
    slurms = [plugin for plugin in plugins if isinstance(plugin, SLURMEnvironment)]
    if any(not plugin.auto_requeue for plugin in slurms):
        REQUEUE.given_up = True
    plugins = [plugin for plugin in plugins if plugin not in slurms]
    has_environment = any(isinstance(plugin, ClusterEnvironment) for plugin in plugins)
    return plugins if has_environment else [*plugins, launch.environment()]
