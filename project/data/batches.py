"""A micro-batch: how it is read from a dataset, and what travels with the images.

`MicroBatches` looks like a dataset whose items are whole micro-batches, so a DataLoader's worker makes one in a single call:
by the dataset's own `__getitems__` where it returns (images, labels) for a batch, image by image otherwise. A dataset that is
`in_bulk` makes several micro-batches in a call: of small images, it is the number of calls that costs.
"""

import random
from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from project.data.order import Key, Order, chance

_AHEAD_SAMPLES, _AHEAD_BYTES = 512, 4 << 20  # made at once, at most


class Batch(TypedDict):
    """What a step gets. `image` is uint8 (B, C, H, W) until the device has normalised it."""

    image: Tensor
    label: Tensor
    sample: Tensor
    """The samples' numbers in their dataset."""
    key: Key
    """(epoch, step within the epoch, number within the step)."""
    chance: int
    """The seed of all that is drawn at random for this micro-batch."""
    weight: float
    """What the mean loss of this micro-batch counts for in its step: 1.0 except in a shorter last step."""


def as_tensor(image: Any) -> Tensor:
    """An image as a (C, H, W) tensor: from a tensor, an array or a PIL image."""
    if isinstance(image, Tensor):
        return image
    array = np.array(image)
    if array.ndim == 2:
        array = array[:, :, None]
    return torch.from_numpy(array).permute(2, 0, 1)


class InMemory(Dataset[tuple[Tensor, Tensor]]):
    """Images and labels that fit into memory, or into that of a device: a batch is one indexing operation."""

    in_bulk = True

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: Any) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices).to(self.images.device, non_blocking=True)
        return self.images.index_select(0, chosen), self.labels.index_select(0, chosen)


def whole(dataset: Dataset[Any], device: torch.device, at_most: int) -> InMemory | None:
    """All of a dataset, on the device, if it lies there already, or is made in bulk and takes so many bytes at most."""
    if isinstance(dataset, InMemory) and dataset.images.device == device:
        return dataset
    size: int = len(dataset)  # type: ignore[arg-type]
    if not in_bulk(dataset) or size * as_tensor(dataset[0][0]).nbytes > at_most:
        return None
    numbers = torch.arange(size).split(_AHEAD_SAMPLES)  # type: ignore[no-untyped-call]
    images, labels = zip(*(dataset.__getitems__(some) for some in numbers), strict=True)  # type: ignore[attr-defined]
    return InMemory(torch.cat(images).to(device), torch.cat(labels).to(device))


def in_bulk(dataset: Dataset[Any]) -> bool:
    """Whether its `__getitems__` takes a tensor, and hardly more time for many images than for a few."""
    return bool(getattr(dataset, "in_bulk", False))


class MicroBatches(Dataset[Batch]):
    """The micro-batches of a dataset, by key."""

    def __init__(self, dataset: Dataset[Any], order: Order) -> None:
        self.dataset, self.order = dataset, order
        self._ahead: dict[Key, Batch] = {}
        self._at_once = 1

    def __len__(self) -> int:
        return self.order.steps * self.order.micro_batches

    def __getitem__(self, key: Key) -> Batch:
        if key not in self._ahead:
            self._ahead = dict(zip(keys := self._run(key), self._make(keys), strict=True))
        return self._ahead.pop(key)

    def _run(self, key: Key) -> list[Key]:
        """The micro-batches that are made together: this one, and those that will be asked for next."""
        keys = [key]
        while len(keys) < self._at_once and (following := self.order.after(keys[-1]))[1] < self.order.steps:
            keys.append(following)
        return keys

    def _make(self, keys: list[Key]) -> list[Batch]:
        parts = [self.order.indices(key) for key in keys]
        samples = torch.from_numpy(np.concatenate(parts))
        images, labels = self._read(samples, keys[0])
        sizes = [len(part) for part in parts]
        # A loader's processes each have other micro-batches, and would send what lies beside a tensor with it.
        if in_bulk(self.dataset) and get_worker_info() is None and sizes[0]:
            bound = min(_AHEAD_SAMPLES, _AHEAD_BYTES // max(1, images[0].nbytes))
            self._at_once = max(1, bound // self.order.micro_batch)
        cut = [part.split(sizes) for part in (images, labels, samples)]  # type: ignore[no-untyped-call]
        return [
            Batch(
                image=image,
                label=label,
                sample=sample,
                key=key,
                chance=chance(self.order.seed or 0, key),
                weight=self.order.weight(*key[1:]),
            )
            for key, image, label, sample in zip(keys, *cut, strict=True)
        ]

    def _read(self, samples: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        if not len(samples):  # fewer samples than ranks: a batch of none, of the right shape
            images, labels = self._read(torch.zeros(1, dtype=torch.int64), key)
            return images[:0], labels[:0]
        together: Callable[[Any], Any] | None = getattr(self.dataset, "__getitems__", None)
        if not together:  # what a dataset of one's own draws at random is the same in any worker, and after a restart
            seed = chance(self.order.seed or 0, key)
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
        given: Any = samples if in_bulk(self.dataset) else samples.tolist()
        items = together(given) if together else [self.dataset[i] for i in given]
        if isinstance(items, tuple):
            return items
        pairs = [(as_tensor(image), int(label)) for image, label in items]
        shapes = {tuple(image.shape) for image, _ in pairs}
        if len(shapes) > 1:
            raise ValueError(
                f"{type(self.dataset).__name__} gives images of different shapes: {sorted(shapes)[:3]}. "
                "HINT: resize them in its transform."
            )
        return torch.stack([image for image, _ in pairs]), torch.tensor([label for _, label in pairs])


class MicroBatchLoader(DataLoader[Batch]):
    """A DataLoader of micro-batches, without what torch's own iterator does in between, where it would do nothing for them."""

    def __iter__(self) -> Any:
        if self.num_workers or self.pin_memory:
            return super().__iter__()
        return map(self.dataset.__getitem__, self.sampler)  # otherwise it takes as long again as picking the images
