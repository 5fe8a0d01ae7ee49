"""The first micro-batch of a run, read in this process and left on the host: the run's own loaders don't move."""

import copy
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def first_batch(module: LightningModule, data: LightningDataModule | None, streams: bool = False) -> Any:
    """As `training_step` gets it, but for the device. `data`: set up; None: the module has its loaders itself.

    `streams`: may begin to read what can only be read once.
    """
    source: Any = module if data is None else _copied(data)
    loaders = source.train_dataloader()
    if isinstance(loaders, dict):
        batch: Any = {name: _first(one, streams) for name, one in loaders.items()}
    elif isinstance(loaders, (list, tuple)):
        batch = [_first(one, streams) for one in loaders]
    else:
        batch = _first(loaders, streams)
    for hook in _HOOKS:
        owner: Any = module if data is None or is_overridden(hook, module, LightningModule) else source
        batch = getattr(owner, hook)(batch, *((torch.device("cpu"),) if hook.startswith("transfer") else ()), 0)
    return batch


def _copied(data: LightningDataModule) -> LightningDataModule:
    """What it notes of a first batch is not noted in the data module itself; what it holds is the same."""
    copied = copy.copy(data)
    for name, value in vars(copied).items():
        if isinstance(value, (set, list, dict)):
            copied.__dict__[name] = copy.copy(value)
    return copied


def _first(loader: Any, streams: bool) -> Any:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        if not streams:
            raise NotImplementedError("the training loader can only be read from its beginning")
        return next(iter(loader))
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        items = dataset[next(iter(loader.sampler))]
    else:
        numbers = next(iter(loader.batch_sampler))
        items = dataset.__getitems__(numbers) if hasattr(dataset, "__getitems__") else [dataset[one] for one in numbers]
    batch = loader.collate_fn(items)
    if isinstance(batch, Exception):
        raise batch
    return batch
