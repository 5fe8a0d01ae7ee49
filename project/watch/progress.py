"""The progress of a fit: a bar on a terminal, plain lines elsewhere, a line for each validation, and a summary at the end."""

import logging
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ProgressBar
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column
from torch import Tensor

from project.step.data_ranks import data_ranks
from project.step.monitored import Judging, Monitoring, is_better, monitored_metrics
from project.step.optimizers import learning_rates
from project.step.position import counts, planned_steps, timers
from project.step.state import ends_step, micro_batch
from project.typed import callbacks_of, typed
from project.watch.fields import GAP, Field, Importance, fitted
from project.watch.history import longest
from project.watch.throughput import Throughput

log = logging.getLogger(__name__)

_LINE_EVERY = 10.0  # seconds between plain lines, once training is under way
_DRAWN_EVERY = 0.1  # seconds between two texts of the bar, which is drawn as often
_BAR = 24  # columns of the bar itself
_FIRST = ("train/loss", "loss", "train_loss", "train/acc")  # of the metrics that a line shows; the others as they come


class Progress(ProgressBar):
    """A bar where there is a terminal, otherwise a line every ten seconds; a line for each validation; a summary."""

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True
        self._bars: Bars | None = None
        self._bar = TaskID(0)
        self._line = self._since = 0.0  # the last line or bar; when training began, or went on after a validation
        self._seen = self._of_step = 0  # samples since then, of all ranks; those of this rank in the step at hand
        self._first_step = 0  # of this start
        self._trained = 0  # samples of this start, all ranks
        self._training = 0.0  # seconds of it spent in training, without validation
        self._pace_from: tuple[int, float] | None = None  # the first step of this start, and when it was over
        self._order: dict[str, None] = {}  # of the metrics: as they came first
        self._before: dict[str, object] = {}  # metrics, when an evaluation began
        self._evaluated: dict[str, float] = {}  # metrics of the last evaluation
        self._monitored: dict[str, float] = {}
        self._best: dict[str, float] = {}

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
        self._pace_from, self._first_step = None, trainer.global_step
        self._seen, self._of_step, self._trained, self._training = 0, 0, 0, 0.0
        self._line = self._since = time.monotonic()
        # Lines above the bar are as long as they are: the terminal breaks them, and tables stay tables.
        console = Console(stderr=True, soft_wrap=True)
        if trainer.is_global_zero and self.is_enabled and console.is_terminal:
            self._bars = Bars(*_columns(bar=False), console=console, transient=True)
            self._bar = self._bars.add_task("", total=planned_steps(trainer), head="", figures="")
            self._bars.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._of_step += micro_batch(trainer).size
        if not ends_step(trainer):
            return
        # A short step falls into unequal parts: this rank's does not tell the others'.
        self._seen += micro_batch(trainer).step_size or self._of_step * data_ranks(trainer).count
        self._of_step = 0
        now, step = time.monotonic(), trainer.global_step
        if self._pace_from is None:
            self._pace_from = step, now
        if self._bars:
            if now - self._line > _DRAWN_EVERY:
                self._draw(trainer, self._bars)
                self._line = now
        elif now - self._line > _LINE_EVERY:
            figures = GAP.join(field.text for field in self._fields(trainer))
            log.info("%s  step %s  %s", _epoch(trainer), _counted(trainer), figures)
            self._line = now

    def _draw(self, trainer: Trainer, bars: Bars) -> None:
        """Updates the bar with the fields that fit into the terminal's current width."""
        head = [Field(Importance.EPOCH, _epoch(trainer)), Field(Importance.PROGRESS, f"step {_counted(trainer)}")]
        place = Field(Importance.BAR, "\ue000" * _BAR)  # which no other field has
        text = fitted([*head, place, *self._fields(trainer)], bars.console.width - len(GAP))  # rich pads its columns
        before, bar, after = text.partition(place.text)
        bars.columns = _columns(bar=bool(bar))
        bars.update(self._bar, completed=trainer.global_step, head=before.strip(), figures=after.strip())

    def _fields(self, trainer: Trainer) -> list[Field]:
        """Returns what a line shows of training: the metrics, those that are monitored, and how fast it is. A metric of the
        last validation, or of the last epoch's end, is marked as such.
        """
        metrics: dict[str, float | str] = {**trainer.progress_bar_metrics}
        fresh = typed(trainer).logged.names_of_step() or metrics.keys() - self._evaluated.keys()
        self._order |= dict.fromkeys(name for name in [*_FIRST, *trainer.callback_metrics, *metrics] if name in metrics)
        shown = [
            Field(Importance.METRIC, f"{'' if name in fresh else 'last '}{name.removeprefix('train/')} {_short(metrics[name])}")
            for name in self._order
            if name in metrics
        ]
        fields = [Field(Importance.FIRST_METRIC, shown[0].text), *shown[1:]] if shown else []
        monitored = [(name, value) for name, value in self._monitored.items() if name not in metrics]
        fields += [Field(Importance.MONITORED, f"last {name} {_short(value)}") for name, value in monitored]
        fields += [Field(Importance.BEST, f"best {name} {_short(value)}") for name, value in self._best.items()]
        fields += [Field(Importance.RATE, f"lr {rate:.2g}") for rate in learning_rates(trainer)[:1]]
        if speed := self._speed(trainer):
            fields.append(Field(Importance.SPEED, f"{speed:,.0f} samples/s"))
        phases = [longest(throughput.phases) for throughput in callbacks_of(trainer, Throughput) if throughput.phases]
        fields += [Field(Importance.PHASE, phase) for phase in phases]
        return fields + [Field(Importance.PROGRESS, text) for text in self._left(trainer)]

    def _speed(self, trainer: Trainer) -> float | None:
        """Returns the run's speed, the median of its windows; of a start that has none yet, its samples by its time."""
        seconds = self._training + time.monotonic() - self._since if self._seen else self._training
        samples = self._trained + self._seen
        return _median_speed(trainer) or (samples / seconds if seconds else None)

    def _left(self, trainer: Trainer) -> list[str]:
        """Returns the time to the end of the whole run, at the pace since this start, with its validations; at most what
        trainer.max_time or a Timer leaves.
        """
        steps, step = planned_steps(trainer), trainer.global_step
        first, began = self._pace_from or (step, 0.0)
        if steps is None or step <= first:
            return []
        seconds = (steps - step) * (time.monotonic() - began) / (step - first)
        limits = [left for timer in timers(trainer) if (left := timer.time_remaining()) is not None]
        return [f"{timedelta(seconds=round(max(0.0, min([seconds, *limits]))))} left"]

    def _pause(self) -> None:
        """Adds up the time and the samples of training until now: training pauses here."""
        self._training += time.monotonic() - self._since
        self._trained += self._seen
        self._seen = 0

    # Evaluations -----------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._pause()
        self._before = {**trainer.callback_metrics}

    on_test_start = on_validation_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._since = time.monotonic()
        # A metric that was logged is another tensor than the one before.
        metrics = {name: value for name, value in trainer.callback_metrics.items() if value is not self._before.get(name)}
        self._evaluated = {name: float(value) for name, value in metrics.items()}
        self._before = {}
        where = f"{_epoch(trainer)}  step {trainer.global_step}  " if trainer.state.fn == "fit" else ""
        self._judge(trainer)
        log.info("%s%s", where, _show(self._evaluated | ({} if where == "" else self._titled_best())))

    on_test_end = on_validation_end

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        validated = {None, "auto", *self._evaluated}
        if any(isinstance(callback, Monitoring) and callback.monitor not in validated for callback in typed(trainer).callbacks):
            self._judge(trainer)

    def _judge(self, trainer: Trainer) -> None:
        """Notes the monitored metrics, and the best of each so far, in earlier starts, too. The host waits for the device."""
        known, callbacks = trainer.callback_metrics, typed(trainer).callbacks
        for name, mode in monitored_metrics(callbacks, known).items() if trainer.state.fn == "fit" else ():
            self._monitored[name] = float(known[name])
            judges = [callback for callback in callbacks if isinstance(callback, Judging)]
            scores = [judge.best_model_score for judge in judges if name in monitored_metrics([judge], known)]
            for score in [self._monitored[name], *(float(score) for score in scores if isinstance(score, Tensor))]:
                if is_better(score, self._best.get(name), mode):
                    self._best[name] = score

    def _titled_best(self) -> dict[str, float]:
        return {f"best {name}": value for name, value in self._best.items()}

    # The end ---------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause()
        if self._bars:
            self._draw(trainer, self._bars)
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
        names = trainer.callback_metrics
        learned = {name.removesuffix("_epoch"): float(names[name]) for name in names if not name.endswith("_step")}
        if self._evaluated:
            lines["validation"] = _show(self._evaluated | self._titled_best())
        elif learned:
            lines["last epoch"] = _show(learned)
        if self._training:
            steps, seconds = _count(trainer.global_step - self._first_step, "step", "steps"), self._training
            parts = [f"{steps}, {self._trained:,} samples in {_span(seconds)}: {self._trained / seconds:,.0f} samples/s"]
            if median_speed := _median_speed(trainer):
                parts[0] += f" (median window {median_speed:,.0f})"
            parts += [
                f"{share:.0%} {name}"
                for throughput in callbacks_of(trainer, Throughput)
                for name, share in throughput.shares.items()
            ]
            lines["training"] = ", ".join(parts)
        for stopping in callbacks_of(trainer, EarlyStopping):
            if stopping.stopping_reason_message:
                lines["early stop"] = stopping.stopping_reason_message.strip()
        return lines


def _epoch(trainer: Trainer) -> str:
    """Returns the epoch at hand or, at the end, the last one, counted from 1 as on all screens, and of how many it is."""
    number, most = max(1, counts(trainer.fit_loop.epoch_progress.current).ready), trainer.max_epochs or -1
    return f"epoch {number}/{most}" if most > 0 else f"epoch {number}"


def _counted(trainer: Trainer) -> str:
    """Returns the steps that are done and, where it is known, of how many."""
    steps = planned_steps(trainer)
    return f"{trainer.global_step}" if steps is None else f"{trainer.global_step}/{steps}"


def _median_speed(trainer: Trainer) -> float | None:
    """Returns the median of the windows of this start, in samples a second of all ranks; None where none is over."""
    return next((throughput.speed for throughput in callbacks_of(trainer, Throughput)), None)


def _span(seconds: float) -> str:
    """Returns the text of a time with three digits at least, as a reader may divide by it."""
    return f"{seconds:.3g} s" if seconds < 100 else str(timedelta(seconds=round(seconds)))


def _columns(bar: bool) -> tuple[ProgressColumn, ...]:
    """Returns the columns of a line; they hold text that fits."""
    head, figures = (
        TextColumn(f"{{task.fields[{name}]}}", markup=False, table_column=Column(no_wrap=True)) for name in ("head", "figures")
    )
    return (head, BarColumn(bar_width=_BAR), figures) if bar else (head, figures)


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
    rates = learning_rates(trainer, "initial_lr") or learning_rates(trainer)
    parts = [shape, *(f"lr {rate:g}" for rate in rates[:1])]
    warmups = [
        config.scheduler.warmup_steps for config in trainer.lr_scheduler_configs if isinstance(config.scheduler, WarmsUp)
    ]
    parts += [f"warm-up {steps} steps" for steps in warmups if steps and isinstance(steps, int)]  # timm's are increments
    if trainer.num_training_batches != float("inf"):
        parts.append(f"{-(-trainer.num_training_batches // accumulation)} steps an epoch")
    parts.append(f"{sum(p.numel() for p in module.parameters()):,} parameters on {trainer.strategy.root_device.type}")
    return ", ".join(parts)


def _short(value: float | str) -> str:
    """Returns the text of a number that a module logs with prog_bar=True."""
    if isinstance(value, str) or value != value:
        return str(value)
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.01 else f"{value:.2e}"


def _count(number: int, singular: str, many: str) -> str:
    return f"{number} {singular if number == 1 else many}"


def _show(metrics: dict[str, float]) -> str:
    return GAP.join(
        f"{name} {value:.4f}" if not 0 < abs(value) < 0.001 else f"{name} {value:.3g}" for name, value in metrics.items()
    )
