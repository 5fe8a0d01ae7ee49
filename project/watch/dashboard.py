"""What TensorBoard shows beside the curves that a module logs: the run's configuration, versions and hosts, its settings as
hparams (so that runs can be compared by them), the gradient's norm, where it was started again and on how many ranks, and a
page that puts the curves in order (Custom Scalars).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.optim import Optimizer
from torch.utils.tensorboard.summary import hparams

from project.cluster.settings import flat
from project.watch.events import Events
from project.watch.history import BESIDE, FILE, PHASES, lives_of
from project.watch.steady import Steady

_LAYOUT = {
    "Is it learning?": {
        "loss": ["Multiline", [".*loss"]],
        "accuracy": ["Multiline", [".*acc"]],
        "learning rate": ["Multiline", ["(.*/)?lr"]],
        "norm of the gradient": ["Multiline", ["train/grad_norm"]],
    },
    "Is it fast?": {
        "samples a second, all ranks": ["Multiline", ["speed/samples_per_s"]],
        "shares of a step": ["Multiline", [f"speed/{name}" for name in PHASES]],
        "TFLOP/s of a rank, and its share of the peak": ["Multiline", ["speed/(tflops|mfu)"]],
    },
    "Is it healthy?": {
        "the slowest rank against the usual one": ["Multiline", ["speed/worst_data", "speed/worst_compute"]],
        "ms a step that a rank waits for its data": ["Multiline", ["ranks/data_ms/.*"]],
        "ms a step that a rank computes": ["Multiline", ["ranks/compute_ms/.*"]],
        "steps left out": ["Multiline", ["train/(fp16_)?skipped_steps"]],
        "memory of the largest rank, GB": ["Multiline", ["run/(gpu_)?memory_gb"]],
        "busy cores of a rank, and share of the GPU's time": ["Multiline", ["run/(cpu_cores|gpu_use)"]],
        "seconds that a checkpoint takes": ["Multiline", ["run/checkpoint_s"]],
        "MB of a checkpoint": ["Multiline", ["run/checkpoint_mb"]],
        "ranks; each point is a start": ["Multiline", ["run/ranks"]],
        "starts": ["Multiline", ["run/starts"]],
    },
}
"""Regular expressions that match the names of curves from their beginning."""


class Dashboard(Callback):
    """Writes it for every logger that is TensorBoard's, and tells the others the configuration."""

    def __init__(self) -> None:
        self._step = self._every = 0
        self._described = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        whole = isinstance(trainer.strategy, (DDPStrategy, SingleDeviceStrategy))  # each rank has all of the gradient
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # At its end this one goes through an epoch without a backward pass: what gradients there are, are old.
        renews = any(isinstance(one, StochasticWeightAveraging) for one in callbacks)
        looks = whole and trainer.loggers and trainer.is_global_zero and len(trainer.optimizers) == 1 and not renews
        self._step, self._every = trainer.global_step, trainer.log_every_n_steps if looks else 0  # type: ignore[attr-defined]
        self._described = False
        for logger in trainer.loggers:
            if isinstance(logger, Steady):
                logger.log_hyperparams(_without_loggers(trainer.configuration))  # type: ignore[attr-defined]

    def _describe(self, trainer: Trainer, writer: Any) -> None:
        step, configuration = trainer.global_step, trainer.configuration  # type: ignore[attr-defined]
        starts = lives_of(Path(trainer.default_root_dir) / FILE)
        writer.add_scalar("run/ranks", trainer.world_size, step)
        writer.add_custom_scalars(_LAYOUT)
        if starts:
            writer.add_scalar("run/starts", len(starts), step)
            known = {"step": starts[-1].step, "ranks": starts[-1].ranks, **starts[-1].known}
            writer.add_text("run", _as_code(yaml.safe_dump(known, sort_keys=False)), step)
        if configuration:
            writer.add_text("configuration", _as_code(yaml.safe_dump(configuration, sort_keys=False)), step)
            # Without a list of metrics all curves can be chosen as such.
            _, session, _ = hparams(_settings(configuration), {})  # type: ignore[no-untyped-call]
            writer.file_writer.add_summary(session, step)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """The gradient is the mean over the ranks here, is not scaled any more, and not yet clipped."""
        self._step += 1
        if not self._described:  # now, and not before: a run that fails in its first step is not in the dashboard
            self._described = True
            for logger in trainer.loggers:
                if isinstance(logger, Events):
                    logger.write(lambda writer: self._describe(trainer, writer))
        if not self._every or self._step % self._every:
            return
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        if not gradients:  # the step is left out
            return
        # The host waits for the device here, as it does to log the loss of this step.
        norm = float(torch.nn.utils.get_total_norm(gradients))
        for logger in trainer.loggers:
            logger.log_metrics({"train/grad_norm": norm}, step=trainer.global_step + 1)  # as the loss of this step


def _settings(configuration: Mapping[str, Any]) -> dict[str, str | float | bool]:
    """Those that have a value, by their dotted names."""
    beside = {*BESIDE, "checkpoints", "watchdog"}
    known = {name: value for name, value in flat(configuration).items() if name.partition(".")[0] not in beside}
    return {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in known.items()
        if value is not None
    }


def _without_loggers(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Where they log to is nothing that a run learns from, and an address may hold a password."""
    trainer = {name: value for name, value in configuration.get("trainer", {}).items() if name != "logger"}
    return {**configuration, "trainer": trainer}


def _as_code(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
