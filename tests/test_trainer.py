"""The Trainer from Python, as Lightning's is used in scripts and notebooks."""

import copy
import pickle

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from project import Trainer


def trainer(tmp_path, **settings):
    quiet = {"enable_progress_bar": False, "logger": False, "accelerator": "cpu", "devices": 1}
    return Trainer(default_root_dir=tmp_path, max_epochs=1, limit_train_batches=4, limit_val_batches=2, **quiet | settings)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deepcopy", "pickle"])
def test_it_can_be_copied_before_and_after_a_fit(tmp_path, how):
    """As Lightning's tuner, notebooks and ddp_spawn do."""
    first = trainer(tmp_path, logger=None)
    copied = how(first)
    first.fit(BoringModel())
    again = how(first)
    for one in (copied, again):
        one.fit_loop.max_epochs = 2
        one.fit(BoringModel())
    assert (first.global_step, copied.global_step, again.global_step) == (4, 8, 8)


def test_two_fits_in_a_row_go_on(tmp_path):
    """As with Lightning's: the second one takes up where the first ended, and a test follows."""
    model, data, one = BoringModel(), BoringDataModule(), trainer(tmp_path)
    one.fit(model, data)
    one.fit_loop.max_epochs = 3
    one.fit(model, data)
    assert (one.global_step, one.current_epoch) == (12, 3)
    assert one.test(model, data) == [{}] or one.test(model, data)


@pytest.mark.slow
def test_ddp_spawn(tmp_path):
    one, model = trainer(tmp_path, devices=2, strategy="ddp_spawn"), BoringModel()
    before = torch.clone(model.layer.weight)
    one.fit(model)
    assert not torch.equal(before, model.layer.weight)
    assert one.state.finished
