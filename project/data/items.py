"""Parses an item of a dataset, (image, label) or a dict with those keys as Hugging Face's datasets give them; and describes
one that is neither."""

import os
from collections.abc import Mapping, Sequence
from operator import index
from typing import Protocol, SupportsIndex, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from project.errors import UserError

_IMAGE_KEYS, _LABEL_KEYS = ("image", "img"), ("label", "labels")
_RGB = ("P", "PA", "CMYK", "YCbCr", "LAB", "HSV")  # numbers in a palette, or colours that are not red, green and blue
_ROUNDING = 0.01  # of shares that should sum to 1
_LABELS = "HINT: a label is the number of a class, 0 .. num_classes-1, or a vector of floats with a share for each class."


class Unfit(UserError):
    """Raised when data can't be trained on and its owner can mend it."""


def image_and_label(item: object, labelled: bool = True) -> tuple[object, object]:
    """Returns the two parts of an item. If it need not be `labelled`, it may also be an image alone."""
    if isinstance(item, (tuple, list)):
        if len(item) == 2 or (item and not labelled):
            return item[0], item[1] if len(item) > 1 else None
    elif isinstance(item, Mapping):
        image = next((name for name in _IMAGE_KEYS if name in item), None)
        label = next((name for name in _LABEL_KEYS if name in item), None)
        if image is not None and (label is not None or not labelled):
            return item[image], item.get(label)
    elif not labelled:
        return item, None
    raise Unfit(
        f"is {described(item)}, and not (image, label) or a dict with the keys image and label. "
        "HINT: return those two from the dataset's __getitem__."
    )


def as_tensor(image: object) -> Tensor:
    """Returns an image as a (C, H, W) tensor: from a tensor (C, H, W) or (H, W), an array (H, W, C) or (H, W), or a PIL
    image."""
    if isinstance(image, Image.Image) and image.mode in _RGB:
        image = image.convert("RGB")
    try:
        tensor = image if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    except (TypeError, ValueError):  # torch has no tensors of such things
        raise Unfit(
            f"has {described(image)} for an image. HINT: an image is a tensor (C, H, W), an array (H, W, C) or a PIL image."
        ) from None
    if tensor.ndim == 2:
        return tensor[None]
    if tensor.ndim == 3:
        return tensor if isinstance(image, Tensor) else tensor.permute(2, 0, 1)
    raise Unfit(
        f"has an image of shape {tuple(tensor.shape)}. HINT: a tensor is (C, H, W) or (H, W), an array (H, W, C) or (H, W)."
    )


def as_label(label: object) -> Tensor:
    """Returns a label as the number of a class, or as a vector of shares."""
    try:
        return torch.tensor(index(cast(SupportsIndex, label)))  # anything that is a whole number, and nothing else
    except TypeError:
        pass
    if isinstance(label, (str, bytes)):
        raise Unfit(f"has the label {label!r}, and not a number. HINT: number the classes from 0, and return that number.")
    try:
        tensor = torch.as_tensor(label if isinstance(label, Tensor) else np.asarray(label))
    except (TypeError, ValueError):
        raise Unfit(f"has {described(label)} for a label. {_LABELS}") from None
    return as_labels(tensor[None])[0]


def as_labels(labels: object) -> Tensor:
    """Returns the labels of a batch: whole numbers (B,), or shares (B, classes) in floats."""
    given = torch.as_tensor(labels)
    shares = given.is_floating_point()
    if given.ndim == 2 and shares and given.shape[1] > 1:
        return given.float()
    if given.numel() == len(given) and not given.is_complex():
        numbers = given.flatten()
        if not shares or not len(fractions := numbers[numbers != numbers.long()]):
            return numbers.long()
        raise Unfit(f"has the label {fractions[0]:g}, which is not the number of a class. {_LABELS}")
    hint = _LABELS
    if given.ndim == 2 and not shares:
        hint = "HINT: of a one-hot vector return its argmax, or the vector as floats."
    raise Unfit(f"has {described(given[0])} for a label. {hint}")


def wrong_label(labels: Tensor, classes: int) -> tuple[int, str] | None:
    """Returns the first label of a batch that is no class of `classes`, and why; None if all are."""
    if not len(labels):
        return None
    if labels.ndim == 1:
        # As unsigned numbers, the negative ones are large: one look instead of two.
        if int(labels.numpy().view(np.uint64).max()) < classes:
            return None
        place = int(((labels < 0) | (labels >= classes)).nonzero()[0])
        label = int(labels[place])
        more = ""
        if label == classes:
            more = f"; if classes are numbered from 1, subtract 1, if there are more, set num_classes={classes + 1}"
        elif label < 0:
            more = "; leave samples without a label out of the dataset"
        return place, f"has the label {label}, and there are {classes} classes. HINT: labels are 0 .. {classes - 1}{more}."
    if labels.shape[1] != classes:
        return 0, (
            f"has a vector of {labels.shape[1]} for a label, and there are {classes} classes. "
            f"HINT: a share for each class, or num_classes={labels.shape[1]}."
        )
    wrong = (labels.min(1).values < -_ROUNDING) | ((labels.sum(1) - 1).abs() > _ROUNDING) | labels.isnan().any(1)
    if not wrong.any():
        return None
    place = int(wrong.nonzero()[0])
    return place, (
        f"has {described(labels[place])} for a label. HINT: shares are not negative and sum to 1; a sample in several classes "
        "at once is not what this loss is for."
    )


class _Listed(Protocol):
    """A dataset as torchvision's folders: its samples are files, or begin with one."""

    samples: Sequence[object]


def file_of(dataset: object, number: int) -> str | None:
    """Returns the file of a sample, where the dataset, or the one that it is a part of, lists them in `samples`."""
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # torch's Subset
        number, dataset = dataset.indices[number], dataset.dataset
    try:
        entry = cast(_Listed, dataset).samples[number]
    except (AttributeError, TypeError, LookupError):
        return None
    path = entry[0] if isinstance(entry, (tuple, list)) and entry else entry
    return os.fspath(path) if isinstance(path, (str, os.PathLike)) else None


def described(value: object) -> str:
    """Returns a short description of a value."""
    kind = type(value).__name__
    if isinstance(value, (Tensor, np.ndarray)):
        values = f" {value.tolist()}" if len(value.shape) == 1 and len(value) <= 10 else ""
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{'a tensor' if isinstance(value, Tensor) else 'an array'} of {dtype} {tuple(value.shape)}{values}"
    if isinstance(value, Image.Image):
        return f"a PIL image ({value.mode}, {value.width}x{value.height})"
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(map(str, list(value)[:8]))}"
    if isinstance(value, (str, bytes)):
        return f"the {kind} {value[:40]!r}"
    if isinstance(value, Sequence):
        parts = ", ".join(described(part) for part in value[:4])
        return f"a {kind} of {len(value)} ({parts}{', ...' if len(value) > 4 else ''})"
    if isinstance(value, (int, float)):
        return f"the {kind} {value!r}"
    return "None" if value is None else f"a {kind}"
