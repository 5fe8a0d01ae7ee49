"""The sources of images: each names its classes, fetches its data once a node, and makes the datasets 'train', 'val' and
'test' on every rank."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from project.data.augment import Channels
from project.data.in_memory import InMemory
from project.data.order import permute
from project.data.synthetic import SyntheticImages
from project.errors import FaultError, UserError

Split = Literal["train", "val", "test", "predict"]


class Source(ABC):
    """The interface of a source for ImageData. `mean` and `std` are of images in 0 .. 1, one for all channels or one each."""

    num_classes: int
    classes: Sequence[str] | None = None
    """Their names, where they have some."""
    mean: Channels = 0.5
    std: Channels = 0.25

    def prepare(self) -> None:  # noqa: B027, because most sources have nothing to prepare
        """Downloads or checks the data, once a node."""

    def has(self, split: Split) -> bool:
        """Returns whether this split exists. Without 'val' there is no validation; without 'predict' it is of 'test'."""
        return split != "predict"

    @abstractmethod
    def dataset(self, split: Split) -> Dataset[object]:
        """Returns the dataset of a split."""


def _held_out(size: int, held_out: int, split: Split) -> torch.Tensor:
    """Returns the samples of 'train' or 'val', for data without a validation split: always the same ones."""
    if not 0 < held_out < size:
        raise UserError(f"held_out must leave training and validation images of {size}, and is {held_out}.")
    order = permute(np.arange(size), size, seed=0, epoch=0)
    return torch.from_numpy(order[:held_out] if split == "val" else np.sort(order[held_out:]))


class Synthetic(Source):
    """SyntheticImages, which a network can learn and which need no download.

    Args:
        image_size: height and width.
        difficulty: share of images whose pattern is unrelated to their label.
        world: selects the patterns and images: another number gives other data.
    """

    mean: Channels = 0.49
    std: Channels = 0.13

    def __init__(
        self,
        train_size: int = 50_000,
        val_size: int = 5_000,
        test_size: int = 10_000,
        num_classes: int = 10,
        image_size: int = 32,
        channels: int = 3,
        difficulty: float = 0.1,
        world: int = 0,
    ) -> None:
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self.num_classes = num_classes
        self._rest = (num_classes, image_size, channels, difficulty, world)

    def dataset(self, split: Split) -> SyntheticImages:
        return SyntheticImages(self.sizes[split], split, *self._rest)


class _Archive(Protocol):
    """A dataset of torchvision's that lies in memory: images (samples, height, width, channels), in bytes."""

    data: NDArray[np.uint8]
    targets: list[int]
    classes: list[str]


class Cifar(Source):
    """CIFAR-10 or CIFAR-100, downloaded by torchvision; validation images are held out of the training set.

    Args:
        root: the folder that holds the data, or receives it.
        num_classes: 10 or 100.
        held_out: training images held out for validation.
        download: fetch the data if it is missing.
    """

    mean: Channels = (0.4914, 0.4822, 0.4465)
    std: Channels = (0.2470, 0.2435, 0.2616)

    def __init__(
        self,
        root: Path = Path("datasets"),
        num_classes: Literal[10, 100] = 10,
        held_out: int = 5_000,
        download: bool = True,
    ) -> None:
        self.root, self.num_classes, self.held_out, self.download = root, num_classes, held_out, download

    def _read(self, train: bool, download: bool = False) -> _Archive:
        from torchvision import datasets

        kind = datasets.CIFAR10 if self.num_classes == 10 else datasets.CIFAR100
        try:
            archive: _Archive = kind(str(self.root), train=train, download=download)
        except (OSError, RuntimeError) as error:
            if download:
                raise FaultError(
                    f"Could not download CIFAR-{self.num_classes} to {self.root}: {error}. HINT: put the extracted "
                    "archive there, or see whether this host reaches the internet."
                ) from error
            raise UserError(
                f"No CIFAR-{self.num_classes} in {self.root}. HINT: set data.source.init_args.download=true, or root "
                "to the folder that holds the extracted archive."
            ) from error
        return archive

    @property
    def classes(self) -> list[str]:  # type: ignore[override]
        """Returns the classes' names in the archive."""
        return list(self._read(train=False).classes)

    def prepare(self) -> None:
        self._read(train=True, download=self.download)

    def dataset(self, split: Split) -> InMemory:
        raw = self._read(train=split != "test")
        images = torch.from_numpy(raw.data).permute(0, 3, 1, 2).contiguous()
        labels = torch.tensor(raw.targets)
        chosen = slice(None) if split == "test" else _held_out(len(images), self.held_out, split)
        return InMemory(images[chosen], labels[chosen])


class Unlabelled(Dataset[Image.Image]):
    """A dataset of all images in a folder, at any depth, in the order of their names."""

    def __init__(self, folder: Path, transform: Callable[[Image.Image], Image.Image]) -> None:
        from torchvision.datasets.folder import IMG_EXTENSIONS

        if not folder.is_dir():
            raise UserError(f"No folder {folder}. HINT: data.source.init_args.predict is a folder of images.")
        self.samples = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
        if not self.samples:
            raise UserError(f"There are no images in {folder}. HINT: those are files called {', '.join(IMG_EXTENSIONS)}.")
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Image.Image:
        from torchvision.datasets.folder import default_loader

        return self.transform(default_loader(str(self.samples[index])))


class ImageFolders(Source):
    """Images in folders: root/train/<class>/*, root/val/<class>/* and, if it exists, root/test/<class>/*.

    Args:
        root: the folder that holds train, val and test.
        image_size: images are resized and cropped at the centre to this height and width.
        predict: a folder of images without labels, at any depth, for `predict`; without it, `predict` uses root/test.
        mean: mean of the images in 0 .. 1, for each channel.
        std: standard deviation of the images in 0 .. 1, for each channel.
    """

    def __init__(
        self,
        root: Path,
        image_size: int = 64,
        mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
        std: tuple[float, float, float] = (0.229, 0.224, 0.225),
        predict: Path | None = None,
    ) -> None:
        self.root, self.image_size, self.predict = root, image_size, predict
        self.mean, self.std = mean, std

    @cached_property
    def classes(self) -> list[str]:  # type: ignore[override]
        """Returns the names of the folders in root/train; a class's number is its place in the alphabet."""
        folder = self.root / "train"
        if not folder.is_dir():
            raise UserError(
                f"No folder {folder}. HINT: data.source.init_args.root must hold train/<class>/*.jpg and val/<class>/*.jpg."
            )
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        if not names:
            raise UserError(f"{folder} has no folders. HINT: each class has a folder of its own in it.")
        return names

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        return len(self.classes)

    def prepare(self) -> None:
        assert self.predict or self.classes  # where there is something to predict, training images need not be

    def has(self, split: Split) -> bool:
        return split != "predict" or self.predict is not None

    def dataset(self, split: Split) -> Dataset[object]:
        from torchvision import datasets, transforms

        resize = transforms.Compose([transforms.Resize(self.image_size), transforms.CenterCrop(self.image_size)])
        if split == "predict" and self.predict is not None:
            return Unlabelled(self.predict, resize)
        folder = self.root / split
        if not folder.is_dir():
            raise UserError(f"No folder {folder}. HINT: put images into {folder}/<class>/.")
        try:
            folders = datasets.ImageFolder(str(folder), transform=resize)
        except (FileNotFoundError, RuntimeError) as error:
            raise UserError(f"{folder} can't be used: {error}") from error
        if folders.classes != self.classes:
            raise UserError(
                f"{folder} and {self.root / 'train'} must have the same classes: {folders.classes[:5]} there, "
                f"{self.classes[:5]} here."
            )
        return folders  # type: ignore[no-any-return]


class Digits(Source):
    """Handwritten digits from scikit-learn: 1,797 real images of 8x8 pixels, no download.

    Args:
        held_out: images held out for validation.
        held_out_test: images held out for the test.
    """

    num_classes = 10
    classes = tuple("0123456789")
    mean: Channels = 0.305
    std: Channels = 0.376

    def __init__(self, held_out: int = 200, held_out_test: int = 360) -> None:
        self.held_out, self.held_out_test = held_out, held_out_test

    def prepare(self) -> None:
        self._read()

    def _read(self) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise UserError("The digits come with scikit-learn. HINT: pip install scikit-learn") from error
        pixels, labels = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels * (255 / 16)).round().to(torch.uint8).view(-1, 1, 8, 8)
        return images, torch.from_numpy(labels).long()

    def dataset(self, split: Split) -> InMemory:
        images, labels = self._read()
        order = torch.from_numpy(permute(np.arange(len(images)), len(images), seed=0, epoch=0))
        test, val = self.held_out_test, self.held_out_test + self.held_out
        chosen = {"test": order[:test], "val": order[test:val], "train": order[val:]}[split]
        return InMemory(images[chosen], labels[chosen])


class Datasets(Source):
    """Your own datasets: anything with `__len__` and `__getitem__(index) -> (image, label)`, or a dict with these two keys.

    An image is a tensor (C, H, W), an array (H, W, C) or a PIL image: uint8 in 0 .. 255, or floats in 0 .. 1. A label is the
    number of a class, or a vector of floats with a share for each class. A dataset may also have
    `__getitems__(indices) -> (images, labels)`, which makes a whole batch and is faster; and `in_bulk = True`, if that takes a
    tensor of any number of indices and returns the same images each time. A small set then stays on the device
    (`data.resident`).

    Args:
        train: the training set, by class_path of a class or a function.
        val: the validation set, likewise; without one the run does not validate.
        num_classes: classes; labels are 0 .. num_classes-1.
        test: the test set, likewise.
        predict: the data for `predict`, likewise; its items may be images alone. Without it, `predict` uses the test set.
        mean: mean of the images in 0 .. 1; 0 with a std of 1 leaves floats unchanged, for images that are already normalised.
        std: standard deviation of the images in 0 .. 1.
    """

    def __init__(
        self,
        train: Callable[[], Dataset],  # type: ignore[type-arg]  # jsonargparse needs the plain class
        num_classes: int,
        val: Callable[[], Dataset] | None = None,  # type: ignore[type-arg]
        test: Callable[[], Dataset] | None = None,  # type: ignore[type-arg]
        predict: Callable[[], Dataset] | None = None,  # type: ignore[type-arg]
        mean: float = 0.5,
        std: float = 0.25,
    ) -> None:
        if num_classes < 2:
            raise UserError(f"data.source.init_args.num_classes is {num_classes}, and there is nothing to tell apart.")
        self.factories = {"train": train, "val": val, "test": test, "predict": predict}
        self.num_classes, self.mean, self.std = num_classes, mean, std

    def has(self, split: Split) -> bool:
        return self.factories[split] is not None

    def dataset(self, split: Split) -> Dataset[object]:
        factory = self.factories[split]
        if factory is None:
            raise UserError(f"There is no {split} set. HINT: set data.source.init_args.{split}.")
        return factory()
