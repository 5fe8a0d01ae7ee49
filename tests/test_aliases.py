"""A module that was written for `pytorch_lightning` is one of `lightning.pytorch`."""

import sys
from importlib import import_module

import lightning.pytorch
import pytest

from project.cli.aliases import take_either_lightning


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
