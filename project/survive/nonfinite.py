"""Handles a loss or a gradient that is not finite: found in the step that made it, named, and never part of the weights.

A loss that is not finite spoils its own gradient, and DDP's all-reduce takes that to all ranks: so one look at the gradient,
which every rank takes by itself, gives all of them the same answer, and they act together without a message. They exchange what
the fault was afterwards. On a CPU the optimiser's step is not taken; on a GPU, where looking would make the host wait, the flag
is read two steps later, the device skips the step by itself if it may, and no checkpoint is saved before the flag is known.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from project.checkpoints.callback import checkpoints_of
from project.checkpoints.reading import checkpoints_in
from project.cluster.place import host
from project.errors import NonFiniteError
from project.sharded.shards import any_rank, local, max_over_ranks
from project.sharded.strategy import is_sharded
from project.step.data_ranks import data_ranks
from project.step.finite import not_finite
from project.step.measurements import measurement_loggers
from project.step.micro_batch import MicroBatch
from project.step.optimizers import give_zero_momentum, is_fused
from project.step.state import ends_step, micro_batch, step_state
from project.tensors import apply_to_tensors
from project.typed import typed

log = logging.getLogger(__name__)

Act = Literal["stop", "skip"]
_LATER = 2  # steps: then the device has the flag ready, and the host is never further ahead of it
_IN_A_ROW = 20  # steps skipped one after the other: what they have in common is not a sample
_SHOWN = 64  # samples of a micro-batch


@dataclass
class CheckedStep:
    """Records a step until its flag is known. `number` counts as the log does: 1 for the first step."""

    number: int
    epoch: int
    losses: list[tuple[MicroBatch, Tensor, list[int]]] = field(default_factory=list)
    """Of each micro-batch: its loss, and the samples whose inputs are not finite."""
    late: bool = False
    """Whether the host reads the flag some steps later, when the device has computed it."""
    flag: Tensor | None = None
    ready: torch.cuda.Event | None = None


class NonFinite(Callback):
    """Stops the run before a step that is not finite, or leaves that step out.

    A step that is left out counts as a step: its samples are passed, the schedule moves on. Weights, the optimiser's state,
    batch norm's statistics and the epoch's means are what they were before it.

    Args:
        act: 'stop' or 'skip'.
    """

    capturable = True

    def __init__(self, act: Act = "stop") -> None:
        self.act = act
        self.skipped = self.scaled = 0
        self._faults_in_a_row = 0
        self._step = CheckedStep(0, 0)
        self._unread: deque[CheckedStep] = deque()
        self._unit, self._flag, self._skips = torch.ones(()), torch.zeros(()), torch.zeros((), dtype=torch.bool)
        self._late = False
        self._batch: object = None
        self._stream: torch.cuda.Stream | None = None

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "scaled": self.scaled}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.skipped, self.scaled = state_dict["skipped"], state_dict["scaled"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, (DDPStrategy, SingleDeviceStrategy)):
            log.info("trainer.nonfinite is for strategy=ddp: with this one nobody looks whether losses are finite.")
            typed(trainer).callbacks = [callback for callback in typed(trainer).callbacks if callback is not self]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._late = pl_module.device.type == "cuda"
        self._unit = torch.ones((), device=pl_module.device, dtype=torch.float32)
        self._flag, self._skips = torch.zeros_like(self._unit), torch.zeros_like(self._unit, dtype=torch.bool)
        self._stream = torch.cuda.current_stream() if self._unit.is_cuda else None
        self._unread.clear()  # of a fit that failed
        step_state(trainer).may_be_skipped = self.act == "skip"
        if (checkpoints := checkpoints_of(trainer)) and self.read_all_flags not in checkpoints.before_save:
            checkpoints.before_save.append(self.read_all_flags)
        if self._late and not self._may_look_later(trainer):
            log.info(
                "trainer.nonfinite=skip makes the host wait for the GPU at each step with this optimiser. "
                "HINT: set model.optimizer.init_args.fused=true, if it has that."
            )
        self._zero_momentum(trainer)  # also in the middle of an epoch that the run resumes

    def _zero_momentum(self, trainer: Trainer) -> None:
        """Initialises the momentum of fused optimisers, which a first step that is skipped would leave undefined."""
        for optimizer in trainer.optimizers:
            give_zero_momentum(optimizer)

    # A step ----------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if batch_idx == 0:  # whose callbacks may have unfrozen a parameter when the epoch began
            self._zero_momentum(trainer)
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._step = CheckedStep(trainer.global_step + 1, trainer.current_epoch)
            self._step.late = self._late and self._may_look_later(trainer)
            step_state(trainer).skipped = self._skips if self._step.late and self.act == "skip" else False
        self._batch = None if self._step.late else batch

    def _may_look_later(self, trainer: Trainer) -> bool:
        """Returns whether the host may read the flag of the current step later: it stops then, or the device skips the step by
        itself.
        """
        return self.act == "stop" or _gradient_scaler(trainer) is not None or all(map(is_fused, trainer.optimizers))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        value = loss.detach()
        # 0 times the loss is 0, or NaN. A gradient can be finite where its loss is not; this one then isn't.
        loss.register_hook(lambda gradient: gradient.add(value, alpha=0))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        gradients = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            self._skips.fill_(False)
            return
        flag = not_finite(gradients, self._unit)
        if is_sharded(trainer):  # a rank sees its part of the gradient only
            max_over_ranks(flag)
        if self._step.late:
            torch.maximum(self._flag, flag, out=self._flag)
            if self.act == "skip":
                torch.gt(self._flag, 0, out=self._skips)  # of any of the module's optimisers
                if _gradient_scaler(trainer) is None:
                    optimizer.found_inf = flag  # type: ignore[attr-defined]
        # The host waits for the device here: always on a CPU, where that is nothing; on a GPU see `on_train_start`.
        elif not flag.item():
            self._faults_in_a_row = 0
        else:
            self._note_loss(trainer)
            if self._handle_fault(trainer, self._step, pl_module):
                self._drop_gradients(trainer, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        for optimizer in trainer.optimizers if self._late else ():
            vars(optimizer).pop("found_inf", None)
        if self._step.late or not ends_step(trainer):
            self._note_loss(trainer)
        self._batch = None
        if self._step.late and self._step.flag is None and trainer.global_step >= self._step.number:
            self._queue_flag(trainer, self._step)

    def _note_loss(self, trainer: Trainer) -> None:
        """Adds the current micro-batch and its loss to the record of the step."""
        if (loss := step_state(trainer).loss) is not None:
            bad = [] if self._step.late or loss.isfinite() else _bad_inputs(self._batch, micro_batch(trainer).size)
            self._step.losses.append((micro_batch(trainer), loss, bad))

    def _drop_gradients(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Skips the step by removing its gradients: the optimiser ignores parameters without one, and changes neither weights
        nor momenta nor counts.
        """
        step_state(trainer).skipped = True
        if _gradient_scaler(trainer) is None:  # which would miss them, and has found out by itself
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    # Later, on a GPU --------------------------------------------------------------------------------------------------

    def _queue_flag(self, trainer: Trainer, step: CheckedStep) -> None:
        """Starts the copy of the step's flag into pinned memory, and reads those of earlier steps: the host does not wait."""
        step.flag = self._flag.to("cpu", non_blocking=True, copy=True)
        self._flag.zero_()
        if self._stream is not None:
            step.ready = torch.cuda.Event()
            step.ready.record(self._stream)
        self._unread.append(step)
        while len(self._unread) > _LATER:
            self._read_oldest_flag(trainer)

    def _read_oldest_flag(self, trainer: Trainer) -> None:
        """Reads the flag of the oldest step whose flag is unread, and handles its fault."""
        step = self._unread.popleft()
        if step.ready is not None:
            step.ready.synchronize()  # of two steps ago: the device has steps to work on meanwhile
        assert step.flag is not None
        if step.flag.item():
            self._handle_fault(trainer, step)
        else:
            self._faults_in_a_row = 0

    def read_all_flags(self, trainer: Trainer) -> None:
        """Reads all unread flags: the state may be saved. The host waits for the device here."""
        while self._unread:
            self._read_oldest_flag(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.read_all_flags(trainer)
        if self.skipped and trainer.is_global_zero:
            log.warning("%d of %d steps were skipped, because they were not finite.", self.skipped, trainer.global_step)

    # What it was -----------------------------------------------------------------------------------------------------

    def _handle_fault(self, trainer: Trainer, step: CheckedStep, module: LightningModule | None = None) -> bool:
        """Reports a step that is not finite, and stops the run if it is to stop; returns whether the step is to be skipped.
        False if fp16's scale was merely too high: the scaler skips it. Called by all ranks for the same step.
        """
        faults = _gather_faults(trainer, step)
        scaler = _gradient_scaler(trainer)
        if not faults and scaler is not None and scaler.get_scale() >= 1:  # it goes down to 0 where scaling isn't what's wrong
            self.scaled += 1
            self._log_count(trainer, step, "train/fp16_skipped_steps", self.scaled)
            log.info("Step %d is skipped by fp16's loss scaling, which lowers its scale (%d so far).", step.number, self.scaled)
            return False
        everywhere = len(faults) == data_ranks(trainer).count * trainer.accumulate_grad_batches > 1
        what = _describe(step, faults, _faulty_parameters(module) if module and not faults else [], everywhere)
        self._faults_in_a_row += 1
        if self.act == "stop" or self._faults_in_a_row > _IN_A_ROW:
            self._save_and_stop(trainer, what, lambda: _hint(trainer, faults, everywhere), before=module is not None)
        self.skipped += 1
        self._log_count(trainer, step, "train/skipped_steps", self.skipped)
        if trainer.is_global_zero:
            log.warning("%s The step is skipped (%d so far).", what, self.skipped)
        return True

    @staticmethod
    def _log_count(trainer: Trainer, step: CheckedStep, tag: str, count: int) -> None:
        for logger in measurement_loggers(trainer):
            logger.log_metrics({tag: count}, step=step.number)

    def _save_and_stop(self, trainer: Trainer, what: str, hint_of: Callable[[], str], before: bool) -> None:
        """Saves a checkpoint if the state is sound, and ends all ranks. `before`: the step has not been taken, so it may be."""
        checkpoints = checkpoints_of(trainer)
        if checkpoints and before and _parameters_are_finite(trainer.lightning_module):
            checkpoints.save(trainer)
        if checkpoints:
            checkpoints.wait()
        hint = hint_of()  # now that the checkpoints are there that it names
        if trainer.is_global_zero:
            saved = checkpoints.last if checkpoints else None
            where = f"the newest checkpoint is from before: {saved}" if saved else "there is no checkpoint yet"
            log.error("%s Stopped; %s. HINT: %s", what, where, hint)
        trainer.strategy.barrier()  # a launcher may end all ranks when it sees one end: not before rank 0 has written
        raise NonFiniteError(f"{what} HINT: {hint}")


def _gradient_scaler(trainer: Trainer) -> GradScaler | None:
    scaler: GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    return scaler


def _parameters_are_finite(module: LightningModule) -> bool:
    """Returns whether all parameters are finite, on all ranks if they are sharded."""
    here = not all(bool(local(parameter).isfinite().all()) for parameter in module.parameters())
    return not (any_rank([here])[0] if is_sharded(module.trainer) else here)


def _bad_inputs(batch: object, size: int) -> list[int]:
    """Returns the positions in a micro-batch at which a tensor of numbers is not finite."""
    bad: set[int] = set()

    def look(values: Tensor) -> Tensor:
        if values.is_floating_point() and values.ndim and len(values) == size:
            bad.update((~values.reshape(size, -1).isfinite()).any(1).nonzero().flatten().tolist())
        return values

    apply_to_tensors(batch, look)
    return sorted(bad)


def _gather_faults(trainer: Trainer, step: CheckedStep) -> list[tuple[float, str]]:
    """Returns the losses of a step's micro-batches, on all ranks, that are not finite, each with its description. All ranks
    call this together; on a GPU they may do so up to two steps later.
    """
    total = data_ranks(trainer).count * trainer.accumulate_grad_batches
    where = f"on rank {trainer.global_rank}, {host()}, in micro-batch"
    own = [
        (loss.item(), f"{loss.item()} {where} {batch.key[2] + 1} of {total}{_describe_samples(batch.samples, bad)}")
        for batch, loss, bad in step.losses
        if not loss.isfinite()
    ]
    return [fault for part in data_ranks(trainer).all_gather_objects(own) for fault in part]


def _describe_samples(samples: list[int] | None, bad: list[int]) -> str:
    """Returns the samples of a micro-batch, as the end of a sentence; of those at the positions `bad`, that they are not finite
    themselves. '' where nobody knows the samples.
    """
    if samples is None:
        return ""
    if bad:
        numbers = ", ".join(str(samples[at]) for at in bad[:_SHOWN])
        return f": the input of sample{'s' * (len(bad) > 1)} {numbers} has NaN or infinite values"
    more = len(samples) - _SHOWN
    return f", samples {', '.join(map(str, samples[:_SHOWN]))}{f' and {more} more' if more > 0 else ''}"


def _faulty_parameters(module: LightningModule) -> list[str]:
    """Names the parameters whose gradient is not finite, from the output backwards: the fault began at the first, or next to
    it.
    """
    named = [(name, local(p.grad)) for name, p in module.named_parameters() if p.grad is not None][::-1]
    bad = [not gradient.isfinite().all() for _, gradient in named]
    return [
        name for (name, _), flagged in zip(named, any_rank(bad) if is_sharded(module.trainer) else bad, strict=True) if flagged
    ]


def _describe(step: CheckedStep, faults: list[tuple[float, str]], parameters: list[str], everywhere: bool) -> str:
    """Returns the message: the losses that are not finite or, if all are, the parameters whose gradients are not.

    Where all losses are not (`everywhere`), the samples are not to blame, and are not listed.
    """
    which = f"step {step.number} (epoch {step.epoch + 1})"
    if everywhere:
        return f"The loss of {which} is not finite: {faults[0][0]} in all its {len(faults)} micro-batches."
    if faults:
        more = f"; and {len(faults) - 3} more micro-batches" if len(faults) > 3 else ""
        return f"The loss of {which} is not finite: {'; '.join(text for _, text in faults[:3])}{more}."
    text = f"The gradient of {which} is not finite, though all losses are"
    if not parameters:
        return f"{text}."
    more = f" and {len(parameters) - 3} more towards the input" if len(parameters) > 3 else ""
    return f"{text}: that of {', '.join(parameters[:3])}{more}."


def _hint(trainer: Trainer, faults: list[tuple[float, str]], everywhere: bool) -> str:
    if everywhere:
        names = [path.name for path in checkpoints_in(Path(trainer.default_root_dir) / "checkpoints")]
        return (
            "training diverges: set a lower learning rate, a longer warm-up or "
            "trainer.gradient_clip_val, and resume from a checkpoint of before the loss grew "
            f"({', '.join(names[-3:]) or 'there is none yet'}): --resume PATH --change KEYS, those that you set."
        )
    look = "these samples" if faults else "what the network does in its backward pass"
    leave_out = 'set trainer.nonfinite: skip (in Python nonfinite="skip")'
    return f"look at {look}. A resumed run repeats this step; to leave it out, {leave_out}."
