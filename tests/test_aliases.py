"""A module that was written for `pytorch_lightning` is one of `lightning.pytorch`."""

import sys
from importlib import import_module

import lightning.pytorch
import pytest

from project import Trainer
from project.aliases import take_either_lightning
from project.errors import UserError


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The other package is there, with classes of its own."""
    (tmp_path / "pytorch_lightning").mkdir()
    (tmp_path / "pytorch_lightning/__init__.py").write_text("class LightningModule: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "pytorch_lightning"]:
        del sys.modules[name]


def test_both_names_mean_the_same(fake):
    spec = lightning.pytorch.__spec__
    for _ in range(2):
        take_either_lightning()
    assert import_module("pytorch_lightning").LightningModule is lightning.pytorch.LightningModule
    assert import_module("pytorch_lightning.callbacks").Callback is lightning.pytorch.Callback
    assert lightning.pytorch.__spec__ is spec
    with pytest.raises(ModuleNotFoundError):
        import_module("pytorch_lightning.nothing")


def test_a_module_of_the_other_library_that_was_imported_first_is_refused_with_what_helps(fake, tmp_path):
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "_Finder"]
    other = import_module("pytorch_lightning").LightningModule
    assert other is not lightning.pytorch.LightningModule
    with pytest.raises(UserError, match=r"is a LightningModule of pytorch_lightning.*HINT: from project import Trainer first"):
        Trainer(default_root_dir=tmp_path, accelerator="cpu", max_epochs=1).fit(other())


def test_a_trainer_takes_its_own_arguments_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_TRAINER_EXACT", "True")
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "3")
    for _ in range(2):
        trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu")
        assert (trainer.exact, trainer.max_epochs) == (True, 3)
