"""Notes what each step of a trial saw, and kills the trial at a chosen place.

A trial is forked, and finds in `TRIAL` what it is to do. What is noted goes to a file at once: it outlives a SIGKILL.
"""

import hashlib
import json
import os
import random
import signal
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from project.survive.checkpoints import checkpoints_of
from project.train.micro_batch import loss_at_hand, micro_batch


@dataclass(frozen=True)
class Order:
    """What a rank of a trial is to do: where to write, and where to die ('look': in the
    first micro-batch, 'step', 'validation', 'epoch'; '': nowhere)."""

    folder: Path
    kill: str = ""
    epoch_steps: int = 1


@dataclass(frozen=True)
class Facts:
    """What the first trial finds out about a configuration."""

    micro_batch: int | None
    samples: int | None
    automatic: bool
    validates: bool


TRIAL: Order | None = None
"""Set in the forked process, before the program begins."""


class Recorder(Callback):
    """Writes record-RANK.jsonl and facts.json into the folder of a trial."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._step = 0
        self._samples: list[str] = []

    def _write(self, kind: str, **entry: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, **entry}) + "\n")
            self._file.flush()

    def _strike(self, trainer: Trainer, place: str) -> None:
        if TRIAL is None or TRIAL.kill != place:
            return
        if checkpoints := checkpoints_of(trainer):
            checkpoints.wait()  # where the run resumes is not left to chance
        trainer.strategy.barrier()  # no rank meets the end of another one
        os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if TRIAL is not None and self._file is None:
            self._file = (TRIAL.folder / f"record-{trainer.global_rank}.jsonl").open("a")
        self._write("begin", step=trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step, self._samples = trainer.global_step, digests(batch)
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._write("attributes", step=self._step, values=dict(_attributes(trainer, pl_module)))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        at, loss = micro_batch(trainer), loss_at_hand(trainer)
        value = None if loss is None or loss.numel() != 1 else float(loss)
        self._write("batch", step=self._step, number=at.key[2], samples=self._samples, loss=value, weight=at.weight)
        if TRIAL is None:
            return
        facts = TRIAL.folder / "facts.json"
        if trainer.is_global_zero and not facts.exists():
            facts.write_text(json.dumps(asdict(_facts(trainer, pl_module))))
        epoch, step, _ = at.key
        self._strike(trainer, "look")
        if batch_idx % trainer.accumulate_grad_batches == 0:
            if (epoch, step) == (0, TRIAL.epoch_steps - 1):
                self._strike(trainer, "step")
            if (epoch, step) == (1, 0):
                self._strike(trainer, "epoch")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write("validation", step=trainer.global_step)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.sanity_checking:
            return
        self._write("validated", step=trainer.global_step, samples=[f"{dataloader_idx}:{one}" for one in digests(batch)])
        if TRIAL is not None and trainer.current_epoch == 0 and micro_batch(trainer).key[1] == TRIAL.epoch_steps - 1:
            self._strike(trainer, "validation")


def _facts(trainer: Trainer, module: LightningModule) -> Facts:
    order, batch = micro_batch(trainer).order, trainer.global_batch  # type: ignore[attr-defined]
    return Facts(
        None if batch is None else batch // trainer.world_size // trainer.accumulate_grad_batches,
        None if order is None else order.size,
        module.automatic_optimization,
        bool(trainer.enable_validation),
    )


# Samples -------------------------------------------------------------------------------------------------------------


def _bits(value: object) -> bytes:
    if isinstance(value, Tensor):
        plain = value.detach().cpu()
        plain = plain.to_dense() if plain.is_sparse else plain
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()


def _short(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:12]


def _leaves(value: object) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in value):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, (Tensor, np.ndarray, list, tuple, str, bytes, int, float)):
        yield value


def digests(batch: object) -> list[str]:
    """Returns a checksum of each sample of a batch; one of all of it, where it can't be taken apart."""
    leaves = list(_leaves(batch))
    lengths = {len(leaf) for leaf in leaves if isinstance(leaf, (list, tuple)) or (isinstance(leaf, Tensor) and leaf.ndim)}
    if len(lengths) != 1:
        return [_short(*map(_bits, leaves))] if leaves else []
    cut = [leaf for leaf in leaves if isinstance(leaf, (list, tuple)) or (isinstance(leaf, Tensor) and leaf.ndim)]
    return [_short(*(_bits(leaf[at]) for leaf in cut)) for at in range(lengths.pop())]


# Attributes ----------------------------------------------------------------------------------------------------------


_KNOWN = vars(LightningModule()).keys() | vars(nn.Module()).keys()
_PLAIN = (int, float, str, bool, bytes, type(None))


def _attributes(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, str]]:
    """Yields what the user's objects keep in Python: numbers, generators and tensors that are no buffers."""
    owners: list[tuple[str, object]] = [
        (f"{type(one).__name__}{f' ({name})' * bool(name)}", one) for name, one in module.named_modules()
    ]
    others = [*trainer.callbacks, trainer.datamodule]  # type: ignore[attr-defined]
    owners += [(type(one).__name__, one) for one in others if not type(one).__module__.startswith("project.")]
    for owner, one in owners:
        for name, value in list(getattr(one, "__dict__", {}).items()):
            if name not in _KNOWN and not name.startswith("_ddp") and (text := _text(value)) is not None:
                yield f"{name} of {owner}", text


def _text(value: object) -> str | None:
    """Returns a short text for a value that can be compared; None for others."""
    if isinstance(value, _PLAIN):
        return repr(value) if len(repr(value)) < 40 else _short(repr(value).encode())
    if isinstance(value, torch.Generator):
        return f"torch.Generator {_short(_bits(value.get_state()))}"
    if isinstance(value, random.Random):
        return f"random.Random {_short(repr(value.getstate()).encode())}"
    if isinstance(value, np.random.Generator):
        return f"numpy Generator {_short(repr(value.bit_generator.state).encode())}"
    if isinstance(value, np.random.RandomState):
        return f"numpy RandomState {_short(repr(value.get_state(legacy=False)).encode())}"
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{type(value).__name__} {_short(_bits(value))}"
    if isinstance(value, (list, tuple, dict, set)) and len(value) <= 1000:
        items = value.items() if isinstance(value, dict) else value
        texts = [_text(tuple(item) if isinstance(value, dict) else item) for item in items]
        if all(text is not None for text in texts):
            return f"{type(value).__name__} of {len(value)}: {_short(repr(texts).encode())}"
    return None
