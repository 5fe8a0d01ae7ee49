"""A run as the doctor sees it: Trainer, model and data, set up as far as an examination needs them."""

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from project.checkpoints.callback import checkpoints_of
from project.cluster.environment import of_this_rank
from project.data.dealing import Samples, SeededDataset, micro_batch_of
from project.data.order import size_of
from project.data.self_dealing import SelfDealing
from project.doctor.activations import log_nothing, training_step, transferred
from project.step.data_ranks import shared_by
from project.step.loaders import Loaders, attached_for_fit
from project.step.micro_batch import count_samples
from project.typed import TypedTrainer

_PAGES = 1 << 16  # bytes of /dev/shm that a micro-batch takes besides: each of its tensors, and each lock, has pages of its own


class ExaminedRun:
    """The examined run, with a copy of its model: the run begins untouched. `processes`: those on this host."""

    def __init__(
        self,
        trainer: TypedTrainer,
        model: LightningModule,
        data: LightningDataModule | None,
        folder: Path,
        processes: int,
        loaders: Loaders,
    ) -> None:
        self.trainer, self.folder, self.processes = trainer, folder, processes
        self.rank, self.world_size, self.local_rank = trainer.global_rank, trainer.world_size, trainer.local_rank
        self.device = trainer.strategy.root_device
        self.shared, self.may_move, self.configuration = trainer.shared_folder, trainer.rank_0_may_move, trainer.configuration
        self.environment = of_this_rank(self.device, self.configuration)
        self.micro_batch, self.workers = 1, 0  # until the data was opened
        self._loaders, self.global_batch, self.global_batch_key = loaders, loaders.global_batch, "trainer.global_batch_size"
        if data is not None and isinstance(data, SelfDealing):
            self.micro_batch, self.global_batch = data.batch_sizes()
            self.global_batch_key = "data.global_batch_size"
        self.shared_by = shared_by(trainer.strategy)
        self.model = copy.deepcopy(model, {id(trainer): trainer})  # of the Trainer, which the model knows, no copy is made
        self.model.trainer = trainer
        self.model.configure_model()
        self.model.setup("fit")
        self.data = self.model if data is None else data  # it has loaders itself
        log_nothing(self.model)
        trainer.precision_plugin.convert_module(self.model)
        self.model.to(self.device).train()
        self._batch: object = None
        kept = checkpoints_of(trainer)
        self.checkpoints = (kept.keep_last + 1) if kept else 0
        self.gradient_bytes: int = sum(value.nbytes for value in self.model.parameters() if value.requires_grad)
        weights: int = sum(value.nbytes for value in self.model.state_dict().values())
        self.checkpoint_bytes = weights + self.gradient_bytes  # the optimiser keeps as much again

    @property
    def disk_needed(self) -> int:
        """Returns the bytes of the checkpoints that are on disk at once: those kept, and the one being written."""
        return self.checkpoint_bytes * (self.checkpoints + 1)

    def shared_memory_needed(self, sample_bytes: int) -> int:
        """Returns the bytes of /dev/shm on this host: each loader worker is two micro-batches ahead, and one is in use."""
        if not self.workers:
            return 0
        return (self.micro_batch * sample_bytes + _PAGES) * (self.workers * 2 + 1) * self.processes

    def batches(self) -> Iterator[object]:
        """Yields the micro-batches of the training loader."""
        yield from (result[0] for result in CombinedLoader(self.data.train_dataloader(), "max_size_cycle"))

    def first_batch(self) -> object:
        """Returns the first micro-batch, on the device."""
        if self._batch is None:
            self._batch = transferred(next(iter(self.batches())), self.model, self.data, self.device)
        return self._batch

    def compute(self, samples: int) -> None:
        """Puts a micro-batch of so many samples through the network and back."""
        batch = self.first_batch()
        if samples != count_samples(batch):
            batch = apply_to_collection(batch, Tensor, lambda value: value[:samples] if len(value.shape) else value)
        own = [self.device] if self.device.type == "cuda" else []  # and not the generators of all GPUs of this host
        with torch.random.fork_rng(own), self.trainer.precision_plugin.forward_context():
            loss = training_step(self.model, batch, 1)
            loss = loss["loss"] if isinstance(loss, Mapping) else loss
            assert isinstance(loss, Tensor)
            loss.backward()
        self.model.zero_grad()

    def fingerprint(self) -> dict[str, dict[str, int | str]]:
        """Opens the data, and returns its own fingerprint; else the number of training samples, and a hash of a few."""
        if self.data is not self.model:
            self.data.setup("fit")
        if isinstance(self.data, SelfDealing):
            return self.data.fingerprint()
        loader = self.data.train_dataloader()
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return {}
        size = size_of(loader.dataset)
        few = Samples(sorted({0, size // 2, size - 1}))  # what the dataset draws at random for them is the same on all hosts
        items = SeededDataset(loader.dataset, loader.collate_fn).__getitems__(few) if size else []
        digest, sizes = hashlib.sha256(), list[int]()

        def note(value: object) -> None:
            array = np.asarray(value)
            sizes.append(array.nbytes)
            digest.update(repr(value).encode() if array.dtype == object else array.tobytes())

        apply_to_collection(items, (Tensor, np.ndarray, int, float, str, bytes), note)
        return {"train": {"samples": size, "bytes": sum(sizes) // max(1, len(items)), "hash": digest.hexdigest()[:12]}}

    def sizes(self) -> tuple[int, int]:
        """Returns the samples in a micro-batch, and the loader's processes, of data that was opened."""
        if isinstance(self.data, SelfDealing):
            return self.data.batch_sizes()[0], self.data.loader_processes()
        loader = self.data.train_dataloader()
        return (micro_batch_of(loader), loader.num_workers) if isinstance(loader, DataLoader) else (1, 0)

    def deal(self) -> None:
        """Deals out the training loaders as a fit does. A module that deals out its samples itself has been asked."""
        if not isinstance(self.data, SelfDealing):
            self.trainer.strategy.connect(self.model)
            self._loaders.check_training(self.data.train_dataloader())


@contextmanager
def examined_run(
    trainer: TypedTrainer,
    model: LightningModule,
    data: LightningDataModule | None,
    folder: Path,
    processes: int,
    spare_cores: int | None = None,
) -> Iterator[ExaminedRun]:
    """Attaches module and data to the trainer, and yields the run that the doctor examines.

    `processes`: those on this host. `spare_cores`: those that each rank has for its loader, if not as many as here.
    """
    with attached_for_fit(trainer, model, data, spare_cores) as loaders:
        yield ExaminedRun(trainer, model, data, folder, processes, loaders)
