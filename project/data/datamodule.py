"""ImageData deals any source of images to the ranks in micro-batches, normalised and augmented on the device."""

import hashlib
import logging
from collections.abc import Mapping
from functools import cache, cached_property, partial
from typing import Literal, cast

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from project.data.augment import Flip, Normalise, crop_and_flip, drawn_moves
from project.data.batches import Batch, MicroBatches, MicroBatchLoader
from project.data.first_look import examine
from project.data.in_memory import InMemory, sent, whole
from project.data.items import Unfit, as_tensor, image_and_label
from project.data.order import MicroBatchSampler, Order, cut_for_all, limited, size_of
from project.data.self_dealing import Dealing
from project.data.sources import Source, Split, Synthetic
from project.errors import UserError

log = logging.getLogger(__name__)

_SPLITS: dict[str, tuple[Split, ...]] = {"fit": ("train", "val"), "validate": ("val",), "predict": ("predict",)}


class ImageData(LightningDataModule):
    """Loads images for training, validation, test and prediction.

    Args:
        source: the source of the images, by class_path: Synthetic, Cifar, ImageFolders, Digits, or Datasets (your own).
        batch_size: samples that one process computes at once: the micro-batch.
        global_batch_size: samples behind one optimiser step, over all ranks; None is the product of batch_size, the
            number of ranks and trainer.accumulate_grad_batches.
        crop_padding: training images are shifted by up to this many pixels; 0 switches it off.
        flip: mirror half of the training images, other ones in each epoch; 'alternate' mirrors each image in every other epoch.
        tail: what the last step of an epoch does with fewer samples than a global batch: 'keep' trains on them, each
            with its true weight; 'drop' leaves them out of this epoch.
        num_workers: loader processes for each rank; 'auto' is the number of spare cores of the process, at most 8.
        resident: 'auto' keeps images on the device, as bytes, if a built-in source has few enough of them: at most 256 MiB
            on a CPU, 5 % of a GPU's memory. No loader processes are needed then. 'never' loads them batch by batch, and so
            does a num_workers that is a number.
        seed: decides the order of the samples and their augmentation.
        on_error: at a file that can't be read, 'stop', or 'skip' it: the next readable sample takes its place, and the end of
            the run lists all skipped ones. A prediction leaves it out.
    """

    capturable = True
    trainer: Trainer  # from before the first loader on

    def __init__(
        self,
        source: Source | None = None,
        batch_size: int = 64,
        global_batch_size: int | None = None,
        crop_padding: int = 0,
        flip: Flip = False,
        tail: Literal["keep", "drop"] = "keep",
        num_workers: int | Literal["auto"] = "auto",
        resident: Literal["auto", "never"] = "auto",
        seed: int = 0,
        on_error: Literal["stop", "skip"] = "stop",
    ) -> None:
        super().__init__()
        for name, value, least, what in (
            ("batch_size", batch_size, 1, "samples"),
            ("global_batch_size", 1 if global_batch_size is None else global_batch_size, 1, "samples"),
            ("crop_padding", crop_padding, 0, "pixels"),
            ("num_workers", num_workers, 0, "processes or 'auto'"),
        ):
            if isinstance(value, int) and value < least:
                raise UserError(f"data.{name} is a number of {what}, not {value}.")
        self.source = source or Synthetic()
        self.batch_size, self.global_batch_size = batch_size, global_batch_size
        self.crop_padding, self.flip, self.tail = crop_padding, flip, tail
        self.num_workers, self.resident, self.seed = num_workers, resident, seed
        self.on_error = on_error
        self.unread: dict[str, None] = {}
        """The samples that could not be read, and why."""
        self.dealing = Dealing()
        self._dataset = cache(self._open)  # each split is read once
        self._unseen: set[str] = set()  # splits whose first batch is yet to come
        self._whole = cache(self._read_whole)
        self._normalise = cache(partial(Normalise, self.source.mean, self.source.std))  # one for each device

    @property
    def num_classes(self) -> int:
        return self.source.num_classes

    @cached_property
    def class_names(self) -> list[str] | None:
        """Returns the classes' names by number; from the source, or a dataset with `classes`, as torchvision's have."""
        split: Split | None = "val" if self.source.has("val") else "test" if self.source.has("test") else None
        names: object = self.source.classes or (getattr(self._dataset(split), "classes", None) if split else None)
        listed = [str(name) for name in names] if isinstance(names, (list, tuple)) else []
        return listed if len(listed) == self.num_classes else None

    def deal(self, dealing: Dealing) -> None:
        self.dealing = dealing

    def batch_sizes(self) -> tuple[int, int | None]:
        return self.batch_size, self.global_batch_size

    def description(self) -> dict[str, object]:
        """Returns the classes' names, and how pixels become the network's input."""
        mean, std = (
            list(value) if isinstance(value, (tuple, list)) else [value] for value in (self.source.mean, self.source.std)
        )
        how = "(pixels in 0 .. 1 - mean) / std, for each channel; a single number is for all channels"
        return {"classes": self.class_names, "images": {"range": [0, 1], "mean": mean, "std": std, "how": how}}

    def sample_shape(self) -> tuple[int, ...]:
        """Returns channels, height and width of a training image."""
        return tuple(as_tensor(image_and_label(self._dataset("train")[0])[0]).shape)

    def _open(self, split: Split) -> Dataset[object]:
        """Returns the dataset of a split. A prediction without a dataset of its own is of the test set."""
        if split == "predict" and not self.source.has(split):
            return self._dataset("test")
        dataset = self.source.dataset(split)
        what = f"The {split} set ({type(dataset).__name__})"
        if isinstance(dataset, Mapping):
            raise Unfit(f"{what} is a dict with the sets {', '.join(map(str, dataset))}. HINT: choose one (split='train').")
        if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise Unfit(
                f"{what} can only be read from its beginning, and a run asks for samples by number, so that it can go on where "
                "it was. HINT: a dataset with __len__ and __getitem__(index); of Hugging Face's, without streaming."
            )
        return dataset

    # Loaders ---------------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        self.source.prepare()

    def setup(self, stage: str) -> None:
        splits = _SPLITS.get(stage, ("test",))
        if stage == "fit" and not self.source.has("val"):
            splits = ("train",)
            log.info("There is no validation set, and so no validation.")
        for split in splits:
            if not size_of(self._dataset(split)):
                raise UserError(f"The {split} set is empty.")
        self._unseen = set(splits)

    def teardown(self, stage: str) -> None:
        if self.unread:
            what = "; ".join(sorted(self.unread))
            instead = "have no prediction" if stage == "predict" else "others took their place"
            log.warning("data.on_error=skip: %d of the images can't be read, and %s: %s", len(self.unread), instead, what)
            self.unread.clear()

    def train_dataloader(self) -> MicroBatchLoader:
        return self._loader("train", self.train_order())

    def train_order(self) -> Order:
        """Returns the order of the training samples in this run."""
        micro_batches = self._here[1] * self.trainer.accumulate_grad_batches
        size = size_of(self._dataset("train"))
        order = Order(size, self.batch_size, micro_batches, self.seed, self.tail)
        if not order.steps or order.size < 2 * micro_batches:
            raise UserError(
                f"{order.size} training images are too few for a global batch of {order.global_batch}. "
                "HINT: set data.batch_size or data.global_batch_size lower."
            )
        return order.limited(self.dealing.limits.get("train"))

    def val_dataloader(self) -> MicroBatchLoader | list[MicroBatchLoader]:
        return self._eval_loader("val") if self.source.has("val") else []

    def test_dataloader(self) -> MicroBatchLoader:
        return self._eval_loader("test")

    def predict_dataloader(self) -> MicroBatchLoader:
        return self._eval_loader("predict")

    def _eval_loader(self, split: Split) -> MicroBatchLoader:
        size = size_of(self._dataset(split))
        count, limit = -(-size // self.batch_size), self.dealing.limits.get(split)
        batches = limited(count, limit, f"limit_{split}_batches", "micro-batches")
        # Every sample once, whatever the number of ranks: the ranks' batches are as many, and may differ by one sample.
        whole_size = min(size, batches * self.batch_size)
        micro_batch = cut_for_all(whole_size, self.batch_size, self._here[1]) if self.dealing.exact else self.batch_size
        order = Order(whole_size, micro_batch, self._here[1], cut=self.dealing.exact)
        return self._loader(split, order)

    @property
    def _here(self) -> tuple[int, int]:
        """Returns this rank's index among those that read samples of their own, and the number of these ranks."""
        return self.trainer.global_rank // self.dealing.shared_by, self.trainer.world_size // self.dealing.shared_by

    def loader_processes(self) -> int:
        """Returns the loader processes of each rank, where the images are not on the device already."""
        return min(8, self.dealing.spare_cores) if self.num_workers == "auto" else self.num_workers

    def _read_whole(self, split: Split) -> InMemory | None:
        if self.resident == "never" or self.num_workers != "auto":
            return None
        device = self.trainer.strategy.root_device
        cuda = device.type == "cuda"
        at_most = torch.cuda.get_device_properties(device).total_memory // 20 if cuda else 256 << 20
        return whole(self._dataset(split), device, at_most)

    def _loader(self, split: Split, order: Order) -> MicroBatchLoader:
        held = self._whole(split)
        workers = 0 if held else self.loader_processes()
        keys = MicroBatchSampler(order, *self._here)
        return MicroBatchLoader(
            keys,
            self.seed,
            self.unread,
            not held,
            dataset=self._micro_batches(held or self._dataset(split), split, keys.order),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=not held and self.trainer.strategy.root_device.type == "cuda",
        )

    def _micro_batches(self, dataset: Dataset[object], split: Split, order: Order) -> MicroBatches:
        if split == "predict":
            return MicroBatches(dataset, order, split, labelled=False, skips=self.on_error == "skip")
        return MicroBatches(dataset, order, split, self.num_classes, skips=self.on_error == "skip")

    def fingerprint(self) -> dict[str, dict[str, int | str]]:
        """Returns facts to compare data by: each split's number of samples, the bytes of one, a hash of a few."""
        made: dict[str, dict[str, int | str]] = {}
        for split in _SPLITS["fit"]:
            if not self.source.has(split):
                continue
            dataset = self._dataset(split)
            size = size_of(dataset)
            few = self._micro_batches(dataset, split, Order(size, min(size, 8), 1, self.seed))[(0, 0, 0)]
            digest = hashlib.sha256(few["image"].numpy().tobytes() + few["label"].numpy().tobytes())
            made[split] = {"samples": size, "bytes": few["image"][0].nbytes, "hash": digest.hexdigest()[:12]}
        return made

    # On the device ---------------------------------------------------------------------------------------------------

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if (self.crop_padding or self.flip) and self.trainer.training:
            how = self.trainer.current_epoch, self.seed, self.crop_padding, self.flip, batch["image"].shape[-1]
            return {**batch, "moves": drawn_moves(batch["sample"], *how)}
        return batch

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        if device.type == "cpu":  # where it was made
            return batch
        # Lightning's way looks for tensors at any depth, which takes as long as making the batch.
        moved = {name: sent(value, device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        return cast(Batch, moved)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        images = batch["image"]
        if self._unseen:
            self._look_at(batch)
        if (moves := batch.pop("moves", None)) is not None:
            images = crop_and_flip(images, moves, self.crop_padding)
        # float32 under mixed precision; what the network is in, where that is float64 or bf16 throughout.
        module = self.trainer.lightning_module
        dtype = module.dtype if isinstance(module, LightningModule) else torch.float32
        label = batch["label"]
        if label.is_floating_point():  # shares of the classes
            label = label.to(dtype)
        return {**batch, "image": self._normalise(images.device)(images).to(dtype), "label": label}

    def _look_at(self, batch: Batch) -> None:
        """Examines the first batch of each split before anything changes it."""
        stage = self.trainer.state.stage
        split = stage and stage.dataloader_prefix
        if split not in self._unseen or not len(batch["image"]):
            return
        self._unseen.remove(split)
        doubts = examine(batch["image"], batch["sample"], split, self.source.mean, self.source.std)
        for doubt in doubts if self.trainer.is_global_zero else ():
            log.warning(doubt)
