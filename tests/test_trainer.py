"""The Trainer from Python, as Lightning's is used in scripts and notebooks."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, Timer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch.utils.data import DataLoader, IterableDataset

from project import Trainer
from project.errors import UserError
from project.launch.early_start import free_port
from project.step.precision import auto_precision, cpu_precision
from tests.conftest import environment


def trainer(tmp_path, **settings):
    short = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 2}
    quiet = {"enable_progress_bar": False, "logger": False, "accelerator": "cpu", "devices": 1}
    return Trainer(default_root_dir=tmp_path, **short | quiet | settings)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["deepcopy", "pickle"])
def test_it_can_be_copied_before_and_after_a_fit(tmp_path, how):
    """As Lightning's tuner, notebooks and ddp_spawn do."""
    first = trainer(tmp_path, logger=None)
    copied = how(first)
    first.fit(BoringModel())
    recopied = how(first)
    for duplicate in (copied, recopied):
        duplicate.fit_loop.max_epochs = 2
        duplicate.fit(BoringModel())
    assert (first.global_step, copied.global_step, recopied.global_step) == (4, 8, 8)


def test_two_fits_in_a_row_go_on(tmp_path):
    """As with Lightning's: the second one takes up where the first ended, and a test follows."""
    model, data, made = BoringModel(), BoringDataModule(), trainer(tmp_path)
    made.fit(model, data)
    made.fit_loop.max_epochs = 3
    made.fit(model, data)
    assert (made.global_step, made.current_epoch) == (12, 3)
    assert made.test(model, data) == [{}] or made.test(model, data)


class Stream(IterableDataset):
    """Nobody knows how many samples come."""

    def __iter__(self):
        return iter(torch.randn(5, 32))


def test_an_epoch_of_unknown_length_is_over_when_it_is(tmp_path):
    """A checkpoint of its end continues with the next epoch."""
    first, data = trainer(tmp_path, limit_train_batches=None), DataLoader(Stream(), batch_size=None)
    first.fit(BoringModel(), data)
    first.save_checkpoint(tmp_path / "end.ckpt")
    resumed = trainer(tmp_path, limit_train_batches=None, max_epochs=3)
    resumed.fit(BoringModel(), data, ckpt_path=tmp_path / "end.ckpt")
    assert (resumed.current_epoch, resumed.global_step) == (3, 15)


class Frozen(BoringModel):
    def configure_optimizers(self):
        return None


def test_a_module_needs_no_optimizer(tmp_path):
    made = trainer(tmp_path, enable_progress_bar=True)
    with pytest.warns(UserWarning, match="will run with no optimizer"):
        made.fit(Frozen())
    assert made.state.finished


class Place(Callback):
    """Has a path in its state, as Lightning's SpikeDetection does."""

    def __init__(self, path):
        self.path = path

    def state_dict(self):
        return {"path": self.path}

    def load_state_dict(self, state_dict):
        self.path = state_dict["path"]


class NothingToValidate(BoringModel):
    def val_dataloader(self):
        return []


@pytest.mark.parametrize("exact", [False, True])
def test_an_empty_list_of_loaders_is_none(tmp_path, caplog, exact):
    trainer(tmp_path, exact=exact, global_batch_size=1).fit(NothingToValidate())
    assert not [line for line in caplog.text.splitlines() if "val loader" in line]


def test_a_path_in_a_callbacks_state_comes_back(tmp_path):
    trainer(tmp_path, callbacks=[Place(tmp_path)]).fit(BoringModel())
    newest = max((tmp_path / "checkpoints").glob("*.ckpt"))
    resumed = trainer(tmp_path, max_epochs=2, callbacks=[place := Place(None)])
    resumed.fit(BoringModel(), ckpt_path=newest)
    assert (resumed.global_step, place.path) == (8, tmp_path)


@pytest.mark.slow
def test_ddp_spawn(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    made, model = trainer(tmp_path, devices=2, strategy="ddp_spawn"), BoringModel()
    before = torch.clone(model.layer.weight)
    made.fit(model)
    assert not torch.equal(before, model.layer.weight)
    assert made.state.finished


def test_a_run_without_a_folder_gets_one_of_its_own(tmp_path, monkeypatch):
    """Two of them in one directory would take each other's checkpoints for their own."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        trainer(None, logger=None).fit(BoringModel())
    program = "from tests.test_trainer import *; trainer(None, logger=None).fit(BoringModel())"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=environment())
    folders = sorted((tmp_path / "lightning_logs").iterdir())
    assert len(folders) == 3
    assert all((folder / "checkpoints/step-000000004.ckpt").is_file() for folder in folders)
    assert [path.name for path in tmp_path.iterdir()] == ["lightning_logs"]


@pytest.mark.parametrize("folder", ["s3://bucket/run", "simplecache::gs://bucket/run", Path("memory://run")])
def test_a_folder_at_a_url_is_refused(tmp_path, monkeypatch, folder):
    """As a path it would be one of this host, which a pod loses."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="not at a URL"):
        Trainer(default_root_dir=folder, accelerator="cpu")
    assert not [*tmp_path.iterdir()]
    Trainer(default_root_dir=tmp_path / "C:run", accelerator="cpu")


def test_last_is_the_newest_checkpoint_of_the_folder(tmp_path, caplog):
    """Of a program that was started again; a damaged one is passed over."""
    trainer(tmp_path).fit(BoringModel(), ckpt_path="last")  # nothing to resume from yet
    assert caplog.text.count(f"There is no checkpoint in {tmp_path}: the run begins at its beginning.") == 1
    assert "last checkpoint" not in caplog.text, "Lightning's words"
    checkpoints = sorted((tmp_path / "checkpoints").glob("*.ckpt"))
    assert [path.name for path in checkpoints] == ["step-000000004.ckpt"]
    (tmp_path / "checkpoints/step-000000009.ckpt").write_bytes(b"cut short")
    resumed = trainer(tmp_path)
    resumed.fit_loop.max_epochs = 2
    resumed.fit(BoringModel(), ckpt_path="last")
    assert (resumed.global_step, resumed.current_epoch) == (8, 2)


def test_who_has_set_no_max_time_is_not_referred_to_it(tmp_path, caplog):
    made = {"the duration of Timer": {"callbacks": Timer({"seconds": 0})}, "trainer.max_time": {"max_time": {"seconds": 0}}}
    for limit, settings in made.items():
        trainer(tmp_path / limit, **settings).fit(BoringModel())
        assert f"Stopped by {limit} after step" in caplog.text
        caplog.clear()


def test_a_gradient_accumulation_that_is_set_twice_is_refused(tmp_path):
    callbacks = [GradientAccumulationScheduler({0: 2})]
    with pytest.raises(ValueError, match="by epoch, and the global batch makes it 4"):
        trainer(tmp_path, callbacks=callbacks, accumulate_grad_batches=4).fit(BoringModel())
    trainer(tmp_path, callbacks=callbacks).fit(BoringModel())


def test_a_module_that_steps_by_itself_in_float64(tmp_path):
    model = BoringModel()
    model.automatic_optimization = False

    def training_step(batch):
        optimizer = model.optimizers()
        optimizer.zero_grad()
        model.manual_backward(model.step(batch))
        optimizer.step()

    model.training_step = training_step
    made = trainer(tmp_path, precision="64-true")
    made.fit(model)
    assert made.global_step == 4


def test_the_best_is_found_by_what_is_there(tmp_path):
    class Validated(BoringModel):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", float([3, 1, 2][self.current_epoch]))

    made = trainer(tmp_path)
    made.fit_loop.max_epochs = 3
    made.fit(Validated())
    best = made.checkpoint_callback.best_model_path
    assert best.endswith("step-000000008.ckpt")
    anew = trainer(tmp_path)
    anew.validate(Validated(), ckpt_path="best")  # of a program that was started again
    assert anew.resuming.chosen == best
    with pytest.raises(UserError, match=r"has the metric 'val/acc' .* HINT: set checkpoints.monitor, or --ckpt_path last"):
        trainer(tmp_path / "other").validate(Validated(), ckpt_path="best")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"architecture": "x86_64", "avx2": True}, "32-true"),
        ({"architecture": "x86_64", "avx512_bw": True, "avx512_vl": True, "avx512_dq": True}, "bf16-mixed"),
        ({"architecture": "x86_64", "avx512_bw": True}, "32-true"),
        ({"architecture": "aarch64", "bf16": True}, "bf16-mixed"),
        ({"architecture": "aarch64", "bf16": False}, "32-true"),
    ],
)
def test_bf16_that_is_asked_for_is_taken_where_a_cpu_has_kernels_for_it(monkeypatch, capabilities, expected):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: capabilities)
    assert cpu_precision("bf16-mixed")[0] == expected


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "16-mixed"), ((8, 0), "bf16-mixed"), ((9, 0), "bf16-mixed")])
def test_auto_precision_is_bf16_on_gpus_that_multiply_in_it(monkeypatch, tmp_path, capability, expected):
    on_cpu = Trainer(precision="auto", accelerator="cpu", default_root_dir=tmp_path)
    assert on_cpu.precision in ("32-true", "bf16-mixed")
    assert auto_precision() == "16-mixed" or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert auto_precision() == expected
