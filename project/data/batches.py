"""A micro-batch: how it is read from a dataset, and what travels with the images.

`MicroBatches` looks like a dataset whose items are whole micro-batches, so a DataLoader's worker makes one in a single call:
by the dataset's own `__getitems__` where it returns (images, labels) for a batch, image by image otherwise.
"""

import random
from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from project.data.order import Key, Order, chance


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
    """Images and labels that fit into memory: a batch is one indexing operation."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: Any) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return self.images.index_select(0, chosen), self.labels.index_select(0, chosen)


class MicroBatches(Dataset[Batch]):
    """The micro-batches of a dataset, by key."""

    def __init__(self, dataset: Dataset[Any], order: Order) -> None:
        self.dataset, self.order = dataset, order

    def __len__(self) -> int:
        return self.order.steps * self.order.micro_batches

    def __getitem__(self, key: Key) -> Batch:
        samples = self.order.indices(key)
        images, labels = self._read(samples, key)
        return Batch(
            image=images,
            label=labels,
            sample=torch.from_numpy(samples),
            key=key,
            chance=chance(self.order.seed or 0, key),
            weight=self.order.weight(*key[1:]),
        )

    def _read(self, samples: np.ndarray[Any, Any], key: Key) -> tuple[Tensor, Tensor]:
        if not len(samples):  # fewer samples than ranks: a batch of none, of the right shape
            images, labels = self._read(np.zeros(1, dtype=np.int64), key)
            return images[:0], labels[:0]
        whole: Callable[[Any], Any] | None = getattr(self.dataset, "__getitems__", None)
        if not whole:  # what a dataset of one's own draws at random is the same in any worker, and after a restart
            seed = chance(self.order.seed or 0, key)
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
        items = whole(samples.tolist()) if whole else [self.dataset[int(i)] for i in samples]
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
