"""Counts what the forward pass of a micro-batch keeps for the backward pass, with a copy of the module that has no memory.

The copy computes with torch's fake tensors, which stay on the device that they stand for: autocast, and the kernel that an
attention takes, follow from it, and with them what is kept.
"""

import copy
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader, IterableDataset

from project.sharded.replaced import give_attributes
from project.step.measurements import silenced

FAKE = FakeTensorMode(allow_non_fake_inputs=True)  # the only one: fake tensors of two can't be used together

Storages = dict[int, torch.UntypedStorage]
"""By identity; kept here, so that none is mistaken for one that is gone."""


def fake(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor alike without memory. `dtype`: of floating-point numbers, if not their own."""
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with FAKE:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=kind, device=device)


def copy_like(module: LightningModule, like: Callable[[Tensor], Tensor], device: torch.device) -> LightningModule:
    """Returns a copy with other tensors, which computes on the device and leaves no trace in the module."""
    # What is neither parameter nor buffer, where the module was built on the meta device.
    plain = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor) and value.is_meta]
    memo: dict[int, object] = {id(tensor): like(tensor) for tensor in (*plain, *module.buffers())}
    for parameter in module.parameters():
        memo[id(parameter)] = twin = nn.Parameter(like(parameter), parameter.requires_grad)
        give_attributes(twin, vars(parameter))
    copied = copy.deepcopy(module, memo)
    trainer, kind = copy.copy(module.trainer), type(module.trainer)
    steps = trainer.max_steps if trainer.max_steps > 0 else 1000  # schedules want them; Lightning would open the data to count
    trainer.__class__ = type(kind.__name__, (kind,), {"estimated_stepping_batches": steps})
    trainer.loggers = silenced(trainer.loggers)  # what the user's own lines log is not the run's
    copied.trainer = trainer
    for part in copied.modules():
        if "_device" in vars(part):  # Lightning's modules and torchmetrics' metrics, which make tensors there
            part.__dict__["_device"] = device
    log_nothing(copied)
    return copied.train()


def log_nothing(module: LightningModule) -> None:
    """Has a copy of a module log nothing: it trains nothing, and what is measured with it is not the run's."""
    for name in ("log", "log_dict"):
        module.__dict__[name] = lambda *args, **kwargs: None


def activations(module: LightningModule, blocks: Sequence[str], batch: object, precision: Precision) -> tuple[int, int]:
    """Returns the bytes that `training_step` keeps: as it is, and where only what goes into a block is kept and one block at a
    time is computed again. Each storage counts once, those of parameters and buffers don't. `module` and `batch` are fake.
    """
    own = [tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers())]
    not_counted = {id(storage) for storage in own}
    inputs: Storages = {}
    kept: dict[str, Storages] = defaultdict(dict)  # by block; '' is outside of all

    def note(into: Storages, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in not_counted:
            into[id(storage)] = storage
        return tensor

    def inside(name: str, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        apply_to_collection([args, kwargs], Tensor, partial(note, inputs))
        with saved_tensors_hooks(partial(note, kept[name]), lambda tensor: tensor):
            return forward(*args, **kwargs)

    for name in blocks:
        block = module.get_submodule(name)
        block.forward = partial(inside, name, block.forward)
    with FAKE, saved_tensors_hooks(partial(note, kept[""]), lambda tensor: tensor), precision.train_step_context():
        training_step(module, batch, 0)
    outside = kept.pop("", {})
    always = {**outside, **inputs}
    again = [_bytes({key: inside[key] for key in inside.keys() - always.keys()}) for inside in kept.values()]
    return _bytes(ChainMap(outside, *kept.values())), _bytes(always) + max(again, default=0)


def training_step(module: LightningModule, batch: object, number: int) -> object:
    """Calls the module's `training_step` outside of a fit."""
    if not module.automatic_optimization:
        raise NotImplementedError("the module takes its steps by itself, which it can't outside of a fit")
    indexed = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return module.training_step(batch, number) if indexed else module.training_step(batch)


def _bytes(storages: Mapping[int, torch.UntypedStorage]) -> int:
    return sum(storage.nbytes() for storage in storages.values())


def first_batch(module: LightningModule, data: LightningDataModule | None, dry: bool) -> object:
    """Returns the first micro-batch as `training_step` gets it, on the CPU. The run's own loaders don't move.

    `dry`: there is no fit, the data is yet to be set up, and what can only be read once may be read.
    """
    if dry and data is not None:
        data.prepare_data()
        data.setup("fit")
    source: LightningModule | LightningDataModule = module if data is None else copy.copy(data)
    if data is not None:  # what a data module notes of a first batch is not noted in itself
        containers = {name: value for name, value in vars(data).items() if isinstance(value, (set, list, dict))}
        vars(source).update({name: copy.copy(value) for name, value in containers.items()})
    return transferred(_first(source.train_dataloader(), dry), module, source, torch.device("cpu"))


def _first(loader: object, dry: bool) -> object:
    """Returns the first batch of a loader, or of each loader in a collection."""
    if isinstance(loader, (dict, list, tuple)):
        return apply_to_collection(loader, DataLoader, _first, dry)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        if not dry:
            raise NotImplementedError("the training loader can only be read from its beginning")
    elif loader.batch_size is not None:  # in the dataset's order: a sampler's generator belongs to the run
        loader = DataLoader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn)
    else:
        loader = copy.copy(loader)
        loader.num_workers, loader.pin_memory = 0, False
    return next(iter(cast(Iterable[object], loader)))


def transferred(batch: object, module: LightningModule, data: object, device: torch.device) -> object:
    """Returns a micro-batch as the hooks of the module, or those of its data, bring it to the device."""
    for hook in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        owner = module if is_overridden(hook, module, LightningModule) else data
        batch = getattr(owner, hook)(batch, *((device,) if hook.startswith("transfer") else ()), 0)
    return batch
