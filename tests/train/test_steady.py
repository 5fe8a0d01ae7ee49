"""A steady step asks a GPU for little beside what the network is, and never waits for it: shown where there is no GPU."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from project.data import ImageData, Synthetic, datamodule
from project.model import ImageClassifier, MiniResNet
from project.step.ddp import OrderedDDP, own_stream
from project.survive.nonfinite import NonFinite
from project.trainer import Trainer
from project.watch.fingerprints import Fingerprints
from tests.operators import Operators

SMALL = partial(MiniResNet, widths=(8, 8, 8))


class OnMeta(CPUAccelerator):
    """Lets a run have a device on which there are shapes and no values: to look at one raises."""

    def setup_device(self, device: torch.device) -> None:
        pass


def on_meta() -> dict[str, Any]:
    strategy = SingleDeviceStrategy(torch.device("meta"))
    strategy.teardown = lambda: None  # type: ignore[method-assign]  # there is nothing to bring back to the CPU
    return {"accelerator": OnMeta(), "strategy": strategy}


class Looks(ImageClassifier):
    """Looks at its loss, as many a tutorial does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if loss.item() > 100:
            raise RuntimeError
        return loss


def fit(folder: Any, module: Any, *callbacks: Callback, steps: int = 6, **settings: Any) -> None:
    trainer = Trainer(
        max_steps=steps, callbacks=list(callbacks), default_root_dir=folder, logger=False, devices=1, log_every_n_steps=1000,
        enable_progress_bar=False, enable_checkpointing=False, num_sanity_val_steps=0, limit_val_batches=0, **settings,
    )  # fmt: skip
    data = ImageData(
        Synthetic(train_size=1000, val_size=8, image_size=8), batch_size=4, num_workers=0, crop_padding=1, flip=True
    )
    trainer.fit(module, datamodule=data)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 3}])
def test_no_step_looks_at_what_the_device_has(tmp_path, monkeypatch, late, precision, settings):
    # Before the first step: how long the loader is, and what the first batch looks like.
    monkeypatch.setattr("lightning.pytorch.loops.fit_loop.has_len_all_ranks", lambda *_, **__: True)
    monkeypatch.setattr(ImageData, "_look_at", lambda *_: None)
    monkeypatch.setattr(NonFinite, "_queue_flag", lambda *_: None)  # without a wait: counted in test_loop.py
    monkeypatch.setattr(Fingerprints, "_write_all", lambda *_, **__: None)  # at the end
    fit(tmp_path, ImageClassifier(SMALL()), precision=precision, **on_meta(), **settings)
    with pytest.raises(RuntimeError, match="meta"):
        fit(tmp_path, Looks(SMALL()), precision=precision, **on_meta(), **settings)


class OneStep(Callback):
    """Counts what a device is asked for in a step that is like any other."""

    def __init__(self) -> None:
        self.operators = Operators()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            self.operators.__enter__()
        elif batch_idx == 6:
            self.operators.__exit__(None, None, None)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_asks_for_few_operators_beside_the_networks_own(tmp_path, monkeypatch, late, precision):
    """Crop, flip, normalise, sums and statistics of batch norm, metrics, the check, a fingerprint: 15 + 26; it was 15 + 83.

    The 15 are the plain network's own count of its batches, which it does not do here.
    """
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    looks, drawn = OneStep(), datamodule.drawn_moves
    once = drawn(torch.arange(4), 0, 0, 1, True, 8)
    monkeypatch.setattr(datamodule, "drawn_moves", lambda *_: once)  # it is the host that draws
    fit(tmp_path, ImageClassifier(SMALL(), optimizer=sgd), looks, steps=8, accelerator="cpu", precision=precision)

    network = SMALL().to(memory_format=torch.channels_last)
    optimizer = sgd(network.parameters())
    for _ in range(2):
        with Operators() as plain:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision != "32-true", cache_enabled=False):
                loss = F.cross_entropy(network(torch.rand(4, 3, 8, 8)), torch.zeros(4, dtype=torch.int64))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert looks.operators.launches - plain.launches <= 30


class Made(Exception):
    pass


def test_on_a_gpu_gradients_lie_in_their_buckets_and_no_stream_waits_for_another(monkeypatch):
    """Lightning makes DistributedDataParallel within a stream of its own (Lightning#21746); that is left to who needs it."""
    made = []

    def make(self: Any, module: Any, **settings: Any) -> None:
        made.append(settings["gradient_as_bucket_view"])
        raise Made

    def refuse(stream: Any) -> Any:
        raise AssertionError("a stream of its own")

    monkeypatch.setattr(torch.cuda, "stream", refuse)
    monkeypatch.setattr(DistributedDataParallel, "__init__", make)
    for settings in ({}, {"gradient_as_bucket_view": False}):
        with pytest.raises(Made):
            OrderedDDP(SMALL(), device_ids=[0], **settings)
    assert made == [True, False]


def test_what_a_module_wants_left_to_each_rank_stays_so(monkeypatch):
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda *_, **__: (_ for _ in ()).throw(Made))
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    module._ddp_params_and_buffers_to_ignore = ["1.bias"]
    for _ in range(2):  # made anew, when a layer is unfrozen
        with pytest.raises(Made):
            OrderedDDP(module)
        names = {"0.running_mean", "0.running_var", "0.num_batches_tracked", "1.bias"}
        assert {*module._ddp_params_and_buffers_to_ignore} == names


class Stream:
    def __init__(self) -> None:
        self.waits_for: list[Any] = []

    def wait_stream(self, stream: Any) -> None:
        self.waits_for.append(stream)


def test_what_a_device_does_on_another_stream_has_its_place_among_the_rest(monkeypatch):
    """A wrapper that is made in the middle of a run reads weights that a step may still be about to change."""
    before, own = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: before)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: own)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with own_stream():
        assert (own.waits_for, before.waits_for) == ([before], [])
    assert before.waits_for == [own]
