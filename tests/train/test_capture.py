"""A step that is recorded and repeated is the step that it was recorded from: on a CPU, with a stand-in for CUDA's graphs."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from project.data import ImageData, Synthetic
from project.model import ImageClassifier, MiniResNet
from project.trainer import Trainer
from tests.train.recorded import OnCpu

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True)


class Dropping(MiniResNet):
    def __init__(self) -> None:
        super().__init__(widths=(4, 8, 8))
        self.head = nn.Sequential(nn.Dropout(0.3), self.head)  # type: ignore[assignment]


class Counting(ImageClassifier):
    """Knows how often Python went through its step."""

    recorded: frozenset[str] = frozenset()
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def fit(folder: Path, recorder: Any, *callbacks: Callback, module: Any = Counting, **settings: Any) -> Any:
    torch.manual_seed(0)
    made = {"max_epochs": 2, **settings}
    trainer = Trainer(
        callbacks=list(callbacks), default_root_dir=folder, accelerator="cpu", devices=1, enable_progress_bar=False,
        num_sanity_val_steps=0, log_every_n_steps=5, **made,
    )  # fmt: skip
    trainer.fit_loop.epoch_loop.recorder = recorder  # type: ignore[attr-defined]
    data = ImageData(
        Synthetic(train_size=126, val_size=20, image_size=8), batch_size=4, num_workers=0, crop_padding=1, flip=True
    )
    module = module(Dropping(), optimizer=SGD)
    trainer.fit(module, datamodule=data)
    return trainer, module


def fingerprints(folder: Path) -> list[str]:
    rows = (folder / "fingerprints.csv").read_text().splitlines()
    return [row for row in rows if not row.startswith("#")]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 2},
    {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5, "val_check_interval": 3},
    {"precision": "bf16-mixed", "nonfinite": "skip"},
    {"accumulate_grad_batches": 3, "plugins": lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 64.0))},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_same_run_to_the_last_bit_and_no_python_in_between(tmp_path, settings):
    found = []
    for name, recorder in (("one by one", OnCpu(steps=10**6)), ("graphs", OnCpu(steps=3))):
        made = {key: value() if callable(value) else value for key, value in settings.items()}
        trainer, module = fit(tmp_path / name, recorder, **made)
        counters = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict()
        found.append((module.state_dict(), trainer.global_step, counters, trainer.callback_metrics, recorder, module.steps))
    (ours, *rest, alone, _), (theirs, *others, graphs, steps) = found
    assert rest[:2] == others[:2]
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())
    assert rest[2] == others[2]
    assert (alone.recorded, alone.replayed) == (0, 0)
    assert graphs.recorded == min(3, settings.get("accumulate_grad_batches", 1))
    assert graphs.replayed > graphs.recorded
    assert steps + graphs.replayed == found[0][-1]
    assert fingerprints(tmp_path / "graphs") == fingerprints(tmp_path / "one by one")
