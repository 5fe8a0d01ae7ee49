"""Datasets as users bring them, for tests to plug in by class_path: one for each way to return an image and a label."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset

CLASSES = 10


def _bytes(index: int) -> torch.Tensor:
    return torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))


def _vector(index: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(index % CLASSES), CLASSES)


ITEMS = {
    "usual": lambda i: (_bytes(i), i % CLASSES),
    "dict": lambda i: {"image": Image.fromarray(_bytes(i).permute(1, 2, 0).numpy()), "label": i % CLASSES, "id": "x"},
    "other names": lambda i: {"img": _bytes(i), "labels": np.int64(i % CLASSES)},
    "shares": lambda i: (_bytes(i), 0.9 * _vector(i).float() + 0.1 / CLASSES),
    "shares in doubles": lambda i: (_bytes(i), _vector(i).double().numpy()),
    "whole floats": lambda i: (_bytes(i).numpy().transpose(1, 2, 0), float(i % CLASSES)),
    "normalised by itself": lambda i: ((_bytes(i) / 255 - 0.5) / 0.25, i % CLASSES),
    # and what can't be meant
    "three parts": lambda i: (_bytes(i), i % CLASSES, "cat.jpg"),
    "other keys": lambda i: {"x": _bytes(i), "y": 1},
    "one-hot": lambda i: (_bytes(i), _vector(i)),
    "several classes": lambda i: (_bytes(i), (_vector(i) + _vector(i + 1)).float()),
    "too few shares": lambda i: (_bytes(i), torch.tensor([0.5, 0.5])),
    "names": lambda i: (_bytes(i), "cat"),
    "fractions": lambda i: (_bytes(i), i % CLASSES + 0.7),
    "no label": lambda i: (_bytes(i), -100 if i == 41 else i % CLASSES),
    "from one": lambda i: (_bytes(i), i % CLASSES + 1),
    "no image": lambda i: ({"bytes": b"GIF"}, i % CLASSES),
    "bytes as floats": lambda i: (_bytes(i).float(), i % CLASSES),
    "mixed types": lambda i: (_bytes(i) if i % 2 else _bytes(i) / 255, i % CLASSES),
}


class Strange(Dataset[Any]):
    """Images of noise, and labels; `how` they are returned."""

    def __init__(self, how: str = "usual", size: int = 64) -> None:
        self.how, self.size = how, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return ITEMS[self.how](index)


class Lists(Strange):
    """As Hugging Face's datasets have it: a list of items for a list of numbers."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert isinstance(indices, list)
        return [self[index] for index in indices]


class Together(Strange):
    """Whole batches, of labels as a network might have left them."""

    def __init__(self, dtype: torch.dtype = torch.int32, low: int = 0, size: int = 64) -> None:
        super().__init__(size=size)
        self.dtype, self.low = dtype, low

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.tensor([index % CLASSES for index in indices]) + self.low
        return torch.stack([_bytes(index) for index in indices]), labels.to(self.dtype)[:, None]


class Stream(IterableDataset[Any]):
    """Samples that nobody can ask for by number."""

    def __iter__(self) -> Any:
        return map(ITEMS["usual"], range(64))


class Drawn(Dataset[Any]):
    """Each image is noise that is drawn when it is asked for."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3, 8, 8), index % CLASSES


def part(dataset: Dataset[Any]) -> Subset[Any]:
    """All of it but the first ten."""
    return Subset(dataset, range(10, len(dataset)))  # type: ignore[arg-type]


def make(how="usual", **settings):
    """A function without hints, as those that load datasets often are."""
    return Strange(how, **settings)


class Alone(Strange):
    """Images without labels."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return _bytes(index)
