"""A run as the doctor sees it: Trainer, model and data, put together as far as an examination needs them."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from project.cluster.doctor import Patient
from project.cluster.facts import of_this_rank
from project.survive.checkpoints import Checkpoints
from project.train.micro_batch import samples_of


class _Bed:
    """The model on its device and the data that it is fed with. What is examined is a copy: the run begins untouched."""

    def __init__(self, trainer: Trainer, model: LightningModule, data: LightningDataModule) -> None:
        self.trainer, self.data = trainer, data
        self.device = trainer.strategy.root_device
        model.__dict__["_trainer"], kept = None, model.__dict__.get("_trainer")
        self.model = copy.deepcopy(model)
        model.__dict__["_trainer"] = kept
        self.model.trainer = trainer
        self.model.__dict__["log"] = lambda *args, **kwargs: None  # nothing is logged outside of a run
        trainer.precision_plugin.convert_module(self.model)
        self.model.to(self.device).train()
        self._batch: Any = None

    def _on_device(self, batch: Any) -> Any:
        moved = self.data.transfer_batch_to_device(batch, self.device, 0)
        return self.data.on_after_batch_transfer(moved, 0)

    def compute(self, samples: int) -> None:
        if self._batch is None:
            self._batch = self._on_device(next(iter(self.data.train_dataloader())))
        batch = apply_to_collection(self._batch, Tensor, lambda tensor: tensor[:samples] if tensor.ndim else tensor)
        with torch.random.fork_rng(), self.trainer.precision_plugin.forward_context():
            loss = self.model.training_step(batch, 1)
            assert isinstance(loss, Tensor)
            loss.backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad()

    def fingerprint(self) -> dict[str, Any]:
        self.data.setup("fit")
        says: dict[str, Any] = self.data.fingerprint() if hasattr(self.data, "fingerprint") else {}
        return says

    def load(self) -> Iterator[int]:
        for batch in self.data.train_dataloader():
            yield samples_of(batch)


def patient(trainer: Trainer, model: LightningModule, data: LightningDataModule, folder: Path, processes: int) -> Patient:
    """What the doctor needs to know of a run. `processes`: those on this host."""
    configuration: dict[str, Any] = trainer.configuration  # type: ignore[attr-defined]
    bed = _Bed(trainer, model, data)
    kept = next((one for one in trainer.callbacks if isinstance(one, Checkpoints)), None)  # type: ignore[attr-defined]
    weights = sum(value.numel() * value.element_size() for value in bed.model.state_dict().values())
    gradients = sum(value.numel() * value.element_size() for value in bed.model.parameters() if value.requires_grad)
    return Patient(
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        local_rank=trainer.local_rank,
        processes=processes,
        device=bed.device,
        folder=folder,
        shared=trainer.shared_folder,  # type: ignore[attr-defined]
        facts=of_this_rank(bed.device, configuration),
        configuration=configuration,
        micro_batch=getattr(data, "batch_size", 1),
        accumulation=trainer.accumulate_grad_batches,
        gradient_bytes=gradients,
        checkpoint_bytes=weights + gradients,  # the optimiser keeps as much again
        checkpoints=(kept.keep_last + 1) if kept else 0,
        workers=getattr(data, "workers", 0),
        compute=bed.compute,
        load=bed.load,
        prepare=data.prepare_data,
        fingerprint=bed.fingerprint,
    )
