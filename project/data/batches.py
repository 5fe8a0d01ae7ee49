"""Reads micro-batches of images from a dataset.

What can't be read is named with its number and its file, also by a loader's process: there an error is returned like a batch,
and raised where it arrives, because torch would turn it into a traceback.
"""

import struct
import traceback
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypedDict, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info
from typing_extensions import NotRequired, Unpack

from project.data.dealing import DealtLoader, LoaderSettings, seed_generators
from project.data.in_memory import AT_ONCE, InMemory, in_bulk
from project.data.items import Unfit, as_label, as_labels, as_tensor, file_of, image_and_label, wrong_label
from project.data.order import Key, MicroBatchSampler, Order, chance, size_of

_AHEAD_BYTES = 4 << 20  # made at once, at most
# What libraries that read images raise over a file that is cut short or none of theirs. From elsewhere it may be a mistake in
# the dataset's code, whose traceback says more.
_BAD_FILE = (EOFError, SyntaxError, RuntimeError, ValueError, struct.error, zlib.error)
_DECODERS = ("/PIL/", "/torchvision/io/")


class Batch(TypedDict):
    """The batch that a step receives. `image` is uint8 (B, C, H, W) until the device has normalised it."""

    image: Tensor
    label: Tensor
    """Whole numbers (B,), or shares of the classes (B, classes)."""
    sample: Tensor
    """The samples' numbers in their dataset."""
    moves: NotRequired[Tensor]
    """On its way to the device: how the images are to be moved (`drawn_moves`)."""
    file: NotRequired[list[str]]
    """In a prediction: the files that the samples come from, where that is known."""
    unread: NotRequired[list[str]]
    """On its way to the loader: the samples that could not be read, in whose place others are."""


class MicroBatches(Dataset[Batch]):
    """The micro-batches of a dataset, by key: in one call where the dataset's `__getitems__` returns (images, labels).

    Args:
        dataset: the images and their labels.
        order: which of them are in which micro-batch.
        split: the name of the set, for messages.
        classes: how many there are; None leaves labels unchecked.
        labelled: whether labels are needed. Without, items may be images alone, and their files are reported.
        skips: has the next sample that can be read take the place of one whose file can't be; without labels, leaves it out.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        order: Order,
        split: str = "train",
        classes: int | None = None,
        labelled: bool = True,
        skips: bool = False,
    ) -> None:
        self.dataset, self.order, self.split, self.classes, self.labelled = dataset, order, split, classes, labelled
        self.skips = skips
        self._unread: dict[int, str] = {}
        if isinstance(dataset, InMemory) and labelled:  # all of them are here: one look is enough
            dataset.labels = as_labels(dataset.labels)
            self._check(dataset.labels.cpu(), range(len(dataset)))
            self.classes = None

    def __len__(self) -> int:
        return self.order.steps * self.order.micro_batches

    def __getitem__(self, key: Key) -> Batch:
        try:
            return self.make([key])[0]
        except Unfit as error:
            if get_worker_info() is None:
                raise
            return error  # type: ignore[return-value]  # see `_or_raise`

    def at_once(self, batch: Batch) -> int:
        """Returns how many micro-batches like this one are to be made together: of small images, calls are what costs."""
        if not in_bulk(self.dataset) or not len(batch["image"]):
            return 1
        samples = min(AT_ONCE, _AHEAD_BYTES // max(1, batch["image"][0].nbytes))
        return max(1, samples // self.order.micro_batch)

    def make(self, keys: list[Key]) -> list[Batch]:
        """Returns several micro-batches, by one call to the dataset."""
        parts = [self.order.indices(key) for key in keys]
        samples = torch.from_numpy(np.concatenate(parts))
        images, labels = self._read(samples, keys[0])
        sizes = [len(part) for part in parts]
        cut = [part.split(sizes) for part in (images, labels, samples)]
        if self._unread and not self.labelled:  # a prediction is of no other image
            kept = [~torch.isin(part, torch.tensor([*self._unread])) for part in cut[2]]
            cut = [tuple(value[mask] for value, mask in zip(part, kept, strict=True)) for part in cut]
        batches = [Batch(image=image, label=label, sample=sample) for image, label, sample in zip(*cut, strict=True)]
        if not self.labelled:
            for batch in batches:
                files = [file for number in batch["sample"].tolist() if (file := file_of(self.dataset, number))]
                if len(files) == len(batch["sample"]):
                    batch["file"] = files
        if self._unread:
            batches[0]["unread"], self._unread = [*self._unread.values()], {}
        return batches

    # One read ---------------------------------------------------------------------------------------------------------

    def _read(self, samples: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        if not len(samples):  # fewer samples than ranks: a batch of none, of the right shape
            images, labels = self._read(torch.zeros(1, dtype=torch.int64), key)
            return images[:0], labels[:0]
        if not in_bulk(self.dataset):  # what it draws at random is the same in any process, and after a restart
            seed_generators(chance(self.order.seed or 0, key))
        numbers = samples.tolist()
        items = self._items(samples, numbers)
        if isinstance(items, tuple) and len(items) == 2 and isinstance(items[0], Tensor):
            images, labels = self._whole_batch(items[0], items[1], len(samples))
        else:
            images, labels = self._one_by_one(items, numbers)
        if self.labelled:
            self._check(labels, samples)
        return images, labels

    def _items(self, samples: Tensor, numbers: list[int]) -> Sequence[object]:
        """Returns (images, labels) of all samples, or a list of their items."""
        if hasattr(self.dataset, "__getitems__"):
            try:
                items: Sequence[object] = self.dataset.__getitems__(samples if in_bulk(self.dataset) else numbers)
                return items
            except Exception as error:
                if in_bulk(self.dataset) or not _of_a_file(error):
                    raise  # otherwise, one by one, it is found out which
        return [self._next_item(number) if self.skips else self._item(number) for number in numbers]

    def _next_item(self, number: int) -> object:
        """Returns the next readable sample's item: the same one on any number of ranks, and after a restart."""
        size = size_of(self.dataset)
        for at in range(size):
            candidate = (number + at) % size
            try:
                return self._item(candidate)
            except Unfit as error:
                self._unread[candidate] = str(error).partition(" HINT:")[0]
        raise Unfit(f"No sample of the {self.split} set can be read.")

    def _item(self, number: int) -> object:
        try:
            return self.dataset[number]
        except Exception as error:
            if not _of_a_file(error):
                raise
            raise Unfit(
                f"{self._name(number)} can't be read: {type(error).__name__}: {error}. HINT: mend it, or leave it out."
            ) from error

    def _whole_batch(self, images: Tensor, labels: object, count: int) -> tuple[Tensor, Tensor]:
        size = size_of(labels)
        if images.ndim != 4 or len(images) != count or size != count:
            raise Unfit(
                f"__getitems__ of the {self.split} set ({type(self.dataset).__name__}) returned images {tuple(images.shape)} "
                f"and {size} labels for {count} samples. HINT: images are (samples, C, H, W), with a label for each."
            )
        return images, as_labels(labels) if self.labelled else cast(Tensor, labels)

    def _one_by_one(self, items: Sequence[object], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        pairs = [self._pair(item, number) for item, number in zip(items, numbers, strict=True)]
        images, labels = zip(*pairs, strict=True)
        kinds = {(tuple(image.shape), str(image.dtype).removeprefix("torch.")) for image in images}
        if len(kinds) > 1:
            listed = ", ".join(f"{shape} of {dtype}" for shape, dtype in sorted(kinds)[:3])
            raise Unfit(
                f"The {self.split} set ({type(self.dataset).__name__}) gives images of different shapes or types: {listed}. "
                "HINT: resize them in its transform, and convert them to one kind."
            )
        if len({label.shape for label in labels}) > 1:
            raise Unfit(
                f"The {self.split} set ({type(self.dataset).__name__}) gives labels of different kinds. "
                "HINT: all are numbers, or all are vectors with a share for each class."
            )
        return torch.stack(images), torch.stack(labels)

    def _pair(self, item: object, number: int) -> tuple[Tensor, Tensor]:
        try:
            image, label = image_and_label(item, self.labelled)
            return as_tensor(image), as_label(label if self.labelled else -1)
        except Unfit as error:
            raise Unfit(f"{self._name(number)} {error}") from None

    def _check(self, labels: Tensor, samples: Sequence[int] | Tensor) -> None:
        if self.classes is not None and (wrong := wrong_label(labels, self.classes)):
            place, what = wrong
            raise Unfit(f"{self._name(int(samples[place]))} {what}")

    def _name(self, number: int) -> str:
        file = file_of(self.dataset, number)
        return f"Sample {number} of the {self.split} set ({type(self.dataset).__name__}{f', {file}' if file else ''})"


def _of_a_file(error: Exception) -> bool:
    """Returns whether an error is about a file of the data, and not about the code that reads it."""
    frames = traceback.extract_tb(error.__traceback__)
    decoding = any(name in frame.filename for frame in frames for name in _DECODERS)
    return isinstance(error, OSError) or (decoding and isinstance(error, _BAD_FILE))


class MicroBatchLoader(DealtLoader):
    """A DataLoader of micro-batches; `unread` gets the samples that could not be read, as keys."""

    def __init__(
        self,
        keys: MicroBatchSampler,
        seed: int,
        unread: dict[str, None],
        draws: bool = True,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        # An item is a micro-batch already, of tensors.
        settings |= {"sampler": keys, "batch_size": None, "collate_fn": _unchanged}
        super().__init__(keys, seed, draws, **settings)
        self.micro_batches, self.unread = cast(MicroBatches, settings["dataset"]), unread

    def _note(self) -> Iterator[Batch]:
        for batch in cast(Iterator[Batch], super()._note()):
            self.unread.update(dict.fromkeys(batch.pop("unread", ())))
            yield batch

    def _batches(self) -> Iterator[Batch]:
        if self.num_workers or self.pin_memory:
            return map(_or_raise, cast(Iterator[Batch | Unfit], super()._batches()))
        return self._made_together()  # torch's iterator takes as long again as picking the images

    def _made_together(self) -> Iterator[Batch]:
        keys, count = iter(self.keys), 1
        while next_keys := [*islice(keys, count)]:
            batches = self.micro_batches.make(next_keys)
            count = self.micro_batches.at_once(batches[0])
            yield from batches


def _unchanged(batch: object) -> object:
    return batch


def _or_raise(batch: Batch | Unfit) -> Batch:
    if isinstance(batch, Unfit):
        raise Unfit(str(batch))  # here, where the traceback leads nowhere else
    return batch
