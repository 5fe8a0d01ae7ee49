"""A run as the doctor sees it: Trainer, model and data, set up as far as an examination needs them."""

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from project.checkpoints.callback import checkpoints_of
from project.cluster.environment import of_this_rank
from project.data.dealing import Samples, SeededDataset, micro_batch_of
from project.data.order import size_of
from project.data.self_dealing import SelfDealing
from project.doctor.activations import transferred
from project.doctor.examination import ExaminedRun
from project.step.data_ranks import shared_by
from project.step.loaders import attached_for_fit
from project.step.micro_batch import count_samples
from project.typed import TypedTrainer


class _ModelAndData:
    """The model on its device, and its data. The examination uses a copy: the run begins untouched."""

    def __init__(self, trainer: Trainer, model: LightningModule, data: LightningDataModule) -> None:
        self.trainer, self.data = trainer, data
        self.device = trainer.strategy.root_device
        self.model = copy.deepcopy(model, {id(trainer): trainer})  # of the Trainer, which the model knows, no copy is made
        self.model.trainer = trainer
        self.model.configure_model()
        self.model.setup("fit")
        for name in ("log", "log_dict"):  # what is measured here is not the run's
            self.model.__dict__[name] = lambda *args, **kwargs: None
        trainer.precision_plugin.convert_module(self.model)
        self.model.to(self.device).train()
        self._batch: Any = None

    def batches(self) -> Iterator[Any]:
        loaders = self.data.train_dataloader()
        if isinstance(loaders, (list, tuple, dict)):
            yield from (result[0] for result in CombinedLoader(loaders, "max_size_cycle"))
        else:
            yield from loaders

    def compute(self, samples: int) -> None:
        if not self.model.automatic_optimization:
            raise NotImplementedError("the module takes its steps by itself, which it can't outside of a fit")
        if self._batch is None:
            self._batch = transferred(next(iter(self.batches())), self.model, self.data, self.device)
        many = count_samples(self._batch)
        batch = self._batch
        if samples != many:
            batch = apply_to_collection(batch, Tensor, lambda value: value[:samples] if len(value.shape) else value)
        indexed = is_param_in_hook_signature(self.model.training_step, "batch_idx", min_args=2)
        device = self.trainer.strategy.root_device
        own = [device] if device.type == "cuda" else []  # and not the generators of all GPUs of this host
        with torch.random.fork_rng(own), self.trainer.precision_plugin.forward_context():
            loss = self.model.training_step(batch, 1) if indexed else self.model.training_step(batch)
            loss = loss["loss"] if isinstance(loss, Mapping) else loss
            assert isinstance(loss, Tensor)
            loss.backward()
        self.model.zero_grad()

    def fingerprint(self) -> dict[str, Any]:
        """Returns the data's own fingerprint; else the number of training samples, and a hash of a few."""
        self.data.setup("fit")
        if isinstance(self.data, SelfDealing):
            return self.data.fingerprint()
        loader = self.data.train_dataloader()
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return {}
        size = size_of(loader.dataset)
        few = Samples(sorted({0, size // 2, size - 1}))  # what the dataset draws at random for them is the same on all hosts
        items = SeededDataset(loader.dataset).__getitems__(few) if size else []
        digest, bytes_ = hashlib.sha256(), 0

        def note(value: Any) -> None:
            nonlocal bytes_
            array = np.asarray(value)
            bytes_ += array.nbytes
            digest.update(repr(value).encode() if array.dtype == object else array.tobytes())

        apply_to_collection(items, (Tensor, np.ndarray, int, float, str, bytes), note)
        return {"train": {"samples": size, "bytes": bytes_ // max(1, len(items)), "hash": digest.hexdigest()[:12]}}

    def load(self) -> Iterator[int]:
        for batch in self.batches():
            yield count_samples(batch)

    def sizes(self) -> tuple[int, int]:
        """Returns the samples in a micro-batch, and the loader's processes; called after the data's setup."""
        if isinstance(self.data, SelfDealing):
            return self.data.batch_sizes()[0], self.data.loader_processes()
        loader = self.data.train_dataloader()
        return (micro_batch_of(loader), loader.num_workers) if isinstance(loader, DataLoader) else (1, 0)


@contextmanager
def examined_run(
    trainer: TypedTrainer,
    model: LightningModule,
    data: LightningDataModule,
    folder: Path,
    processes: int,
    spare_cores: int | None = None,
) -> Iterator[ExaminedRun]:
    """Attaches module and data to the trainer, and yields the facts about the run that the doctor needs.

    `processes`: those on this host. `spare_cores`: those that each rank has for its loader, if not as many as here.
    """
    with attached_for_fit(trainer, model, data, spare_cores) as loaders:
        pair, kept = _ModelAndData(trainer, model, data), checkpoints_of(trainer)
        key, size, global_batch = "trainer.global_batch_size", 1, loaders.global_batch
        if isinstance(data, SelfDealing):
            key, (size, global_batch) = "data.global_batch_size", data.batch_sizes()
        weights = sum(value.numel() * value.element_size() for value in pair.model.state_dict().values())
        gradients = sum(value.numel() * value.element_size() for value in pair.model.parameters() if value.requires_grad)
        yield ExaminedRun(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            local_rank=trainer.local_rank,
            processes=processes,
            device=pair.device,
            folder=folder,
            shared=trainer.shared_folder,
            environment=of_this_rank(pair.device, trainer.configuration),
            configuration=trainer.configuration,
            sizes=pair.sizes,
            accumulation=trainer.accumulate_grad_batches,
            gradient_bytes=gradients,
            checkpoint_bytes=weights + gradients,  # the optimiser keeps as much again
            checkpoints=(kept.keep_last + 1) if kept else 0,
            compute=pair.compute,
            load=pair.load,
            prepare=data.prepare_data,
            fingerprint=pair.fingerprint,
            global_batch=global_batch,
            global_batch_key=key,
            shared_by=shared_by(trainer.strategy),
            micro_batch=size,
        )
