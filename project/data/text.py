"""TextData serves text as bytes, in windows for a language model; by default, the source of Python's library. Each split is
one file, which every process maps into its memory."""

import glob
import logging
import os
import platform
import sysconfig
import zlib
from collections.abc import Collection
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from project.errors import FaultError, UserError
from project.untrusted import replacing

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")

_TESTS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Windows(Dataset[Bytes]):
    """A dataset of windows of `context` bytes in a file of `np.save`, one behind the other, each with the byte that follows."""

    def __init__(self, path: Path, context: int) -> None:
        self.path, self.context = path, context

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "context": self.context}  # a memory map would be pickled as a copy of all its bytes

    @cached_property
    def tokens(self) -> Bytes:
        tokens: Bytes = np.load(self.path, mmap_mode="r")
        return tokens

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Bytes:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        return self.tokens[index * self.context : (index + 1) * self.context + 1]


def batch_of(windows: list[Bytes]) -> tuple[Tensor, Tensor]:
    """Returns tokens (samples, context), and for each of them the one that follows."""
    tokens = torch.from_numpy(np.stack(windows)).long()
    return tokens[:, :-1], tokens[:, 1:]


def split_of(name: str, held_out: float) -> Split:
    """Returns the split of a file, by its name alone: it does not depend on the other files."""
    at = zlib.crc32(name.encode()) / 2**32
    return "val" if at < held_out else "test" if at < 2 * held_out else "train"


def files_of(text: str | None) -> tuple[str, dict[str, Path]]:
    """Returns the text's label, and its files by name, sorted; None is the source of Python's own library, without its
    tests."""
    if text is None:
        folder = sysconfig.get_paths()["stdlib"]
        paths = [path for path in _files_below(folder, _TESTS) if path.endswith(".py")]
    elif Path(text).is_dir():
        folder = text or "."
        paths = _files_below(folder)
    else:
        paths = [path for path in glob.glob(text, recursive=True) if os.path.isfile(path)]
        folder = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    label = f"python-{platform.python_version()}" if text is None else Path(folder).resolve().name
    return label, dict(sorted((os.path.relpath(path, folder or "."), Path(path)) for path in paths))


def _files_below(folder: str, left_out: Collection[str] = ()) -> list[str]:
    """Returns the files in a folder and in those below it, without those of these names. (pathlib takes ten times as long.)"""
    paths: list[str] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in left_out]
        paths += [os.path.join(place, name) for name in names]
    return [path for path in paths if os.path.isfile(path)]


def read_splits(text: str | None, held_out: float) -> tuple[str, dict[Split, bytes]]:
    """Returns a name with a digest of all content, and the bytes of each split; a zero byte ends a file."""
    label, files = files_of(text)
    parts: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
    for name, path in files.items():
        parts[split_of(name, held_out)].append(path.read_bytes() + b"\0")
    joined = {split: b"".join(some) for split, some in parts.items()}
    digest = blake2b(digest_size=8)
    for content in joined.values():
        digest.update(len(content).to_bytes(8, "little") + content)
    return f"{label}-{digest.hexdigest()}", joined


def is_whole(path: Path) -> bool:
    """Returns whether a file of bytes is complete: of one that was cut off, numpy can't map what its header promises."""
    try:
        return bool(np.load(path, mmap_mode="r").dtype == np.uint8)
    except (OSError, ValueError, EOFError):
        return False


def write_whole(path: Path, content: bytes) -> None:
    """Writes all of a file or nothing, whoever else writes the same at the same time, on this host or on another."""
    with replacing(path) as part, part.open("xb") as file:
        np.save(file, np.frombuffer(content, np.uint8))
        os.fchmod(file.fileno(), 0o644)  # others may train on the same folder
        file.flush()
        os.fsync(file.fileno())


def pair_counts(tokens: Bytes, block: int = 1 << 22) -> NDArray[np.int64]:
    """Returns how often each byte (row) is followed by each (column)."""
    counts = np.zeros(256 * 256, np.int64)
    for start in range(0, len(tokens) - 1, block):
        some = tokens[start : start + block + 1].astype(np.int64)
        counts += np.bincount(some[:-1] * 256 + some[1:], minlength=256 * 256)
    return counts.reshape(256, 256)


def simple_losses(train: Bytes, val: Bytes) -> tuple[float, float]:
    """Returns the losses on `val` of models that count bytes, and pairs of bytes, in `train`, in nats per byte. Each count is
    one more than it is, so that nothing is impossible."""
    seen, expected = pair_counts(train), pair_counts(val)

    def loss(counts: NDArray[np.int64], wanted: NDArray[np.int64]) -> float:
        chances = (counts + 1) / (counts.sum(-1, keepdims=True) + 256)
        return float(-(wanted * np.log(chances)).sum() / wanted.sum())

    return loss(seen.sum(0), expected.sum(0)), loss(seen, expected)


class TextData(LightningDataModule):
    """Windows of text, as bytes: (tokens, the tokens that follow), both (samples, context) in int64.

    Args:
        text: a folder, a file or a pattern ('books/**/*.txt'); None is the source of Python's own library. It is read as a
            whole, once on each host.
        root: the folder that gets the files of bytes.
        context: bytes in a window.
        batch_size: windows that one process puts through the network at once: the micro-batch.
        held_out: share of the files held out for validation, and again for the test; which ones follows from their names.
        num_workers: loader processes for each rank; cutting windows takes little.
    """

    def __init__(
        self,
        text: str | None = None,
        root: Path = Path("datasets"),
        context: int = 128,
        batch_size: int = 16,
        held_out: float = 0.03,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if context < 1 or batch_size < 1:
            raise UserError(f"data.init_args: context and batch_size are at least 1, and not {context} and {batch_size}.")
        if not 0 < held_out < 0.5:
            raise UserError(f"data.init_args.held_out is a share of the files, between 0 and 0.5, and not {held_out}.")
        self.text, self.root, self.context = text, root, context
        self.batch_size, self.held_out, self.num_workers = batch_size, held_out, num_workers
        self.name: str | None = None
        """Of the text, with its digest; here and in `prepare_data` that of this host's, from `setup` on that of all."""

    def path(self, split: Split) -> Path:
        """Returns the file of a split's bytes."""
        return self.root / f"{self.name}-{split}.npy"

    def prepare_data(self) -> None:
        self.name, splits = read_splits(self.text, self.held_out)
        for split, content in splits.items():
            if len(content) <= self.context:
                raise UserError(
                    f"The {split} split of {self.text or 'the standard library'} has {len(content)} bytes, which is no window "
                    f"of {self.context}. HINT: whole files are held out, by their names: give more of them (`split -C 100k` "
                    "cuts a large one), or set data.init_args.held_out."
                )
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for split, content in splits.items():
                if not is_whole(self.path(split)):
                    write_whole(self.path(split), content)
        except OSError as error:
            raise FaultError(f"The text can't be written to {self.root}: {error}. HINT: set data.init_args.root.") from error

    def setup(self, stage: str) -> None:
        if self.trainer is not None:
            own, self.name = self.name, self.trainer.strategy.broadcast(self.name)
            if own not in (None, self.name):
                raise FaultError(
                    f"This host has another text than rank 0's: {own}, and not {self.name}. HINT: give all hosts the same "
                    "Python, or set data.init_args.text to files that all have."
                )
        for split in SPLITS:
            if not is_whole(self.path(split)):
                raise FaultError(f"{self.path(split)} is not there, or not whole. HINT: `prepare_data` makes it.")
        trainer = self.trainer
        if stage == "fit" and (trainer is None or (trainer.is_global_zero and trainer.ckpt_path is None)):
            train, val = (self.windows(split).tokens for split in ("train", "val"))
            log.info(
                "text: %.1f MB to train on, %.2f MB for validation, on which a unigram model reaches a loss of %.3f, and a "
                "bigram model %.3f (nats per byte)",
                *(len(train) / 1e6, len(val) / 1e6, *simple_losses(train, val)),
            )

    def state_dict(self) -> dict[str, object]:
        return {"text": self.name}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Checks that a resumed run reads the same text as before."""
        if state_dict["text"] != self.name and self.trainer is not None and self.trainer.state.fn == "fit":
            raise UserError(
                f"The run was trained on {state_dict['text']}, and this is {self.name}. HINT: it continues with the "
                "Python, or the files, that it began with; another text is another --run."
            )

    def windows(self, split: Split) -> Windows:
        """Returns the windows of a split."""
        return Windows(self.path(split), self.context)

    def _loader(self, split: Split, training: bool = False) -> DataLoader[Bytes]:
        return DataLoader(
            self.windows(split),
            self.batch_size,
            shuffle=training,
            drop_last=training,
            num_workers=self.num_workers,
            collate_fn=batch_of,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )

    def train_dataloader(self) -> DataLoader[Bytes]:
        return self._loader("train", training=True)

    def val_dataloader(self) -> DataLoader[Bytes]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Bytes]:
        return self._loader("test")
