"""Records what each step of a trial saw, and kills the trial at a chosen place.

A trial finds in its environment what it is to do. What is noted goes to a file at once: it outlives a SIGKILL.
"""

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import TextIO

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from project.checkpoints.callback import checkpoints_of
from project.data.values import Digests
from project.resume.attributes import values
from project.step.evaluation import loaders_of
from project.step.state import micro_batch, step_state
from project.typed import callbacks_of, typed
from project.watch.fingerprints import Fingerprints

MARK = "PROJECT_PROVE"
_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Order:
    """The instructions for a rank of a trial: where to write, and where its last rank dies ('look': in the first micro-batch,
    'step', 'validation', 'epoch'; '': nowhere)."""

    folder: str
    kill: str = ""
    epoch_steps: int = 1
    samples: int | None = None
    """The number of samples of the training set that are read."""


class Recorder(Callback):
    """A callback that writes record-RANK.jsonl and facts.json into the folder of a trial."""

    def __init__(self) -> None:
        self._order = Order(**json.loads(os.environ.get(MARK, '{"folder": "."}')))
        self._file: TextIO | None = None
        self._step = 0

    def _write(self, kind: str, step: int, values: Sequence[object] = ()) -> None:
        assert self._file is not None
        self._file.write(json.dumps([kind, step, values]) + "\n")
        self._file.flush()

    def _strike(self, trainer: Trainer, place: str) -> None:
        if self._order.kill != place:
            return
        if checkpoints := checkpoints_of(trainer):
            checkpoints.wait()  # where the run resumes is not left to chance
        trainer.strategy.barrier()  # no rank meets the end of another one too early
        if trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        loaders_of(trainer).max_samples = self._order.samples

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._file = (Path(self._order.folder) / f"record-{trainer.global_rank}.jsonl").open("a")
        self._write("begins", trainer.global_step)
        for fingerprints in callbacks_of(trainer, Fingerprints):
            fingerprints.outputs_every = 1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._step = trainer.global_step
        self._write("samples", self._step, digests(batch))
        if trainer.is_global_zero and batch_idx % trainer.accumulate_grad_batches == 0:
            known = [(name, text) for name, value in values(trainer) if (text := _text(value)) is not None]
            self._write("attributes", self._step, known)
            self._write("buffers", self._step, [*_buffers(pl_module)])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        (epoch, step, number), loss = micro_batch(trainer).key, step_state(trainer).loss
        if loss is not None and loss.numel() == 1:
            self._write("losses", self._step, [(f"of micro-batch {number}", float(loss), abs(float(loss)))])
        facts = Path(self._order.folder) / "facts.json"
        if trainer.is_global_zero and not facts.exists():
            facts.write_text(json.dumps(_facts(trainer, pl_module)))
        self._strike(trainer, "look")
        if batch_idx % trainer.accumulate_grad_batches == 0:
            if (epoch, step) == (0, self._order.epoch_steps - 1):
                self._strike(trainer, "step")
            if (epoch, step) == (1, 0):
                self._strike(trainer, "epoch")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write("validates", trainer.global_step)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.sanity_checking:
            return
        self._write("validation samples", trainer.global_step, [f"{dataloader_idx}:{sample}" for sample in digests(batch)])
        if trainer.current_epoch == 0 and micro_batch(trainer).key[1] == self._order.epoch_steps - 1:
            self._strike(trainer, "validation")


def _facts(trainer: Trainer, module: LightningModule) -> dict[str, object]:
    """Returns the facts about a configuration that its first micro-batch shows."""
    order, batch = micro_batch(trainer).order, typed(trainer).global_batch
    return {
        "micro_batch": None if batch is None else batch // trainer.world_size // trainer.accumulate_grad_batches,
        "samples": None if order is None else order.size,
        "ends": order is not None and order.tail == "keep",  # an epoch may end with a shorter step
        "automatic": module.automatic_optimization,
        "validates": bool(trainer.enable_validation),
        "gpus": torch.cuda.device_count() if module.device.type == "cuda" else None,
    }


def _flattened(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _flattened(item)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in value):
        for item in value:
            yield from _flattened(item)
    elif isinstance(value, (Tensor, np.ndarray, list, tuple, str, bytes, int, float)):
        yield value


def digests(batch: object) -> list[str]:
    """Returns a checksum of each sample of a batch; one of all of it, where it can't be taken apart."""
    items = list(_flattened(batch))
    cut = [leaf for leaf in items if isinstance(leaf, (list, tuple)) or (isinstance(leaf, Tensor) and leaf.ndim)]
    lengths = {len(leaf) for leaf in cut}
    parts = [[leaf[at] for leaf in cut] for at in range(lengths.pop())] if len(lengths) == 1 else [items][: len(items)]
    return [(Digests().of(part) or b"").hex()[:12] for part in parts]


def _buffers(module: LightningModule) -> Iterator[tuple[str, float, float]]:
    """Yields sums and norms, by name, of tensors that the optimiser does not move: buffers, also those that no checkpoint has,
    and parameters that do not learn."""
    for name, tensor in (*module.named_buffers(), *((n, p) for n, p in module.named_parameters() if not p.requires_grad)):
        if type(tensor.detach()) is Tensor and tensor.layout == torch.strided and not tensor.is_complex():
            values = tensor.detach().float()
            norm = float(values.norm())
            yield f"{name}, its sum", float(values.sum()), norm
            yield f"{name}, its norm", norm, norm


def _text(value: object) -> str | None:
    """Returns a short text for a value that can be compared; None for others."""
    if isinstance(value, _PLAIN) and len(repr(value)) < 40:
        return repr(value)
    # An iterator's position can't be read; a method, such as the module's `log` that Lightning gives callbacks, is no state.
    known = None if isinstance(value, (Iterator, MethodType)) else Digests().of(value)
    kind = type(value)
    return None if known is None else f"{kind.__module__.partition('.')[0]}.{kind.__name__} {known.hex()[:12]}"
