"""The dashboard: TensorBoard shows, beside the curves that a module logs, the run's configuration, versions, hosts, settings as
hparams (so that runs can be compared by them), the gradient's norm, where it was started again and on how many ranks, and a
page that puts the curves in order (Custom Scalars).
"""

import logging
import sys
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer
from torch.utils.tensorboard.summary import hparams

from project.cluster.settings import flat
from project.errors import UserError
from project.masking import masked_text
from project.sharded.strategy import is_sharded
from project.step.epoch_loop import add_callback
from project.step.gradients import gradient_norm
from project.step.measurements import measurement_loggers
from project.step.optimizers import is_fused
from project.tracebacks import title
from project.typed import callbacks_of, typed
from project.untrusted import dump_yaml
from project.watch.charts import HEALTH, OF_RANKS, SPEED
from project.watch.curves import board_tag
from project.watch.events import Events, boards
from project.watch.history import BESIDE, FILE, lives_of, of_the_module
from project.watch.pictures import FirstBatch, seen
from project.watch.steady import Steady

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

log = logging.getLogger(__name__)

_LONGEST = 300  # characters of somebody's error
_METRICS = 8
_OUTCOME = board_tag("run/outcome")

_LAYOUT: dict[str, dict[str, list[str]]] = {
    "Is it learning?": {
        "loss": [".*loss"],
        "accuracy": [".*(acc|accuracy)(_step|_epoch)?$"],
        "accuracy, top 5": [".*(acc|top)_?5"],
        "learning rate": ["(.*/)?lr"],
        "norm of the gradient": ["train/grad_norm"],
    },
    "Is it fast?": {title: [*map(board_tag, tags)] for title, tags in SPEED.items()},
    "Is it healthy?": {
        **{title: [f"{board_tag(start)}.*"] for start, title in OF_RANKS.items()},
        **{title: [*map(board_tag, tags)] for title, tags in HEALTH.items()},
        "ranks; each point is a start": [board_tag("run/ranks")],
        "starts": [board_tag("run/starts")],
        "how it ended: 1 finished, 0 in training or stopped, -1 failed": [_OUTCOME],
    },
}
"""The charts, with regular expressions that match the names of curves from their beginning."""


class Dashboard(Callback):
    """Writes the dashboard to every TensorBoard logger, and the configuration to the others.

    Args:
        histograms: steps between two histograms of each parameter and its gradient; each one waits for the device.
        graph: draw the network's graph from the first micro-batch of a run; `forward` must accept the batch's first part.
    """

    def __init__(self, histograms: int | None = None, graph: bool = False) -> None:
        if histograms is not None and histograms < 1:
            raise UserError(f"dashboard.histograms is a number of steps, not {histograms}.")
        self.histograms, self.graph = histograms, graph
        self._step = self._every = 0
        self._draws = False
        self._described, self._declared, self._open = True, False, False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        whole = isinstance(trainer.strategy, (DDPStrategy, SingleDeviceStrategy))  # each rank has all of the gradient
        # At its end this one goes through an epoch without a backward pass: what gradients there are, are old.
        renews = bool(callbacks_of(trainer, StochasticWeightAveraging))
        shown = trainer.is_global_zero or is_sharded(trainer)  # where it is spread, all ranks look together
        looks = whole and measurement_loggers(trainer) and shown and len(trainer.optimizers) == 1 and not renews
        # A fused optimiser takes the loss scale off within its step, where the module steps by itself.
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None and not pl_module.automatic_optimization
        looks = looks and not (scaled and is_fused(trainer.optimizers[0]))
        self._step, self._every = trainer.global_step, typed(trainer).log_every_n_steps if looks else 0
        if not trainer.is_global_zero:
            return
        self._described = False
        self._draws = bool(self.histograms and looks and boards(trainer) and not is_sharded(trainer))
        if self.histograms and not self._draws:
            log.warning("No histograms: they need TensorBoard, one optimiser, and a strategy that keeps all on each rank.")
        if self.graph and not boards(trainer):
            log.warning("No graph: it needs TensorBoard.")
        elif self.graph and not trainer.global_step:
            add_callback(trainer, FirstBatch(_draw_graph))
        configuration = typed(trainer).configuration
        # Loggers change no training, and an address may hold a password.
        settings = {name: value for name, value in configuration.get("trainer", {}).items() if name != "logger"}
        for logger in trainer.loggers:
            if isinstance(logger, Steady):
                logger.log_hyperparams({**configuration, "trainer": settings})

    def _describe(self, trainer: Trainer, board: Events) -> None:
        step, configuration = trainer.global_step, typed(trainer).configuration
        writer = board.experiment
        starts = lives_of(Path(trainer.default_root_dir) / FILE)
        layout = {page: {title: ["Multiline", tags] for title, tags in charts.items()} for page, charts in _LAYOUT.items()}
        writer.add_custom_scalars(layout)
        writer.add_scalar(_OUTCOME, 0, step)
        writer.add_scalar(board_tag("run/ranks"), trainer.world_size, step)
        if starts:
            writer.add_scalar(board_tag("run/starts"), len(starts), step)
            known = {"step": starts[-1].step, "ranks": starts[-1].ranks, **starts[-1].known}
            writer.add_text("run", _as_code(dump_yaml(known)), step)
        if configuration:
            writer.add_text("configuration", _as_code(dump_yaml(configuration)), step)
            _, session, _ = hparams(_settings(configuration), {})
            board.add_summary(session, step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._declare(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._declare(trainer)
        self._end(trainer, 1, "finished")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._open:  # else it failed in its first step
            stopped = isinstance(exception, (KeyboardInterrupt, SystemExit))
            why = masked_text(title(exception))[:_LONGEST]
            self._end(trainer, 0 if stopped else -1, "stopped" if stopped else f"failed: {why}")

    def _end(self, trainer: Trainer, outcome: int, text: str) -> None:
        """Shows how a run ended as a curve and a text: in HParams, TensorBoard keeps the first status of a run for ever."""
        self._open = False
        for board in boards(trainer):
            board.experiment.add_scalar(_OUTCOME, outcome, trainer.global_step)
            board.experiment.add_text("run", _as_code(text), trainer.global_step)

    def _declare(self, trainer: Trainer) -> None:
        """Tells TensorBoard which metrics its HParams compare runs by: those of the first validation, else of the training."""
        if self._declared or not trainer.is_global_zero or not typed(trainer).configuration:
            return
        tags = [tag for tag in trainer.callback_metrics if of_the_module(tag) and not tag.endswith("_step")]
        if validated := [tag for tag in tags if not tag.startswith("train")]:
            tags = sorted(validated, key=lambda tag: "acc" not in tag)
        declared, _, _ = hparams(_settings(typed(trainer).configuration), dict.fromkeys([*tags[:_METRICS], _OUTCOME], 0))
        _put_first(declared, {given.lstrip("-").partition("=")[0].replace(".init_args", "") for given in sys.argv[1:]})
        for board in boards(trainer):
            board.add_summary(declared, trainer.global_step)
        self._declared = True

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """The gradient is the mean over the ranks here, is not scaled any more, and not yet clipped."""
        if not self._described:  # now, and not before: a run that fails in its first step is not in the dashboard
            self._described = self._open = True
            for board in boards(trainer):
                self._describe(trainer, board)
        if trainer.global_step >= self._step:  # an optimiser that asks for the loss again comes by more than once
            self._look(trainer, pl_module, optimizer, trainer.global_step + 1)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step > self._step:  # it was taken as a whole, and has left its gradient
            self._look(trainer, pl_module, trainer.optimizers[0], trainer.global_step)

    def _look(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer, step: int) -> None:
        self._step = step
        if self._draws and self.histograms and not step % self.histograms:
            self._draw(trainer, module)
        if not self._every or step % self._every:
            return
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        if not parameters:  # the step is left out
            return
        # The host waits for the device here, as it does to log the loss of this step.
        norm = gradient_norm(trainer, parameters)
        for logger in measurement_loggers(trainer):
            logger.log_metrics({"train/grad_norm": norm}, step=step)  # as the loss of this step

    def _draw(self, trainer: Trainer, module: LightningModule) -> None:
        tensors = {f"weights/{name}": parameter.detach() for name, parameter in module.named_parameters()}
        gradients = {f"gradients/{name}": parameter.grad for name, parameter in module.named_parameters()}
        for name, values in {**tensors, **gradients}.items():
            if values is not None and values.isfinite().all():  # TensorBoard's writer can't count others
                for board in boards(trainer):
                    board.experiment.add_histogram(name, values, self._step)


def _draw_graph(trainer: Trainer, module: LightningModule, batch: object) -> None:
    images = seen(batch)
    first = images[0] if images is not None else batch
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    training = [part for part in module.modules() if part.training]
    try:
        module.eval()  # a pass in training would move the statistics of batch norm
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            for board in boards(trainer):
                board.experiment.add_graph(module, first)
    except Exception as error:  # whatever tracing somebody's forward raises
        log.warning("The network's graph can't be drawn: %s", " ".join(str(error).split())[:_LONGEST])
    finally:
        for part in training:
            part.training = True


def _settings(configuration: Mapping[str, object]) -> dict[str, str | float]:
    """Returns the settings that have a value, by names for people: of a class its own, and its arguments right under it."""
    beside = {*BESIDE, "checkpoints", "watchdog", "recover", "profile", "dashboard", "notify", "metrics"}
    known = {name: value for name, value in flat(configuration).items() if name.partition(".")[0] not in beside}
    named: dict[str, str | float] = {}
    for name, value in known.items():
        if name.endswith(".class_path"):
            named[name.removesuffix(".class_path").replace(".init_args", "")] = str(value).rpartition(".")[2]
        elif value is not None:
            named[name.replace(".init_args", "")] = (
                value if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
            )
    return named


def _put_first(declared: "Summary", names: Collection[str]) -> None:
    """Marks settings as those in which runs differ: HParams opens with five columns, of these, or else of the first by name."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    data = declared.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(data.content)
    for info in content.experiment.hparam_infos:
        info.differs = info.name in names
    data.content = content.SerializeToString()


def _as_code(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
