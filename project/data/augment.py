"""Augments and normalises a batch of images: random crop and flip in uint8, then floats of zero mean and unit variance.

The crop and the flip of an image depend on (seed, epoch, sample) alone, not on the rank, the batch or what was drawn before.
The host draws them, from the samples' numbers, which it knows; the device moves the pixels, in few operations.
"""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from project.data.synthetic import scatter
from project.errors import UserError

Channels = float | tuple[float, ...]
Flip = bool | Literal["alternate"]


def drawn_moves(samples: Any, epoch: int, seed: int, padding: int, flip: Flip, width: int) -> Tensor:
    """Returns each image's first row, its first column, and the direction of its columns (1 or -1): (3, B).

    An image is moved by 0 .. 2 * `padding` pixels down and to the right, and mirrored or not.
    """
    samples = samples.numpy()  # a few hundred numbers, of which NumPy makes others in a third of the time
    chance = scatter(scatter(samples + (epoch << 40)) + seed)
    number = 2 * padding + 1
    down, right = (chance & 0xFFFF) * number >> 16, (chance >> 16 & 0xFFFF) * number >> 16
    drawn = (scatter(scatter(samples) + seed) if flip == "alternate" else chance) >> 32 & 1
    mirrored = drawn ^ (epoch & 1) if flip == "alternate" else drawn * bool(flip)
    return torch.from_numpy(np.array((down, right + (width - 1) * mirrored, 1 - 2 * mirrored)))


def crop_and_flip(images: Tensor, moves: Tensor, padding: int, padded: bool = False) -> Tensor:
    """Moves and mirrors each image by `moves`; zeros fill the edges. `padded`: the zeros are there already.

    One gather for the whole batch. The result is NHWC in memory, which is what the convolutions want.
    """
    if not padded:
        images = torch.nn.functional.pad(images, (padding,) * 4)
    height, width = (size - 2 * padding for size in images.shape[-2:])
    row, column, onwards = moves[:, :, None].unbind()
    rows = torch.arange(height, device=images.device) + row
    columns = torch.addcmul(column, onwards, torch.arange(width, device=images.device))
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    return images[batch, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Normalise:
    """Converts uint8 images to floats of zero mean and unit variance; float images are in 0 .. 1 (see `first_look`).

    Args:
        mean: of images in 0 .. 1, one for all channels or one for each.
        std: their standard deviation, likewise.
    """

    def __init__(self, mean: Channels, std: Channels, device: torch.device) -> None:
        means, stds = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
        if not (means.abs() <= 1).all() or not ((stds > 0) & (stds <= 1)).all():
            raise UserError(
                f"The source's mean {mean} and std {std} are not of images in 0 .. 1. HINT: divide those of bytes by 255."
            )
        self._scalar = means.numel() == stds.numel() == 1
        scales = {top: (1 / (stds * top)).float() for top in (1.0, 255.0)}
        self._numbers = {top: scale.mean().item() for top, scale in scales.items()}
        self._scales = {top: scale.to(device) for top, scale in scales.items()}
        self._shift = (-means / stds).float().to(device)
        self._shift = self._shift.view(()) if self._scalar else self._shift

    def __call__(self, images: Tensor) -> Tensor:
        top = 255.0 if images.dtype == torch.uint8 else 1.0
        if self._scalar and images.device.type != "cpu":  # one launch; a CPU is faster in two passes
            return torch.add(self._shift, images, alpha=self._numbers[top])
        floats = images.float() if images.dtype != torch.float32 else images.clone()
        # In place, and in one pass if that will do: passes over memory are what takes the time.
        if self._scalar:
            return torch.add(self._shift, floats, alpha=self._numbers[top], out=floats)
        return floats.mul_(self._scales[top]).add_(self._shift)
