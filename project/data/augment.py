"""Augments and normalises a batch of images: random crop and flip, a function of (seed, epoch, sample) alone, in uint8; then
floats of zero mean and unit variance."""

from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from project.data.synthetic import scatter
from project.errors import UserError

Channels = float | tuple[float, ...]
Flip = bool | Literal["alternate"]


def drawn_moves(samples: Tensor, epoch: int, seed: int, padding: int, flip: Flip, width: int) -> Tensor:
    """Returns each image's first row, its first column, and the direction of its columns (1 or -1): (3, B)."""
    numbers = cast(Tensor, samples.numpy())  # a few hundred: NumPy's operators, the same ones, take a third of the time
    chance = scatter(scatter(numbers + (epoch << 40)) + seed)
    places = 2 * padding + 1
    down, right = (chance & 0xFFFF) * places >> 16, (chance >> 16 & 0xFFFF) * places >> 16
    if flip == "alternate":
        mirrored = (scatter(scatter(numbers) + seed) >> 32 & 1) ^ (epoch & 1)
    else:
        mirrored = (chance >> 32 & 1) * bool(flip)
    return torch.from_numpy(np.array((down, right + (width - 1) * mirrored, 1 - 2 * mirrored)))


def crop_and_flip(images: Tensor, moves: Tensor, padding: int) -> Tensor:
    """Moves and mirrors each image by `moves`, in one gather; zeros fill the edges. The result is NHWC in memory, which is what
    the convolutions want."""
    height, width = images.shape[-2:]
    images = torch.nn.functional.pad(images, (padding,) * 4)
    row, column, direction = moves[:, :, None].unbind()
    rows = torch.arange(height, device=images.device) + row
    columns = torch.addcmul(column, direction, torch.arange(width, device=images.device))
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    return images[batch, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Normalise:
    """Converts uint8 images, or floats in 0 .. 1, to floats of zero mean and unit variance. `mean` and `std` are of images in
    0 .. 1, one for all channels or one for each."""

    def __init__(self, mean: Channels, std: Channels, device: torch.device) -> None:
        means, stds = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
        if not (means.abs() <= 1).all() or not ((stds > 0) & (stds <= 1)).all():
            raise UserError(
                f"The source's mean {mean} and std {std} are not of images in 0 .. 1. HINT: divide those of bytes by 255."
            )
        self._scalar = means.numel() == stds.numel() == 1
        self._scales = {top: (1 / (stds * top)).float() for top in (1.0, 255.0)}
        self._factors = {top: scale.mean().item() for top, scale in self._scales.items()}
        self._scales = {top: scale.to(device) for top, scale in self._scales.items()}
        shift = (-means / stds).float().to(device)
        self._shift = shift.view(()) if self._scalar else shift

    def __call__(self, images: Tensor) -> Tensor:
        top = 255.0 if images.dtype == torch.uint8 else 1.0
        if self._scalar and images.device.type != "cpu":  # one launch; a CPU is faster in two passes
            return torch.add(self._shift, images, alpha=self._factors[top])
        floats = images.to(torch.float32, copy=True)
        if self._scalar:
            return torch.add(self._shift, floats, alpha=self._factors[top], out=floats)
        return floats.mul_(self._scales[top]).add_(self._shift)
