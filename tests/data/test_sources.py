"""Sources: what each reads, and one clear line for what is missing."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from project.data import Cifar, Datasets, Digits, ImageFolders, Synthetic
from project.data.batches import MicroBatches
from project.data.order import Order


def samples(dataset):
    return MicroBatches(dataset, Order(len(dataset), 4, 1))[0, 0, 0]


def test_digits_split_without_overlap():
    parts = [Digits().dataset(split) for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [1237, 200, 360]
    assert parts[0].images.dtype == torch.uint8
    assert parts[0].images.max() == 255


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """A CIFAR-10 of 60 images; torchvision's checksums are the only thing that is not like the real one."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        content = {"data": generator.integers(0, 256, (10, 3072), dtype=np.uint8), "labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    return tmp_path


def test_cifar_holds_out_validation_images(cifar):
    source = Cifar(cifar, held_out=10)
    source.prepare()
    train, val, test = (source.dataset(split) for split in ("train", "val", "test"))
    assert [len(part) for part in (train, val, test)] == [40, 10, 10]
    assert train.images.shape == (40, 3, 32, 32)
    together = torch.cat([train.images, val.images]).flatten(1)
    assert len({row.numpy().tobytes() for row in together}) == 50
    with pytest.raises(ValueError, match="held_out"):
        Cifar(cifar, held_out=50).dataset("train")


def test_missing_cifar_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"No CIFAR-10 in .*HINT"):
        Cifar(tmp_path, download=False).prepare()


@pytest.fixture
def folders(tmp_path):
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (20 + number, 30), (label * 100, 0, 0)).save(tmp_path / split / name / f"{number}.png")
    return tmp_path


def test_image_folders_are_resized(folders):
    source = ImageFolders(folders, image_size=16)
    assert source.num_classes == 2
    batch = samples(source.dataset("train"))
    assert batch["image"].shape == (4, 3, 16, 16)
    assert batch["label"].tolist() == [0, 0, 0, 1]
    assert batch["image"][3, 0, 0, 0] == 100


def test_what_is_wrong_with_folders_is_one_line(folders):
    with pytest.raises(ValueError, match="No folder"):
        ImageFolders(folders / "nowhere").prepare()
    with pytest.raises(ValueError, match="No folder"):
        ImageFolders(folders).dataset("test")
    (folders / "val" / "eel").mkdir()
    Image.new("RGB", (9, 9)).save(folders / "val" / "eel" / "0.png")
    with pytest.raises(ValueError, match="same classes"):
        ImageFolders(folders).dataset("val")


def test_own_datasets_need_a_test_set_only_to_test():
    source = Datasets(train=lambda: Synthetic(8).dataset("train"), num_classes=10)
    assert len(source.dataset("train")) == 8
    with pytest.raises(ValueError, match="no test set"):
        source.dataset("test")
