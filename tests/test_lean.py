"""A steady step does what was asked for and no more: counted, not timed, so that a lost lever shows on any machine."""

import cProfile
import pstats
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from project.bench.gate import Trivial
from project.data import ImageData, Synthetic, SyntheticImages
from project.model import ImageClassifier
from project.trainer import Trainer

FIRST, LAST = 20, 70


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


class Between(Callback):
    """Has something look on from one step to another."""

    def __init__(self, begin: Any, end: Any) -> None:
        self.begin, self.end = begin, end

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (FIRST, LAST):
            (self.begin if batch_idx == FIRST else self.end)()


class Heard(Callback):
    """Has one hook of its own, and one put on it."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.on_after_backward = lambda *_: self.heard.append("after")  # type: ignore[method-assign]

    def on_before_backward(self, *_: Any) -> None:
        self.heard.append("before")


def fit(folder: Any, *callbacks: Callback, num_workers: Any = 0, **settings: Any) -> None:
    trainer = Trainer(
        max_steps=LAST + 10, log_every_n_steps=1000, callbacks=list(callbacks), limit_val_batches=0, devices=1,
        default_root_dir=folder, num_sanity_val_steps=0, enable_progress_bar=False, **{"accelerator": "cpu", **settings},
    )  # fmt: skip
    data = ImageData(Synthetic(train_size=1000, val_size=64, image_size=8), batch_size=2, num_workers=num_workers)
    trainer.fit(ImageClassifier(Trivial()), datamodule=data)


def test_a_step_makes_few_python_calls(tmp_path):
    profile = cProfile.Profile()
    fit(tmp_path, Between(profile.enable, profile.disable))
    calls = pstats.Stats(profile).total_calls / (LAST - FIRST)  # type: ignore[attr-defined]
    assert calls < 1900  # Lightning's loop, left as it is, makes 4,400


def test_a_step_waits_for_the_device_once_at_most(tmp_path):
    operators = Operators()
    fit(tmp_path, Between(operators.__enter__, lambda: operators.__exit__(None, None, None)))
    # NonFinite looks at its flag, which on a GPU it does two steps later.
    assert operators.count.get("_local_scalar_dense", 0) <= LAST - FIRST


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("num_workers", [0, "auto"])
def test_the_host_never_waits_for_a_gpu_between_log_points(tmp_path, precision, num_workers):
    mode = torch.cuda.set_sync_debug_mode  # 'error' makes whatever waits for the device raise
    looks_on = Between(lambda: mode("error"), lambda: mode("default"))
    fit(tmp_path, looks_on, accelerator="gpu", precision=precision, num_workers=num_workers)


def test_a_batch_of_any_size_takes_as_many_operators():
    dataset = SyntheticImages(10_000)
    counts = []
    for size in (2, 64, 512):
        with Operators() as operators:
            dataset.__getitems__(list(range(size)))
        counts.append(sum(operators.count.values()))
    assert counts[0] == counts[1] == counts[2] < 70


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_every_hook_that_a_callback_has_is_called(tmp_path, profiler):
    heard = Heard()
    fit(tmp_path, heard, profiler=profiler)
    assert heard.heard == ["before", "after"] * (LAST + 10)


def test_a_loop_of_ones_own_is_left_alone(tmp_path):
    """A LightningModule whose training_step takes the batch alone."""

    class Plain(ImageClassifier):
        def training_step(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
            return super().training_step(batch, 1)

    trainer = Trainer(max_steps=2, default_root_dir=tmp_path, limit_val_batches=0, accelerator="cpu", logger=False)
    data = ImageData(Synthetic(train_size=64, val_size=64, image_size=8), batch_size=2, num_workers=0)
    trainer.fit(Plain(Trivial()), datamodule=data)
    assert trainer.global_step == 2
