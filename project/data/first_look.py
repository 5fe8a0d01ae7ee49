"""Checks that a split's first images are bytes in 0 .. 255, or floats in 0 .. 1, of some channels. Impossible values are
refused, suspicious ones produce a warning. The host waits for the device here, once for each split."""

import torch
from torch import Tensor

from project.data.augment import Channels
from project.data.items import Unfit

# Of floats in 0 .. 1. Resizing goes a little beyond; noise, say, a little more.
_USUAL, _POSSIBLE = (-0.1, 1.1), (-0.5, 2.0)
_BYTES = "Is that meant? HINT: uint8 is 0 .. 255; what is in 0 .. 1 must stay floats."
_FLOATS = (
    "HINT: floats are in 0 .. 1, and are normalised here, by the source's mean and std. Leave out Normalize in your transforms "
    "and divide bytes by 255, or return them as uint8. To normalise yourself, set the source's mean to 0 and its std to 1."
)


def examine(images: Tensor, samples: Tensor, split: str, mean: Channels, std: Channels) -> list[str]:
    """Returns doubts about the first images of a split, as the dataset gives them. Impossible values raise an error."""
    who, dtype = f"The images of the {split} set", str(images.dtype).removeprefix("torch.")
    if images.dtype.is_complex or not (images.dtype == torch.uint8 or images.dtype.is_floating_point):
        raise Unfit(
            f"{who} are {dtype}. HINT: return uint8 in 0 .. 255, or floats in 0 .. 1 (16-bit images: divided by 65535)."
        )
    low, high = (value.item() for value in images.aminmax())
    doubts = []
    if images.dtype == torch.uint8:
        if high <= 1:
            doubts.append(f"{who} are bytes, and the first {len(images)} have none over {high}. {_BYTES}")
    elif not (torch.tensor(mean) == 0).all() or not (torch.tensor(std) == 1).all():  # else the user has normalised them
        lowest, highest = images.flatten(1).amin(1), images.flatten(1).amax(1)
        extreme = int(samples[int((highest if high > _USUAL[1] else -lowest).argmax())])
        range_ = f"are {dtype} from {low:.3g} to {high:.3g} (first seen in sample {extreme})"
        if low < _POSSIBLE[0] or high > _POSSIBLE[1]:
            raise Unfit(f"{who} {range_}. {_FLOATS}")
        if low < _USUAL[0] or high > _USUAL[1]:
            doubts.append(f"{who} {range_}. Is that meant? {_FLOATS}")
        elif high < 1.01 / 255:  # divided by 255 twice
            doubts.append(f"{who} are nearly black: the first {len(images)} have no value over {high:.3g}. {_FLOATS}")
    channels, height, width = images.shape[1:]
    if channels > 4 >= min(height, width):
        doubts.append(
            f"{who} have {channels} channels and {height} x {width} pixels. Is that meant? HINT: a tensor is (C, H, W), an "
            "array (H, W, C)."
        )
    return doubts
