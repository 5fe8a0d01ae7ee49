"""The rehearsal: what changes from step to step and lies in no state is named while a run is young.

A resumed run makes the module, its data and its callbacks anew, and puts back what was saved. Whatever else has changed since
the start it would not have: a counter, a list of outputs, a generator of its own. Values are compared, so that no code of the
user runs but what saves its state.
"""

import logging
import pickle
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from hashlib import sha256
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn

from project.survive.checkpoints import checkpoints_of
from project.train.evaluation import loaders_of
from project.train.resuming import checkpoint_of
from project.train.usual import spread

log = logging.getLogger(__name__)

_AFTER = 3  # steps: of the first epoch that this process trains, whose start a resumed run does again
_LARGEST = 1 << 24  # bytes of a value that is looked at
_MOST = 64  # items of a list that are looked at, at each of its ends
_LIBRARIES = ("torch.", "lightning.", "torchmetrics.", "project.", "pytorch_lightning.")
_STANDARD = (
    *("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "optimizer_states", "lr_schedulers"),
    *("callbacks", "position", "schedules_as_built", "callback_metrics", "states_of_ranks", "logged_sums", "metric_states"),
    *("threads", "training_samples", "states_of_loaders", "unsaved_buffers", "exact_grids", "exact_metrics", "MixedPrecision"),
    *("hparams_name", "hyper_parameters", "datamodule_hparams_name", "datamodule_hyper_parameters"),
)
"""Parts of a checkpoint in which no attribute of a user is looked for."""


class Rehearsal(Callback):
    """Names each attribute that has changed in the first steps, and is not found in what a checkpoint would hold."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, bytes]] | None = None
        self._ends_at = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, ModelPruning) for callback in callbacks):
            log.warning("ModelPruning leaves its masks out of checkpoints: after a restart what was pruned grows again.")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._before is None and checkpoints_of(trainer) and not spread(trainer) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._before = {name: _digests_of(owner) for name, owner in _owners(trainer)}
            self._ends_at = trainer.global_step + _AFTER

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._before and trainer.global_step >= self._ends_at:
            before, self._before = self._before, {}
            self._compare(trainer, before)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = self._before and {}  # an epoch's end is another matter: what it empties need not be saved

    def _compare(self, trainer: Trainer, before: Mapping[str, Mapping[str, bytes]]) -> None:
        """Called by all ranks."""
        checkpoint = checkpoint_of(trainer)
        if not trainer.is_global_zero:
            return
        parts = {name: part for name, part in checkpoint.items() if name not in _STANDARD}
        parts |= {name: part for name, part in checkpoint["state_dict"].items() if name.endswith("extra_state")}
        saved = {*_digests(parts)}
        moved = []
        for name, owner in _owners(trainer):
            state = checkpoint.get("callbacks", {}).get(owner.state_key) if isinstance(owner, Callback) else None
            known = {*_digests(state)} if isinstance(owner, Callback) else saved
            for attribute, found in _digests_of(owner).items():
                if name in before and before[name].get(attribute) != found and found not in known:
                    moved.append(f"{name}.{attribute}")
        if moved:
            log.warning(
                "%s: changed in the first steps, and not in what a checkpoint holds, so that a resumed run begins with what it "
                "was at the start. HINT: keep it in a buffer, in on_save_checkpoint and on_load_checkpoint, or in state_dict.",
                ", ".join(moved),
            )


def _owners(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yields what users write, by name: the module and those in it, the data, its training sets, callbacks."""
    module = trainer.lightning_module
    for path, part in module.named_modules():
        if not _is_of_a_library(part):
            yield f"{type(module).__name__}{'.' if path else ''}{path}", part
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    data: LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
    seen = Counter[str]()
    for owner in (*callbacks, data, *loaders_of(trainer).read_here):
        if owner is not None and not _is_of_a_library(owner):
            name = type(owner).__name__
            seen[name] += 1
            yield name if seen[name] == 1 else f"{name} {seen[name]}", owner


def _is_of_a_library(owner: object) -> bool:
    return f"{type(owner).__module__}.".startswith(_LIBRARIES)


_OF_LIGHTNING = {*vars(LightningModule()), *vars(LightningDataModule()), "_dtype", "_device", "_metric_attributes"}


def attributes(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yields all values that users' objects have, with their names."""
    for name, owner in _owners(trainer):
        yield from ((f"{name}.{attribute}", value) for attribute, value in _values(owner).items())


def _values(owner: Any) -> dict[str, Any]:
    own: dict[str, Any] = getattr(owner, "__dict__", {})  # a list as a dataset has none
    return {name: value for name, value in own.items() if name not in _OF_LIGHTNING and not name.startswith("_ddp")}


def _digests_of(owner: Any) -> dict[str, bytes]:
    """Returns the digests of its attributes, as far as they have values that can be compared."""
    return {name: found for name, value in _values(owner).items() if (found := digest(value)) is not None}


def _digests(value: Any) -> Iterator[bytes]:
    """Yields the digest of a value, and of all that is in it."""
    if (found := digest(value)) is not None:
        yield found
    inner: Iterable[Any] = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for one in inner:
        yield from _digests(one)


def digest(value: Any) -> bytes | None:
    """Returns what is the same for equal values, whether an array, a tensor or a list has them; None where nobody can say."""
    if isinstance(value, Tensor) and (value := _array(value)) is None:
        return None
    if isinstance(value, (bool, int, float, np.number)):
        return sha256(repr(float(value)).encode()).digest()
    if isinstance(value, np.ndarray):
        if value.nbytes > _LARGEST or value.dtype == object:
            return None
        return digest(value.tolist()) if value.size < _MOST else sha256(value.tobytes()).digest()
    if isinstance(value, torch.Generator):
        return digest(value.get_state())
    if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState, str, bytes)) or value is None:
        return sha256(pickle.dumps(value)).digest()
    if isinstance(value, nn.Module):
        return digest(value.state_dict())
    if isinstance(value, Set):
        return _joined(sorted(map(digest, islice(value, _MOST)), key=lambda found: found or b""))
    if isinstance(value, Mapping):
        value = [part for name, one in value.items() for part in (str(name), one)]
    if not isinstance(value, Sequence):
        return None
    ends = [*value[:_MOST], *value[-_MOST:]] if len(value) > 2 * _MOST else value
    return _joined([digest(len(value)), *map(digest, ends)])


def _array(tensor: Tensor) -> Any:
    """Returns the values of a tensor; None where it has none that NumPy could hold."""
    tensor = tensor.detach()
    if tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized and not tensor.is_nested:
        known = not tensor.is_floating_point() or tensor.dtype in (torch.float16, torch.float32, torch.float64)
        return (tensor if known else tensor.float()).cpu().resolve_conj().resolve_neg().numpy()
    return None if tensor.layout == torch.strided or tensor.is_nested else _array(tensor.to_dense())


def _joined(digests: Iterable[bytes | None]) -> bytes | None:
    parts = [*digests]
    return None if None in parts else sha256(b"".join(part for part in parts if part)).digest()
