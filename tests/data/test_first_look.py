"""What is doubtful about the first images is said, and what can't be meant is refused."""

import logging
import re

import pytest
import torch

from project.data import Datasets, ImageData
from project.data.augment import Normalise
from project.data.first_look import examine
from project.data.items import Unfit
from project.model import ImageClassifier
from project.trainer import Trainer
from tests.data.strange import Strange, Stream
from tests.model.strange_networks import Plain

SAMPLES = torch.arange(40, 44)


def images(low, high, shape=(3, 8, 8)):
    """Four of them; the extremes are in the third."""
    made = torch.full((4, *shape), (low + high) / 2)
    made[2, 0, 0, 0], made[2, 0, 0, 1] = low, high
    return made


def look(some, mean=0.5, std=0.25):
    return examine(some, SAMPLES, "val", mean, std)


@pytest.mark.parametrize(
    ("some", "doubt"),
    [
        (images(-0.2, 1.0), r"are float32 from -0.2 to 1 \(first seen in sample 42\). Is that meant\?"),
        (images(0.0, 1.3), r"from 0 to 1.3 \(first seen in sample 42\)"),
        (images(0.0, 1 / 255), "are nearly black"),
        (torch.ones(4, 3, 8, 8, dtype=torch.uint8), "are bytes, and the first 4 have none over 1"),
        (images(0.0, 1.0, (32, 32, 3)), "have 32 channels and 32 x 3 pixels"),
    ],
)
def test_what_is_doubtful_is_said(some, doubt):
    (message,) = look(some)
    assert re.search(doubt, message), message
    assert "HINT" in message


def test_what_is_usual_is_not():
    for some in (images(-0.05, 1.05).half(), images(0, 255).to(torch.uint8), images(0.0, float("nan"))):
        assert look(some) == []


@pytest.mark.parametrize("some", [images(0, 255), images(-2, 2.6), images(0, 255).long(), images(0, 1).bool(), images(-1, 1)])
def test_what_can_not_be_meant_is_refused(some):
    with pytest.raises(Unfit, match="HINT"):
        look(some)


def test_who_normalises_by_himself_says_so():
    assert look(images(-2, 2.6), mean=0.0, std=1.0) == []
    assert look(images(-2, 2.6), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)) == []


@pytest.mark.parametrize(("mean", "std"), [(127.5, 64.0), (0.5, 0.0), ((123.0, 117.0, 104.0), (1.0, 1.0, 1.0))])
def test_a_mean_of_bytes_is_refused(mean, std):
    with pytest.raises(ValueError, match=r"not of images in 0 .. 1. HINT: divide those of bytes by 255"):
        Normalise(mean, std, torch.device("cpu"))


def test_it_is_said_once_and_looked_at_no_more(tmp_path, caplog, monkeypatch):
    """A look for each set, however many batches and epochs there are."""
    looks = []
    monkeypatch.setattr("project.data.datamodule.examine", lambda *args: looks.append(args[2]) or ["a doubt"])
    data = ImageData(Datasets(train=Strange, val=Strange, num_classes=10), batch_size=8)
    trainer = Trainer(max_epochs=2, default_root_dir=tmp_path, logger=False, accelerator="cpu", devices=1)
    with caplog.at_level(logging.WARNING):
        trainer.fit(ImageClassifier(Plain()), datamodule=data)
    assert looks == ["val", "train"]
    assert [record.message for record in caplog.records].count("a doubt") == 2


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: {"train": Strange(), "test": Strange()}, r"\(dict\) is a dict with the sets train, test. HINT: choose one"),
        (Stream, r"\(Stream\) can only be read from its beginning"),
    ],
)
def test_what_is_no_dataset_is_refused(make, cause):
    with pytest.raises(Unfit, match=rf"The train set {cause}"):
        ImageData(Datasets(train=make, num_classes=10)).sample_shape()


def test_one_class_is_none():
    with pytest.raises(ValueError, match="nothing to tell apart"):
        Datasets(train=Strange, num_classes=1)
