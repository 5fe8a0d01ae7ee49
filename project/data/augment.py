"""What the device does to a batch: random crop and flip in uint8, then floats of zero mean and unit variance.

The crop and the flip of an image depend on (seed, epoch, sample) alone, not on the rank, the batch or what was drawn before.
"""

import torch
from torch import Tensor

from project.data.synthetic import scatter


def crop_and_flip(images: Tensor, samples: Tensor, epoch: int, seed: int, padding: int, flip: bool) -> Tensor:
    """Moves each image by up to `padding` pixels each way (zeros come in); `flip` mirrors half of them.

    One gather for the whole batch. The result is NHWC in memory, which is what the convolutions want.
    """
    height, width = images.shape[-2:]
    chance = scatter(scatter(samples + (epoch << 40)) + seed)
    moves = 2 * padding + 1
    down = (chance & 0xFFFF) * moves >> 16
    right = (chance >> 16 & 0xFFFF) * moves >> 16

    rows = torch.arange(height, device=images.device) + down[:, None]
    columns = torch.arange(width, device=images.device) + right[:, None]
    if flip:
        mirrored = (chance >> 32 & 1).bool()
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    return padded[batch, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """uint8 images to floats; images that are floats already are taken to be in 0 .. 1."""
    scale = 255.0 if images.dtype == torch.uint8 else 1.0
    floats = images.float() if images.dtype != torch.float32 else images.clone()
    return floats.sub_(mean * scale).mul_(1 / (std * scale))  # in place: passes over new memory are what takes the time
