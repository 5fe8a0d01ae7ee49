"""An image and a label, however they come; what can't be meant is one line, in whatever process it is read."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from project.data.batches import MicroBatches
from project.data.in_memory import InMemory, whole
from project.data.items import Unfit, as_tensor
from project.data.order import Order
from tests.data.strange import CLASSES, Drawn, Lists, Strange, Together, part

ORDER = Order(64, 64, 1, seed=0)


def batch(dataset, classes=CLASSES, **settings):
    order = Order(len(dataset), 64, 1, seed=0)
    return MicroBatches(dataset, order, classes=classes, **settings)[0, 0, 0]


@pytest.mark.parametrize("how", ["usual", "dict", "other names", "shares", "shares in doubles", "whole floats"])
@pytest.mark.parametrize("kind", [Strange, Lists])
def test_an_image_and_a_label_come_in_many_ways(how, kind):
    expected, made = batch(Strange()), batch(kind(how))
    assert torch.equal(made["image"], expected["image"])
    numbers = made["label"].argmax(1) if "shares" in how else made["label"]
    assert torch.equal(numbers, expected["label"])
    assert made["label"].dtype == (torch.float32 if "shares" in how else torch.int64)


WRONG = {
    "three parts": ("is a tuple of 3 (a tensor of uint8 (3, 8, 8), the int", "HINT: return those two"),
    "other keys": ("is a dict with the keys x, y, and not", "keys image and label"),
    "one-hot": ("has a tensor of int64 (10,) [0, 0, ", "HINT: of a one-hot vector return its argmax"),
    "several classes": ("has a tensor of float32 (10,) [0.0, 0.0, ", "sum to 1"),
    "too few shares": ("has a vector of 2 for a label, and there are 10 classes", "num_classes=2"),
    "names": ("has the label 'cat', and not a number", "number the classes from 0"),
    "fractions": (".7, which is not the number of a class", "HINT: a label is the number of a class"),
    "no label": ("Sample 41 of the train set (Strange) has the label -100", "labels are 0 .. 9; leave samples without"),
    "from one": ("has the label 10, and there are 10 classes", "subtract 1"),
    "no image": ("has a dict with the keys bytes for an image", "a tensor (C, H, W), an array (H, W, C) or a PIL image"),
    "mixed types": ("different shapes or types: (3, 8, 8) of float32, (3, 8, 8) of uint8", "convert them to one kind"),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_it_is_and_what_is_wanted_are_said(how):
    with pytest.raises(Unfit) as raised:
        batch(Strange(how, size=48))
    for part_ in WRONG[how]:
        assert part_ in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "HINT" in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_labels_of_a_whole_batch_are_whole_numbers_of_classes(dtype):
    assert torch.equal(batch(Together(dtype))["label"], batch(Strange())["label"])
    with pytest.raises(Unfit, match=r"Sample \d+9 of the train set \(Together\) has the label 10, and there are 10 classes"):
        batch(Together(dtype, low=1))


def test_labels_in_memory_are_looked_at_once_and_all():
    images = torch.zeros(1000, 1, 2, 2, dtype=torch.uint8)
    labels = torch.zeros(1000, dtype=torch.int64)
    labels[977] = 3
    MicroBatches(InMemory(images, labels), ORDER, classes=4)
    with pytest.raises(Unfit, match=r"Sample 977 of the train set .* the label 3, and there are 3 classes"):
        MicroBatches(InMemory(images, labels), ORDER, classes=3)


def test_what_is_in_bulk_and_has_dicts_is_read_whole():
    class Bulk(Together):
        in_bulk = True

        def __getitem__(self, index):
            return {"image": super().__getitem__(index)[0], "label": 0}

        def __getitems__(self, indices):
            return super().__getitems__(indices.tolist())

    held = whole(Bulk(), torch.device("cpu"), at_most=1 << 20)
    assert held is not None
    assert torch.equal(held.labels, torch.arange(64) % 10)


@pytest.mark.parametrize(("mode", "channels"), [("P", 3), ("CMYK", 3), ("L", 1), ("RGB", 3), ("1", 1), ("I;16", 1)])
def test_a_pil_image_is_its_colours_and_not_the_numbers_in_its_palette(mode, channels):
    red = Image.new("RGB", (6, 4), (255, 0, 0))
    image = Image.new(mode, (6, 4)) if mode == "I;16" else red.convert(mode)
    tensor = as_tensor(image)
    assert tensor.shape == (channels, 4, 6)
    assert as_tensor(torch.zeros(4, 6)).shape == as_tensor(np.zeros((4, 6))).shape == (1, 4, 6)
    if channels == 3:
        assert tensor[:, 0, 0].tolist() == [255, 0, 0]


def test_a_part_of_a_dataset_draws_what_the_whole_draws():
    """torch's Subset asks for whole batches; what is drawn at random is a function of the micro-batch all the same."""
    dataset = part(Drawn())
    images = [batch(dataset)["image"] for _ in range(2)]
    assert torch.equal(*images)


@pytest.fixture
def folders(tmp_path):
    """Photographs in two classes; one of them is cut short."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for number in range(16):
                Image.new("RGB", (20, 20), (number * 9, 0, 0)).save(tmp_path / "images" / split / name / f"{number:02}.jpg")
    cut = tmp_path / "images/train/dog/03.jpg"
    cut.write_bytes(cut.read_bytes()[:300])
    return tmp_path / "images"


@pytest.mark.parametrize("dataset", [ImageFolder, lambda root: part(ImageFolder(root))])
def test_a_file_that_is_cut_short_is_named(folders, dataset):
    with pytest.raises(Unfit, match=r"^Sample \d+ of the train set \(\w+, .*dog/03.jpg\) can't be read: OSError: Truncated"):
        batch(dataset(str(folders / "train")))


RUN = (
    *("fit", "--config=configs/ddp.yaml", "--data.batch_size=4", "--data.global_batch_size=16", "--trainer.precision=32-true"),
    *("--model.network.init_args.widths=[8]", "--model.network.init_args.blocks=1", "--trainer.max_epochs=1"),
)


def of(train, val=None, **extra):
    """The words that name these datasets."""
    sets = {"train": train, "val": val or {"class_path": "tests.data.strange.Strange"}}
    settings = {"num_classes": 10, **sets, **extra}
    source = {"class_path": "project.data.Datasets", "init_args": settings}
    return f"--data.source={json.dumps(source)}"


def of_folders(root, ranks):
    source = ("--data.source=project.data.ImageFolders", f"--data.source.root={root}", "--data.source.init_args.image_size=8")
    size = ("--data.batch_size=2", f"--data.global_batch_size={2 * ranks}", "--model.network.init_args.num_classes=2")
    return *source, *size


def strange(how):
    return {"class_path": "tests.data.strange.Strange", "init_args": {"how": how}}


def assert_one_line(run, *parts):
    assert run.code in (1, 2), run.output  # 2 on the rank that reads it, and 1 on those that lose that one
    assert "Traceback" not in run.output, run.output
    assert run.output.count("ERROR") == 1, run.output
    for part_ in parts:
        assert part_ in run.output


@pytest.mark.parametrize(("workers", "ranks"), [(0, 1), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_it_is_one_line_in_whatever_process_it_is_read(quick, folders, workers, ranks):
    run = quick(*RUN, *of_folders(folders, ranks), f"--data.num_workers={workers}", ranks=ranks)
    assert_one_line(run, "of the train set (ImageFolder, ", "dog/03.jpg) can't be read: OSError: Truncated")


def test_a_run_that_skips_it_lists_it_at_the_end(quick, folders):
    run = quick(*RUN, *of_folders(folders, 1), "--data.num_workers=1", "--data.on_error=skip")
    assert run.code == 0, run.output
    assert "data.on_error=skip: 1 of the images can't be read" in run.output
    assert "dog/03.jpg) can't be read: OSError: Truncated" in run.output


def test_a_prediction_has_no_row_for_it_and_no_other_images_row(quick, folders):
    fit = quick(*RUN, *of_folders(folders, 1), "--data.num_workers=0", "--data.on_error=skip", "--run=it")
    assert fit.code == 0, fit.output
    shutil.copytree(folders / "train", folders / "test")
    words = ("predict", "--run=it", "--data.batch_size=1", "--trainer.limit_predict_batches=1.0")
    assert_one_line(quick(*words, "--data.on_error=stop"), "dog/03.jpg) can't be read: OSError: Truncated")
    tables = []
    for workers, size, ranks in ((0, 1, 1), (1, 3, 2)):
        run = quick(*words, f"--data.num_workers={workers}", f"--data.batch_size={size}", ranks=ranks)
        assert run.code == 0, run.output
        assert "data.on_error=skip: 1 of the images can't be read, and have no prediction: Sample 19 of" in run.output
        tables.append(max(fit.runs[0].glob("predict-*/predictions.csv"), key=lambda path: path.stat().st_mtime).read_text())
    rows = [line.split(",") for line in tables[0].splitlines()[1:]]
    assert [int(row[0]) for row in rows] == [number for number in range(32) if number != 19]
    names = [f"{kind}/{number:02}.jpg" for kind in ("cat", "dog") for number in range(16)]
    assert all(row[3].endswith(names[int(row[0])]) for row in rows)
    assert tables[1] == tables[0]


def test_what_can_not_be_meant_ends_a_run_before_its_first_step(quick):
    """Also in the validation set, which training does not see."""
    for how, text in (
        ("three parts", "of the val set (Strange) is a tuple of 3 (a tensor of uint8 (3, 8, 8), the int "),
        ("bytes as floats", "The images of the val set are float32 from 0 to 255 (first seen in sample "),
    ):
        run = quick(*RUN, of(strange("usual"), strange(how)), "--data.num_workers=1")
        assert_one_line(run, text)
        assert "epoch 1" not in run.output


def test_dicts_and_shares_train_and_normalising_is_left_to_who_wants_to(quick):
    known = {"class_path": "tests.data.strange.Strange", "init_args": {"how": "normalised by itself"}}
    for words in (
        (of(strange("shares in doubles"), strange("dict")), "--data.num_workers=1", "--trainer.precision=64-true"),
        (of(known, known, mean=0.0, std=1.0),),
    ):
        run = quick(*RUN, *words)
        assert run.code == 0, run.output
        assert "val/acc5" in run.output
        assert "WARNING" not in run.output
