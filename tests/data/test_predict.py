"""Predictions for images that nobody has labelled: a folder of files, each named in predictions.csv."""

import csv

import pytest
import torch
from PIL import Image

from project.data.batches import MicroBatches
from project.data.order import Order
from tests.data.strange import Alone, Strange

SMALL = (
    *("--model.network=project.model.MiniResNet", "--model.network.init_args.num_classes=2", "--trainer.precision=32-true"),
    *("--data.source.init_args.image_size=8", "--model.network.init_args.widths=[8]", "--model.network.init_args.blocks=1"),
    *("--data.batch_size=4", "--data.global_batch_size=12", "--data.num_workers=1"),
)


@pytest.fixture
def folders(tmp_path):
    """Dark cats and bright dogs; and what came in the post, in folders of its own, with a file that is no image."""
    for split in ("train", "val"):
        for name, grey in (("cat", 20), ("dog", 230)):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for number in range(24):
                colour = (grey + number % 5,) * 3
                Image.new("RGB", (12, 10), colour).save(tmp_path / "images" / split / name / f"{number}.png")
    for number in range(11):
        place = tmp_path / "post" / ("monday" if number % 2 else "") / f"{number:02}.PNG"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 20 + number), (220, 220, 220) if number % 3 else (30, 30, 30)).save(place)
    (tmp_path / "post/notes.txt").write_text("hello")
    return tmp_path


def test_each_file_in_a_folder_has_a_prediction(quick, folders):
    source = ("--config=configs/imagefolder.yaml", "--data.source.init_args.root=images")
    fitted = quick("fit", *source, *SMALL, "--trainer.max_epochs=6", "--data.crop_padding=0", "--run=fitted")
    assert fitted.code == 0, fitted.output
    checkpoint = max((folders / "lightning_logs/fitted/checkpoints").glob("*.ckpt"))
    # Where it is used, there need be no training images.
    for split in ("train", "val"):
        (folders / "images" / split).rename(folders / split)
    words = (f"--ckpt_path={checkpoint}", "--data.source.init_args.predict=post")
    for ranks in (1, 3):
        run = quick("predict", *source, *SMALL, *words, f"--run=predicted-{ranks}", ranks=ranks)
        assert run.code == 0, run.output
        with (folders / f"lightning_logs/predicted-{ranks}/predictions.csv").open() as file:
            rows = list(csv.DictReader(file))
        files = sorted(path.relative_to(folders) for path in (folders / "post").rglob("*.PNG"))
        assert [row["file"] for row in rows] == list(map(str, files))
        for row in rows:
            number = int(row["file"][-6:-4])
            assert row["label"] == ("1" if number % 3 else "0"), row

    for name, text in (("nowhere", "No folder nowhere."), ("lightning_logs", "There are no images in lightning_logs.")):
        run = quick("predict", *source, *SMALL, words[0], f"--data.source.init_args.predict={name}")
        assert run.code == 2
        assert text in run.output
        assert "Traceback" not in run.output


def test_a_dataset_of_ones_own_may_give_images_alone():
    batch = MicroBatches(Alone(), Order(64, 64, 1), "predict", labelled=False)[0, 0, 0]
    assert batch.keys() == {"image", "label", "sample"}  # and the files, if they are known
    assert torch.equal(batch["image"], MicroBatches(Strange(), Order(64, 64, 1))[0, 0, 0]["image"])
