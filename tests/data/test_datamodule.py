"""ImageData: its settings, its loaders."""

import resource

import pytest
import torch
from lightning.pytorch import Callback

from project.data import ImageData, Synthetic
from project.model import ImageClassifier
from project.step.loaders import attached_for_fit
from project.trainer import Trainer
from scripts.bench.worker import Trivial


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"num_workers": -1}])
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ImageData(**wrong)


class Seen(Callback):
    """Keeps what is trained and validated on."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.batches.append((batch["image"], batch["label"], batch["sample"]))

    on_validation_batch_start = on_train_batch_start


def seen(folder, **settings):
    """The batches of two epochs, and the splits that lay on the device."""
    callback = Seen()
    data = ImageData(Synthetic(train_size=70, val_size=20, image_size=8), batch_size=8, crop_padding=1, **settings)
    trainer = Trainer(max_epochs=2, default_root_dir=folder, callbacks=[callback], logger=False, accelerator="cpu")
    trainer.fit(ImageClassifier(Trivial()), datamodule=data)
    return callback.batches, [split for split in ("train", "val") if data._whole(split)]


@pytest.mark.parametrize("resident", ["auto", "never"])
def test_a_batch_takes_no_new_memory(tmp_path, resident):
    data = ImageData(Synthetic(train_size=20_000), batch_size=64, resident=resident)
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, logger=False, accelerator="cpu", devices=1)
    module = ImageClassifier(Trivial())
    trainer.strategy._lightning_module = module
    pages = []
    with attached_for_fit(trainer, module, data, spare_cores=0):
        for batch in data.train_dataloader():
            data.on_after_batch_transfer(batch, 0)
            pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    assert len(pages) == 313
    assert pages[-1] - pages[100] < 212  # one a batch; a batch of floats is 192 of them


def test_images_on_the_device_are_those_that_are_loaded(tmp_path):
    batches, held = seen(tmp_path / "held")
    loaded, none = seen(tmp_path / "loaded", resident="never")
    assert (held, none) == (["train", "val"], [])
    assert seen(tmp_path / "asked", num_workers=0)[1] == []
    assert len(batches) == len(loaded) > 20
    for batch, expected in zip(batches, loaded, strict=True):
        assert all(torch.equal(*pair) for pair in zip(batch, expected, strict=True))
