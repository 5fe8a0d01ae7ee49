"""ImageClassifier adds loss, metrics, optimiser and schedule to any network that turns images into logits."""

import logging
import re
import warnings
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypedDict, TypeVar, cast, runtime_checkable

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import NotRequired

from project.errors import UserError, listed
from project.model.channels_last import corrupted
from project.model.delayed import DelayedSums
from project.model.fused import fused
from project.model.run import run_of
from project.model.schedule import WarmupCosine
from project.model.start import start_from
from project.model.tally import Note, Tally, add_up, means, note
from project.tracebacks import Folded
from project.typed import callbacks_of, typed

log = logging.getLogger(__name__)

Scaling = Literal["linear", "sqrt", "none"]
Compile = Literal["none", "auto", "default", "reduce-overhead", "max-autotune"]
Given = TypeVar("Given")

_ABOUT_SHAPES = re.compile(r"shape|size|channel|dimension|more than 1 value")
"""Errors of a forward pass in which a network does not fit the images; those of a connection or of a device are others."""
_IN_GRAPHS = ("reduce-overhead", "max-autotune")  # these put the network into CUDA graphs
_WORTH_COMPILING = 900  # seconds of a run


def lr_factor(scaling: Scaling, global_batch: int, reference_batch: int) -> float:
    """Returns the factor of a learning rate that was stated for another global batch."""
    if scaling == "none":
        return 1.0
    ratio = global_batch / reference_batch
    return ratio if scaling == "linear" else ratio**0.5


def refuse_overwritten_gradients(mode: Compile, micro_batches: int, on_gpu: bool) -> None:
    """Refuses CUDA graphs with several micro-batches: each overwrites the gradients of the one before."""
    if mode in _IN_GRAPHS and on_gpu and micro_batches > 1:
        raise UserError(
            f"model.compile={mode} works in CUDA graphs, where the gradients of {micro_batches} micro-batches overwrite "
            "each other: the sum may be wrong, and nobody would see it (pytorch#169545). HINT: model.compile=default, or a "
            "data.batch_size with which trainer.accumulate_grad_batches is 1."
        )


class Labelled(TypedDict):
    """A batch of images with the numbers of their classes, or with shares of these."""

    image: Tensor
    label: Tensor
    sample: Tensor
    file: NotRequired[list[str]]


@runtime_checkable
class Classes(Protocol):
    """Data that know how many classes there are."""

    num_classes: int | None


def _made(name: str, make: Callable[[Given], object], of: Given) -> object:
    """Returns an optimiser or a schedule; an error in its settings becomes a UserError."""
    try:
        return make(of)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (ValueError, TypeError, RuntimeError, ArithmeticError, AssertionError) as error:
        raise UserError(f"model.{name} can't be made: {error}. HINT: --model.{name}.help CLASS lists its arguments.") from error


def _try_step(make: OptimizerCallable, device: torch.device, like: Optimizer) -> None:
    """Takes a step with another optimiser, if it is one of torch's, on a parameter of its own: some refuse dense gradients, or
    the device, only there.
    """
    if device.type != "meta" and type(like).__module__.startswith("torch.optim."):
        parameter = nn.Parameter(torch.zeros(1, 1, device=device))
        parameter.grad = torch.zeros_like(parameter)
        try:
            twin = make([parameter])
        except Exception:  # a function of the user's, which needs more parameters than one
            return
        twin.step(lambda: 0.0)


def _try_schedule(make: Callable[[Optimizer], object], optimizer: Optimizer) -> None:
    """Takes a step with a second schedule, on a copy of the optimiser without parameters: torch's own divide by a
    `step_size` of 0 only there.
    """
    trial = copy(optimizer)
    trial.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    schedule = make(trial)
    if isinstance(schedule, LRScheduler) and type(schedule).__module__ == LRScheduler.__module__:
        with warnings.catch_warnings(action="ignore"):  # that the optimiser has not taken a step
            schedule.step(*[0.0] * isinstance(schedule, ReduceLROnPlateau))  # type: ignore[arg-type]


class ImageClassifier(LightningModule):
    """Trains a network to classify images.

    Args:
        network: the network: `class_path` of a class, or of a function that returns one.
        optimizer: the optimiser; its learning rate applies to a global batch of `lr_reference_batch`. On a GPU SGD, Adam and
            AdamW are fused.
        lr_scheduler: the schedule, stepped at every optimiser step (see `lr_interval`); None keeps the learning rate constant.
        lr_reference_batch: the global batch to which the optimiser's learning rate applies.
        lr_scaling: how the learning rate follows the global batch: 'linear', 'sqrt' or 'none'.
        lr_interval: 'step' or 'epoch': when the schedule moves. WarmupCosine's numbers are optimiser steps in both cases.
        label_smoothing: share of the target that is spread over all classes.
        channels_last: keep convolution weights in NHWC order, which is faster on CPUs and on tensor cores. Off with LBFGS and
            Lightning's ModelPruning.
        compile: 'default', 'reduce-overhead' or 'max-autotune' compiles the network with torch.compile at the first step of a
            fit, which takes half a minute or more; 'auto' is 'default' on a GPU, for runs of a quarter of an hour or longer,
            estimated from their operations at the GPU's peak; 'none' does not compile.
        init_from: a file of initial weights for a fit that does not resume from a checkpoint: a state_dict, a checkpoint
            of this project (whose names begin with 'network.') or of another, or safetensors. What does not fit is listed.
        init_prefix: the prefix of the names in that file that the network's own names lack.
    """

    capturable = True

    def __init__(
        self,
        network: nn.Module,
        optimizer: OptimizerCallable = lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4),
        lr_scheduler: LRSchedulerCallable | None = WarmupCosine,
        lr_reference_batch: int = 64,
        lr_scaling: Scaling = "linear",
        lr_interval: Literal["step", "epoch"] = "step",
        label_smoothing: float = 0.0,
        channels_last: bool = True,
        compile: Compile = "none",
        init_from: Path | None = None,
        init_prefix: str = "",
    ) -> None:
        super().__init__()
        if not isinstance(network, nn.Module):
            raise UserError(
                f"model.network made {_described(network)}, and not a torch.nn.Module. HINT: class_path names a class of "
                "modules, or a function that returns one."
            )
        if any(map(is_lazy, network.parameters())):
            raise UserError("model.network has layers of no shape yet. HINT: state in_features, or call it once in __init__.")
        if lr_reference_batch < 1:
            raise UserError(f"lr_reference_batch is a number of samples, not {lr_reference_batch}.")
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing is a share of the target, from 0 to 1, not {label_smoothing}.")
        self.network, self.channels_last = network, channels_last
        if channels_last:
            nn.Module.to(network, memory_format=torch.channels_last)
        self.init_from, self.init_prefix = init_from, init_prefix
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.lr_reference_batch, self.lr_scaling, self.lr_interval = lr_reference_batch, lr_scaling, lr_interval
        self.loss = partial(F.cross_entropy, label_smoothing=label_smoothing)
        if compile in _IN_GRAPHS:
            self.capturable = False
        self.static_shapes = compile != "max-autotune"  # which takes the kernel that was the fastest this time
        self.epoch_tally, self.eval_tally = Tally(), Tally()
        self._step_notes: list[Note] = []
        self._notes: dict[int, Note] = {}  # of the newest micro-batch of each size
        self._sent: tuple[int, dict[str, float], int, DelayedSums] | None = None
        self._noted_step, self._compile = 0, compile
        self._seen: set[bool] = set()  # modes, training and not, whose first output has been looked at
        self._no_gradient_yet = True

    def setup(self, stage: str) -> None:
        self._seen, self._no_gradient_yet = set(), True
        on_cpu = self.trainer.strategy.root_device.type == "cpu"
        if self.channels_last and on_cpu and (layer := corrupted(self.network)) is not None:
            log.info("model.channels_last is off: this CPU has no AVX-512, and torch writes beyond the memory of %s.", layer)
            self.channels_last = False
            nn.Module.to(self.network, memory_format=torch.contiguous_format)
        if stage == "fit" and not any(parameter.requires_grad for parameter in self.parameters()):
            what = "all its parameters are frozen" if any(True for _ in self.parameters()) else "it has no parameters"
            raise UserError(f"The network can't learn: {what}. HINT: set requires_grad of those that are to be trained.")

    def on_fit_start(self) -> None:
        if self.init_from and not self.trainer.ckpt_path:
            start_from(self.network, self.init_from, self.init_prefix, say=self.trainer.is_global_zero)
        mode = self._compile
        if mode == "auto":
            mode = "default" if run_of(self.trainer).least_seconds > _WORTH_COMPILING else "none"
        if mode != "none":
            # Else kernels become dynamic when a shorter micro-batch comes by, and a start that has seen none rounds otherwise.
            self.network.compile(mode=mode, dynamic=False)

    def on_train_start(self) -> None:
        refuse_overwritten_gradients(self._compile, self.trainer.accumulate_grad_batches, self.device.type == "cuda")
        self._noted_step = self.trainer.global_step
        self._notes, self._step_notes, self._sent = {}, [], None  # another fit may have ended within a step

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Saves the sums of the epoch, so that its means cover all of it also where the run is resumed within."""
        self._log_sent()
        sums = DelayedSums(self.epoch_tally.total(), self.trainer.world_size).read()
        checkpoint["epoch_guesses"] = self.epoch_tally.guesses
        checkpoint["epoch_sums"] = torch.tensor(sums, dtype=self.epoch_tally.sums.dtype) / run_of(self.trainer).shared_by

    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        first = self.trainer.global_rank < run_of(self.trainer).shared_by
        if "epoch_sums" in checkpoint and first:
            self.epoch_tally.sums = cast(Tensor, checkpoint["epoch_sums"]).to(self.epoch_tally.sums.device)
        self.epoch_tally.guesses = cast(int, checkpoint.get("epoch_guesses", self.epoch_tally.guesses))

    def training_step(self, batch: Labelled, batch_idx: int) -> Tensor:
        logits = self._checked(batch)
        loss = self.loss(logits, batch["label"])
        mean, hits = note(logits, batch["label"], loss)
        if len(hits) in self._notes:
            for kept, value in zip(self._notes[len(hits)], (mean, hits), strict=True):
                kept.copy_(value)
        else:
            self._notes[len(hits)] = mean.clone(), hits
        return loss

    def on_after_backward(self) -> None:
        if self._sent is not None and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._log_sent()  # the ranks have met since; a graph can't wait for what was before it
        if self._no_gradient_yet:
            self._no_gradient_yet = False
            self._find_unused()

    def on_train_batch_end(self, outputs: object, batch: Labelled, batch_idx: int) -> None:
        trainer = self.trainer
        step = trainer.global_step
        if outputs and self._notes and (made := self._notes.get(len(batch["label"]))):
            self._step_notes.append((made[0].clone(), made[1].clone()))
        self._log_sent()
        if step == self._noted_step:
            return  # in the middle of a step
        self.__dict__["_noted_step"] = step  # a module looks for parameters in whatever it is given
        notes = [*self._step_notes]
        self._step_notes.clear()
        skipped = run_of(trainer).skipped
        if skipped is True:
            return
        if isinstance(skipped, Tensor):
            self.epoch_tally.sums = self.epoch_tally.sums + add_up(notes).where(~skipped, 0)
        else:
            self.epoch_tally.add(notes)
        if (every := typed(trainer).log_every_n_steps) and step % every == 0:
            lr = trainer.optimizers[0].param_groups[0].get("lr")
            rate = {} if lr is None else {"train/lr": lr}
            self._sent = step, rate, notes[0][1].shape[1], DelayedSums(add_up(notes), trainer.world_size)
            if any(config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs):
                self._log_sent()  # for a schedule that is about to look at it

    def _log_sent(self) -> None:
        """Logs the values sent at the last log point, which have arrived meanwhile."""
        if self._sent is None:
            return
        (step, rate, guesses, sums), self._sent = self._sent, None
        values = self._log("train/{}", means(sums.read(), guesses), step, rate)
        # This is what log_dict(prog_bar=True) comes to, without the half millisecond for each name on the way.
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        self.trainer.progress_bar_metrics.update(values)

    on_validation_start = on_train_end = _log_sent

    def on_train_epoch_end(self) -> None:
        self._log_sent()
        batches = self.trainer.fit_loop.epoch_loop.batch_progress
        if not batches.is_last_batch and batches.current.ready != self.trainer.num_training_batches:
            return  # max_steps ended the run inside an epoch; a longer one continues with it
        values = self._log_tally("train/{}_epoch", self.epoch_tally)
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})

    def validation_step(self, batch: Labelled, batch_idx: int) -> dict[str, Tensor]:
        return {"logits": self._evaluate(batch)}

    def test_step(self, batch: Labelled, batch_idx: int) -> None:
        self._evaluate(batch)

    def _evaluate(self, batch: Labelled) -> Tensor:
        logits = self._checked(batch)
        self.eval_tally.update(logits, batch["label"], F.cross_entropy(logits, batch["label"]))
        return logits

    def on_validation_epoch_end(self) -> None:
        self._finish_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._finish_evaluation("test")

    def _finish_evaluation(self, stage: str) -> None:
        values = self._log_tally(stage + "/{}", self.eval_tally)
        # For checkpoints and progress. The ranks agree already; sync_dist only keeps Lightning from asking for it.
        self.log_dict(values, prog_bar=True, logger=False, sync_dist=True)

    def predict_step(self, batch: Labelled, batch_idx: int) -> dict[str, Tensor | list[str]]:
        logits = self._checked(batch)
        confidence, label = logits.float().softmax(dim=1).max(dim=1)
        files: dict[str, Tensor | list[str]] = {"file": batch["file"]} if "file" in batch else {}
        return {"sample": batch["sample"], "label": label, "confidence": confidence, **files}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        made = cast(Optimizer, _made("optimizer", self.optimizer, self.parameters()))
        _made("optimizer", partial(_try_step, self.optimizer, self.device), made)
        optimizer = fused(made)
        if self.channels_last and (
            callbacks_of(self.trainer, ModelPruning) or isinstance(optimizer, LBFGS)
        ):  # which look at weights as one row: `view(-1)`
            nn.Module.to(self.network, memory_format=torch.contiguous_format)
        global_batch = run_of(self.trainer).global_batch or self.lr_reference_batch
        factor = lr_factor(self.lr_scaling, global_batch, self.lr_reference_batch)
        for group in optimizer.param_groups:
            if group.get("lr") is not None:  # Adafactor finds its own
                group["lr"] *= factor
        if self.lr_scheduler is None:
            return optimizer
        _made("lr_scheduler", partial(_try_schedule, self.lr_scheduler), optimizer)
        scheduler = _made("lr_scheduler", self.lr_scheduler, optimizer)
        if not isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
            raise UserError(
                f"model.lr_scheduler made {_described(scheduler)}, and not a torch.optim.lr_scheduler.LRScheduler. HINT: a "
                "function gets the optimiser and returns its schedule."
            )
        if isinstance(scheduler, WarmupCosine) and scheduler.total_steps is None:
            steps = self.trainer.estimated_stepping_batches
            if not 0 <= steps < float("inf"):
                raise UserError(
                    "The learning rate of WarmupCosine ends with the run, and nothing says when that is. HINT: set "
                    "trainer.max_steps, trainer.max_epochs, or model.lr_scheduler.init_args.total_steps."
                )
            scheduler.total_steps = int(steps)
        if isinstance(scheduler, WarmupCosine) and self.lr_interval == "epoch":
            scheduler.steps_per_move = self._steps_per_epoch()
        config: LRSchedulerConfigType = {"scheduler": scheduler, "interval": self.lr_interval}
        if isinstance(scheduler, ReduceLROnPlateau):
            config["monitor"] = scheduler.monitor
        return {"optimizer": optimizer, "lr_scheduler": config}

    def _steps_per_epoch(self) -> int:
        """Returns the optimiser steps of an epoch; raises a UserError where the loader doesn't know its length."""
        trainer = self.trainer
        batches = trainer.fit_loop.max_batches if trainer.estimated_stepping_batches else 0  # which has made the loaders
        if batches == float("inf"):
            raise UserError(
                "WarmupCosine counts in optimiser steps, and with model.lr_interval=epoch nothing says how many an epoch has. "
                "HINT: model.lr_interval=step."
            )
        return -(-int(batches) // trainer.accumulate_grad_batches)

    def _log_tally(self, tag: str, tally: Tally) -> dict[str, float]:
        """Logs the means over all ranks, and resets them. The host waits for the device here, once an epoch."""
        sums = DelayedSums(tally.total(), self.trainer.world_size).read()
        tally.reset()
        return self._log(tag, means(sums, tally.guesses), self.trainer.global_step)

    def _log(self, tag: str, values: dict[str, float], step: int, more: dict[str, float] | None = None) -> dict[str, float]:
        named = {tag.format(name): value for name, value in values.items()}
        for logger in () if self.trainer.sanity_checking else self.loggers:
            logger.log_metrics({**named, **(more or {})}, step=step)
        return named

    def _checked(self, batch: Labelled) -> Tensor:
        """Returns the logits. The first are checked in training, and in evaluation, where a network may return another kind."""
        if self.training in self._seen:
            return cast(Tensor, self(batch["image"]))
        try:
            logits: Tensor = self(batch["image"])
        except (RuntimeError, ValueError) as error:
            if type(error) not in (RuntimeError, ValueError) or not _ABOUT_SHAPES.search(str(error)):
                raise
            where = f" ({place})" if (place := Folded(error).where) else ""
            raise UserError(
                f"The network can't take the first micro-batch, {_described(batch['image'])}: {error}{where}. HINT: "
                "model.network has to fit the images of data.source: their channels, height and width."
            ) from error
        self._seen.add(self.training)
        self._check(logits, None if self.trainer.predicting else batch["label"])
        return logits

    def _check(self, output: object, labels: Tensor | None = None) -> None:
        if not isinstance(output, Tensor):
            raise UserError(
                f"The network's output is {_described(output)}, and not one tensor of logits (images, classes). HINT: put it "
                "into a module whose forward returns them; torchvision's networks with a second head have aux_logits=false."
            )
        data: object = None if self.trainer.predicting else typed(self.trainer).datamodule  # a prediction has no labels
        known = wanted = data.num_classes if isinstance(data, Classes) else None
        if known is None and labels is not None and labels.ndim == 1:
            wanted = int(labels.max()) + 1  # at least
        if output.ndim != 2 or (wanted is not None and output.shape[1] < wanted):
            has = "" if wanted is None else f", and the data has {wanted} classes"
            fix = "return logits (images, classes)" if output.ndim != 2 else f"set model.network.init_args.num_classes={wanted}"
            raise UserError(f"The network's output has shape {tuple(output.shape)}{has}. HINT: {fix}.")
        if known is not None and output.shape[1] > known and self.trainer.is_global_zero and len(self._seen) == 1:
            log.warning(
                "The network has %d outputs, and the data has %d classes. HINT: set model.network.init_args.num_classes=%d.",
                *(output.shape[1], known, known),
            )

    def _find_unused(self) -> None:
        """Refuses unused parameters after the first gradient: DistributedDataParallel reports them a step too late."""
        wrapped = self.trainer.strategy.model
        if not isinstance(wrapped, DistributedDataParallel) or wrapped.find_unused_parameters or wrapped.static_graph:
            return
        unused = [name for name, parameter in self.named_parameters() if parameter.requires_grad and parameter.grad is None]
        if unused:
            raise UserError(
                f"{len(unused)} parameters of the network have no part in the loss: {listed(unused)}. The ranks "
                "can't average what is not there. HINT: take them out or freeze them (requires_grad=False), or set "
                "trainer.strategy=ddp_find_unused_parameters_true, which costs some time."
            )


def _described(value: object) -> str:
    """Returns a short description of what a network or a function returned."""
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(str, list(value)[:8]))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(_described(part) for part in value[:4])})"
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
