"""The console: the log, in which rank 0 reports and the others only warn; a progress bar on a terminal, plain lines elsewhere.

`open_log` sets up the log of this process. `Progress` is the Trainer's progress bar and prints the summary of a run.
"""

import logging
import sys
import time
import warnings
from datetime import timedelta
from logging.handlers import MemoryHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ProgressBar
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column

from project.cluster.place import host
from project.step.data_ranks import data_ranks
from project.step.position import planned_steps
from project.step.state import micro_batch
from project.typed import typed
from project.untrusted import open_to_append, printable
from project.watch.history import longest
from project.watch.throughput import Throughput

log = logging.getLogger(__name__)

_LINE_EVERY = 10.0  # seconds between plain lines, once training is under way
_FORMAT = "%(asctime)s %(levelname)-7s %(who)s%(message)s"
_NOISY = ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_utilities", "pytorch_lightning", "torch")


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # not subscriptable in Python 3.10
    """Writes to what is standard error now: while a bar is up, that is the bar's, which keeps the lines above it."""

    stream: Any = property(lambda self: sys.stderr, lambda self, stream: None)


class _Formatter(logging.Formatter):
    """Formats what this project logs as printable text (names of hosts, reasons of other ranks and so on may hold anything),
    with the rank: a factory of records would be the whole program's.
    """

    rank, host, world_size = 0, "", 1

    def format(self, record: logging.LogRecord) -> str:
        signed = self.rank > 0 or (self.world_size > 1 and record.levelno >= logging.WARNING)
        record.who = f"[rank {self.rank}, {self.host}] " if signed else ""
        text = super().format(record)
        return printable(text) if record.name.startswith("project") else text


def open_log(rank: int, host: str) -> None:
    """Sends the log to standard error, with time and level: all of rank 0's lines, of other ranks only warnings, signed."""
    handler = _Stderr()
    handler.setFormatter(_Formatter(_FORMAT, "%H:%M:%S"))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root = logging.getLogger()
    # The second keeps the first lines until there is a file for them.
    root.handlers[:] = [handler, MemoryHandler(1_000, logging.CRITICAL + 1)]
    root.setLevel(logging.INFO)
    logging.raiseExceptions = False  # a reader that went away (| head) is no reason for tracebacks
    name_speaker(rank, host)
    silence_libraries(rank)


def name_speaker(rank: int, host: str, world_size: int = 1) -> None:
    """Signs this process's lines from now on: all lines of other ranks than 0, and the warnings and errors of rank 0."""
    _Formatter.rank, _Formatter.host, _Formatter.world_size = rank, host, world_size


def silence_libraries(rank: int) -> None:
    """Silences messages of libraries that have no use here: tips, adverts, deprecations, advice that doesn't hold."""
    for name in _NOISY:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)  # its report was asked for
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # that there is no GPU; of each rank that compiles
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, *args, **kwargs: str(message).strip()
    warnings.simplefilter("default" if rank == 0 else "ignore")
    for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    for advice in (
        "does not have many workers",
        "srun. command is available",
        "Unable to serialize instance",
        "Couldn't infer the batch indices",
        "isinstance.treespec, LeafSpec",
        "lr_scheduler.step... before .optimizer.step",
        "OMP_NUM_THREADS",
        "Checkpoint directory .* exists and is not empty",
        "your dataloader is not resumable",  # it is: the order of samples can start anywhere
        "smaller than the logging interval",  # it counts micro-batches, we count steps
    ):
        warnings.filterwarnings("ignore", f"(?s).*{advice}")


def log_to(path: Path, level: int = logging.INFO) -> None:
    """Writes the log to a file, too, including the lines from before there was one."""
    try:
        file = logging.StreamHandler(open_to_append(path))
    except OSError as error:
        log.warning("There is no log file: %s. Training goes on.", error)
        return
    file.setLevel(level)
    file.setFormatter(_Formatter(_FORMAT))
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, MemoryHandler):
            for record in handler.buffer:
                file.handle(record)
    root.addHandler(file)


class RankLogs(Callback):
    """A callback for debugging: it writes the full log of every rank to rank-N.log in the run's folder."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = Path(trainer.strategy.broadcast(trainer.default_root_dir))
        log_to(folder / f"rank-{trainer.global_rank}.log", logging.DEBUG)
        logging.getLogger().setLevel(logging.DEBUG)
        log.debug("%s is rank %d of %d", host(), trainer.global_rank, trainer.world_size)


class Progress(ProgressBar):
    """A bar where there is a terminal, otherwise a line every ten seconds; a line for each validation; a summary."""

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True
        self._bars: Bars | None = None
        self._bar = TaskID(0)
        self._line = self._since = 0.0  # the last line; when training began, or went on after a validation
        self._seen = 0  # samples since then, of this rank
        self._trained = 0  # samples of the whole run, all ranks
        self._training = 0.0  # seconds spent in training, without validation
        self._pace_from: tuple[int, float] | None = None  # the first step of this start, and when it was over

    refresh_rate = 1
    """Steps from one update of the bar to the next, as Lightning's bars have it."""

    @property
    def train_progress_bar(self) -> SimpleNamespace:
        """Returns the progress of a fit, under the names that a tqdm bar has for it."""
        return SimpleNamespace(n=self.trainer.global_step, total=planned_steps(self.trainer))

    @property
    def is_disabled(self) -> bool:
        return not self.is_enabled

    def disable(self) -> None:
        self.is_enabled = False

    def enable(self) -> None:
        self.is_enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log.info(_plan(trainer, pl_module))
        self._pace_from = None
        self._line = self._since = time.monotonic()
        console = Console(stderr=True)
        if trainer.is_global_zero and self.is_enabled and console.is_terminal:
            self._bars = Bars(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(bar_width=30),
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[figures]}", table_column=Column()),  # the only one to wrap, where they are many
                console=console,
                transient=True,
            )
            self._bar = self._bars.add_task("", total=planned_steps(trainer), epoch="", figures="")
            self._bars.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._seen += micro_batch(trainer).size
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        step = trainer.global_step
        if self._pace_from is None:
            self._pace_from = step, time.monotonic()
        if self._bars:
            epoch = f"{trainer.current_epoch + 1}/{trainer.max_epochs}"
            self._bars.update(self._bar, completed=step, epoch=epoch, figures=self._figures(trainer))
        elif time.monotonic() - self._line > _LINE_EVERY:
            log.info("epoch %d  step %d/%s  %s", trainer.current_epoch, step, planned_steps(trainer), self._figures(trainer))
            self._line = time.monotonic()

    def _figures(self, trainer: Trainer) -> str:
        elapsed = time.monotonic() - self._since
        speed = self._seen * data_ranks(trainer).count / elapsed if elapsed else 0.0
        metrics = trainer.progress_bar_metrics
        names = [*(name for name in ("train/loss", "train/acc") if name in metrics), *metrics]
        shown = [f"{name.removeprefix('train/')} {_short(metrics[name])}" for name in dict.fromkeys(names)]
        shown += [f"lr {group['lr']:.2g}" for group in _groups(trainer)[:1]]
        phases = [longest(throughput.phases) for throughput in _measuring(trainer) if throughput.phases]
        return "  ".join([*shown, f"{speed:,.0f} samples/s", *phases, *self._left(trainer)])

    def _left(self, trainer: Trainer) -> list[str]:
        """Returns the time to the end of the whole run, at the pace since this start, with its validations."""
        steps, step = planned_steps(trainer), trainer.global_step
        first, began = self._pace_from or (step, 0.0)
        if steps is None or step <= first:
            return []
        return [f"{timedelta(seconds=round((steps - step) * (time.monotonic() - began) / (step - first)))} left"]

    def _pause(self, trainer: Trainer) -> None:
        """Adds up the time and the samples of training until now: training pauses here."""
        self._training += time.monotonic() - self._since
        self._trained += self._seen * data_ranks(trainer).count
        self._seen = 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._pause(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._since = time.monotonic()
        where = f"epoch {trainer.current_epoch}  step {trainer.global_step}  " if trainer.state.fn == "fit" else ""
        log.info("%s%s", where, _show(trainer, "val"))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log.info(_show(trainer, "test"))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause(trainer)
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bars:
            self._bars.stop()
            self._bars = None

    def summary(self, trainer: Trainer) -> dict[str, str]:
        """Returns the lines that summarize a finished fit, by their titles."""
        lines = {}
        if last := _show(trainer, "val"):
            lines["validation"] = last
        elif learned := _show(trainer, "train", "_epoch"):
            lines["last epoch"] = learned
        if self._training:
            parts = [f"{self._trained / self._training:,.0f} samples/s", f"{trainer.global_step} steps"]
            parts.append(str(timedelta(seconds=round(self._training))))
            parts += [f"{share:.0%} {name}" for throughput in _measuring(trainer) for name, share in throughput.shares.items()]
            lines["training"] = ", ".join(parts)
        for callback in typed(trainer).callbacks:
            if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
                lines["early stop"] = callback.stopping_reason_message.strip()
        return lines


def _measuring(trainer: Trainer) -> list[Throughput]:
    return [callback for callback in typed(trainer).callbacks if isinstance(callback, Throughput)]


@runtime_checkable
class WarmsUp(Protocol):
    """A schedule that says how many steps it takes to the full learning rate."""

    warmup_steps: int


def _plan(trainer: Trainer, module: LightningModule) -> str:
    """Returns the line hosts x processes x micro-batch x accumulation = global batch, and what follows from it."""
    ranks, accumulation = trainer.world_size, trainer.accumulate_grad_batches
    global_batch = typed(trainer).global_batch
    nodes = trainer.num_nodes
    shape = f"{_count(nodes, 'host', 'hosts')} x {_count(ranks // nodes, 'process', 'processes')}"
    if (share := data_ranks(trainer).shared_by) > 1:
        shape += f" ({ranks // nodes // share} x {share} tensor parallel)"
    if global_batch:
        micro_batch = global_batch // (data_ranks(trainer).count * accumulation)
        shape += f" x micro-batch {micro_batch} x accumulation {accumulation} = global batch {global_batch}"
    parts = [shape, *(f"lr {group.get('initial_lr', group['lr']):g}" for group in _groups(trainer)[:1])]
    warmups = [
        config.scheduler.warmup_steps for config in trainer.lr_scheduler_configs if isinstance(config.scheduler, WarmsUp)
    ]
    parts += [f"warm-up {steps} steps" for steps in warmups if steps]
    if trainer.num_training_batches != float("inf"):
        parts.append(f"{trainer.num_training_batches // accumulation} steps an epoch")
    parts.append(f"{sum(p.numel() for p in module.parameters()):,} parameters on {trainer.strategy.root_device.type}")
    return ", ".join(parts)


def _short(value: float | str) -> str:
    """Returns the text of a number that a module logs with prog_bar=True."""
    if isinstance(value, str) or value != value:
        return str(value)
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.01 else f"{value:.2e}"


def _groups(trainer: Trainer) -> list[dict[str, Any]]:
    """Returns the optimisers' groups of parameters; a module without an optimiser gets a mock, which has none."""
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _count(number: int, singular: str, many: str) -> str:
    return f"{number} {singular if number == 1 else many}"


def _show(trainer: Trainer, stage: str, ending: str = "") -> str:
    items = trainer.callback_metrics.items()
    metrics = {name.removesuffix(ending): value for name, value in items if name.startswith(stage) and name.endswith(ending)}
    return "  ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
