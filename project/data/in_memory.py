"""Holds a dataset that fits into memory, or into that of a device."""

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from project.data.items import as_labels, as_tensor, image_and_label
from project.data.order import size_of

AT_ONCE = 512  # samples that are read at once, at most


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on the device. A GPU copies it from pinned memory, and the host does not wait."""
    if device.type == "cuda" and not tensor.is_cuda:
        return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)
    return tensor.to(device)


class InMemory(Dataset[tuple[Tensor, Tensor]]):
    """A dataset that fits into memory, or into that of a device: a batch is one indexing operation."""

    in_bulk = True

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = sent(torch.as_tensor(indices), self.images.device)
        return self.images.index_select(0, chosen), self.labels.index_select(0, chosen)


class _Bulk(Protocol):
    """A dataset whose `__getitems__` takes a tensor, as `in_bulk` says."""

    def __getitems__(self, indices: Tensor) -> tuple[Tensor, object]: ...


def whole(dataset: Dataset[object], device: torch.device, at_most: int) -> InMemory | None:
    """Returns a whole dataset on the device, if it is on it already or can be made in bulk in `at_most` bytes; else None."""
    if isinstance(dataset, InMemory) and dataset.images.device == device:
        return dataset
    if not in_bulk(dataset):
        return None
    size = size_of(dataset)
    if size * as_tensor(image_and_label(dataset[0])[0]).nbytes > at_most:
        return None
    numbers = torch.arange(size).split(AT_ONCE)
    parts = [*map(cast(_Bulk, dataset).__getitems__, numbers)]
    images, labels = [image for image, _ in parts], [as_labels(label) for _, label in parts]
    return InMemory(torch.cat(images).to(device), torch.cat(labels).to(device))


def in_bulk(dataset: Dataset[object]) -> bool:
    """Returns whether its `__getitems__` takes a tensor, and hardly more time for many images than for a few."""
    return bool(getattr(dataset, "in_bulk", False))
