"""SyntheticImages is a dataset of any size that can be learnt, takes no memory and needs no download.

Each class has a smooth pattern of its own; an image is its class's pattern, moved by up to two pixels, under noise. The image
and the label at an index depend on (seed, index) alone: all arithmetic is on integers, so they are the same everywhere.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from project.errors import UserError

SPLITS = ("train", "val", "test")
_SPLIT_BITS = 40  # each split has its own range of 2**40 indices, so that no two share an image
_SHIFT = 2
_NOISE_BYTES = 1 << 20


def scatter(x: Tensor) -> Tensor:
    """Scatters 64-bit integers: two rounds of multiply and shift, all in wrapping int64 arithmetic."""
    x = x * (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * (0xD6E8FEB86659FD93 - (1 << 64))
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def _windows(bank: Tensor, starts: Tensor, length: int) -> Tensor:
    """Returns rows bank[starts[i] : starts[i] + length]: a memcpy a row, which no other kind of indexing is."""
    return bank.unfold(0, length, 1).index_select(0, starts)


class SyntheticImages(Dataset[tuple[Tensor, Tensor]]):
    """Deterministic uint8 images of shape (channels, image_size, image_size) and their labels.

    Args:
        split: 'train', 'val' or 'test'; no image is in two of them.
        difficulty: share of images that show the pattern of a class drawn at random, whatever their label says.
        seed: another seed, another world: other patterns, other images.
    """

    in_bulk = True

    def __init__(
        self,
        size: int,
        split: str = "train",
        num_classes: int = 10,
        image_size: int = 32,
        channels: int = 3,
        difficulty: float = 0.1,
        seed: int = 0,
    ) -> None:
        if not 0 < size <= 1 << _SPLIT_BITS:
            raise UserError(f"{split}_size: a synthetic dataset has between 1 and 2**{_SPLIT_BITS} images, not {size}.")
        for name, value in {"num_classes": num_classes, "image_size": image_size, "channels": channels}.items():
            if value < 1:
                raise UserError(f"{name} is 1 at least for a synthetic dataset, not {value}.")
        if split not in SPLITS:
            raise UserError(f"A synthetic dataset's split is one of {SPLITS}, not {split!r}.")
        if not 0 <= difficulty <= 1:
            raise UserError(f"difficulty is a share between 0 and 1, not {difficulty}.")
        self.size, self.num_classes, self.difficulty, self.seed = size, num_classes, difficulty, seed
        self.shape = (channels, image_size, image_size)
        self._offset = SPLITS.index(split) << _SPLIT_BITS
        self._patterns = self._make_patterns()
        words = self._random(2, (_NOISE_BYTES + channels * image_size * image_size) // 8 + 1)
        self._noise = (words.view(torch.uint8).int() * 96 >> 8).to(torch.uint8)  # each image takes two windows of it
        self._words = torch.tensor([[0], [0], [0], [1], [1], [1]])
        self._fields = torch.tensor([[0], [20], [40], [0], [20], [40]])
        ranges = [num_classes, num_classes, 1 << 20, (2 * _SHIFT + 1) ** 2, _NOISE_BYTES, _NOISE_BYTES]
        self._ranges = torch.tensor(ranges)[:, None]

    def _random(self, stream: int, count: int) -> Tensor:
        """Returns `count` words from one of the streams that belong to the seed."""
        key = scatter(scatter(torch.tensor([self.seed])) + stream)
        return scatter(key + torch.arange(count))

    def _make_patterns(self) -> Tensor:
        """Makes one smooth image a class and channel, as flat planes with spare rows: a shift is an offset. A coarse grid of
        random bytes is interpolated with integer weights; values are 0 .. 63."""
        channels, size, _ = self.shape
        cell = max(2, size // 4)
        cells = -(-(size + 2 * _SHIFT + 1) // cell) + 1
        planes = self.num_classes * channels
        grid = (self._random(1, planes * cells * cells) & 0x3F).view(planes, cells, cells)
        along = torch.arange((cells - 1) * cell)
        low, part = along // cell, along % cell
        rows = grid[:, low] * (cell - part)[:, None] + grid[:, low + 1] * part[:, None]
        full = (rows[:, :, low] * (cell - part) + rows[:, :, low + 1] * part) // (cell * cell)
        return full[:, : size + 2 * _SHIFT + 1, :size].to(torch.uint8).flatten()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} of a dataset of {self.size} images")
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Returns a whole batch at once: images (B, C, H, W) in uint8, labels (B,) in int64."""
        channels, size, _ = self.shape
        pixels, shifts = size * size, 2 * _SHIFT + 1
        keys = torch.as_tensor(indices, dtype=torch.int64) + self._offset + (self.seed << 44)
        # Six random numbers an image, each of 20 bits, scaled to its range: few operations, because at a batch of 64
        # it is their number that costs, not their size.
        words = scatter(scatter(keys) + self._words)
        label, stray, luck, shift, first, second = (((words >> self._fields) & 0xFFFFF) * self._ranges >> 20).unbind()

        shown = torch.where(luck < int(self.difficulty * (1 << 20)), stray, label)
        plane = (size + shifts) * size
        starts = shown * (channels * plane) + shift // shifts * size + shift % shifts
        starts = (starts + torch.arange(0, channels * plane, plane)[:, None]).T.reshape(-1)
        images = _windows(self._patterns, starts, pixels).view(-1, channels * pixels)
        images += _windows(self._noise, first, channels * pixels)
        images += _windows(self._noise, second, channels * pixels)
        return images.view(-1, *self.shape), label
