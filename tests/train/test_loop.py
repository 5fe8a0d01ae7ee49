"""A steady step does what was asked for and no more: counted, not timed, so that a lost lever shows on any machine."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch.nn.parallel import DistributedDataParallel

from project.data import ImageData, Synthetic, SyntheticImages
from project.model import ImageClassifier
from project.trainer import Trainer
from scripts.bench.worker import Trivial
from tests.operators import Operators

FIRST, LAST = 20, 70


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


def fit(folder: Any, *callbacks: Callback, num_workers: Any = 0, module: Any = ImageClassifier, **settings: Any) -> None:
    trainer = Trainer(
        max_steps=LAST + 10, log_every_n_steps=1000, callbacks=list(callbacks), limit_val_batches=0, devices=1,
        default_root_dir=folder, num_sanity_val_steps=0, enable_progress_bar=False, **{"accelerator": "cpu", **settings},
    )  # fmt: skip
    data = ImageData(Synthetic(train_size=1000, val_size=64, image_size=8), batch_size=2, num_workers=num_workers)
    trainer.fit(module(Trivial()), datamodule=data)


def test_a_step_waits_for_the_device_once_at_most(tmp_path):
    operators = Operators()
    fit(tmp_path, Between(operators.__enter__, lambda: operators.__exit__(None, None, None)))
    # NonFinite looks at its flag, which on a GPU it does two steps later.
    assert operators.count.get("_local_scalar_dense", 0) <= LAST - FIRST


class Fused(ImageClassifier):
    def __init__(self, network: Any) -> None:
        super().__init__(network, optimizer=partial(torch.optim.SGD, lr=0.01, fused=True))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_with_a_fused_optimiser_nobody_waits_for_the_device_in_fp16_either(tmp_path, late, clip):
    """As on a GPU: the flag is read two steps later, and is on the host by then, which is the one look that is counted."""
    operators = Operators()
    looks_on = Between(operators.__enter__, lambda: operators.__exit__(None, None, None))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    fit(tmp_path, looks_on, module=Fused, plugins=[plugin], gradient_clip_val=clip)
    assert scaler.get_scale() == 64  # it took every step
    assert operators.count.get("_local_scalar_dense", 0) <= LAST - FIRST  # 2 a step, where the optimiser is not fused


@pytest.mark.gpu
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


HOOKS = [name for name in dir(Callback) if name.startswith("on_") and "exception" not in name and "checkpoint" not in name]


class Recorder(Callback):
    """Notes every hook, with what it was given and where the loop stood."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        for name in HOOKS:
            setattr(self, name, partial(self._note, name))

    def _note(self, name: str, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if "batch" not in name and "backward" not in name and "zero_grad" not in name and "step" not in name:
            return
        where = trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.current.__dict__.copy()
        self.notes.append((name, where, module._current_fx_name, [_plain(argument) for argument in args]))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    return value if isinstance(value, int | float | str | tuple) else type(value).__name__


class Logs(ImageClassifier):
    """Has hooks of its own, and logs in its step."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.cleared = getattr(self, "cleared", 0) + 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss.detach(), prog_bar=True)
        return {"loss": loss, "more": 7}


class Seldom(ImageClassifier):
    """Moves its schedule at every third step."""

    def configure_optimizers(self) -> Any:
        configured: Any = super().configure_optimizers()
        configured["lr_scheduler"]["frequency"] = 3
        return configured


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**40)  # too high, for the first steps


@pytest.mark.parametrize("module", [ImageClassifier, partial(Logs, lr_interval="epoch"), Seldom])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01},
        {"precision": "bf16-mixed", "val_check_interval": 7, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "64-true", "strategy": "ddp"},
        {"plugins": lambda: MixedPrecision("16-mixed", "cpu", scaler()), "gradient_clip_val": 0.01},
    ],
)
def test_it_is_lightnings_loop(tmp_path, module, settings):
    """All hooks, in their order, with the same values; the same weights; the same state of all loops and of the optimiser."""
    results = []
    for name, profiler in (("ours", None), ("lightnings", "simple")):  # with a profiler it is left to Lightning
        torch.manual_seed(0)
        recorder, model = Recorder(), module(Trivial())
        made = {key: value() if callable(value) else value for key, value in settings.items()}
        trainer = Trainer(
            max_epochs=2, log_every_n_steps=5, callbacks=[recorder], default_root_dir=tmp_path / name, logger=False,
            accelerator="cpu", devices=1, enable_progress_bar=False, profiler=profiler, **made,
        )  # fmt: skip
        data = ImageData(Synthetic(train_size=101, val_size=20, image_size=8), batch_size=4, num_workers=0)
        trainer.fit(model, datamodule=data)
        assert trainer.fit_loop.epoch_loop._on_fast_path == (profiler is None)
        state = trainer._checkpoint_connector.dump_checkpoint()
        results.append((recorder.notes, _plain(state["loops"]), state["state_dict"], state["optimizer_states"], model))
    result, expected = results
    assert len(result[0]) > 200
    assert result[0] == expected[0]
    assert result[1] == expected[1]
    torch.testing.assert_close(result[2], expected[2], rtol=0, atol=0)
    torch.testing.assert_close(result[3], expected[3], rtol=0, atol=0)
    if isinstance(module, partial):
        assert result[4].cleared == expected[4].cleared > 10
        assert result[4].trainer.callback_metrics["mine"] == expected[4].trainer.callback_metrics["mine"]


def test_one_process_has_nobody_to_share_gradients_with(tmp_path):
    """No copies into DDP's buckets."""
    models = []

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            models.append(trainer.strategy.model)

    fit(tmp_path, Look(), strategy="ddp")
    assert not isinstance(models[0], DistributedDataParallel)


def test_a_callback_that_is_put_on_is_heard(tmp_path):
    heard = Heard()
    fit(tmp_path, heard)
    assert heard.heard == ["before", "after"] * (LAST + 10)


def test_a_way_to_drop_gradients_that_is_put_on_an_optimiser_is_taken(tmp_path):
    dropped = []

    class PutOn(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            zero_grad = trainer.optimizers[0].zero_grad
            trainer.optimizers[0].zero_grad = lambda: (dropped.append(1), zero_grad())

    fit(tmp_path, PutOn())
    assert len(dropped) == LAST + 10


class Plateau(ImageClassifier):
    """Halves the learning rate at every step, as its metric never gets better."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, cooldown=0, eps=0.0)
        named = {"scheduler": schedule, "interval": "step", "monitor": "same", "reduce_on_plateau": True}
        return {"optimizer": optimizer, "lr_scheduler": named}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("same", 1.0)
        return super().training_step(batch, batch_idx)


class Validations(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.steps.append(trainer.global_step)


def test_after_a_step_schedules_look_at_their_metric_and_validations_are_due(tmp_path):
    validations = Validations()
    trainer = Trainer(
        max_steps=6, callbacks=[validations], val_check_interval=2, limit_val_batches=1, devices=1, accelerator="cpu",
        default_root_dir=tmp_path, num_sanity_val_steps=0, enable_progress_bar=False, logger=False,
    )  # fmt: skip
    data = ImageData(Synthetic(train_size=100, val_size=64, image_size=8), batch_size=2, num_workers=0)
    trainer.fit(Plateau(Trivial()), datamodule=data)
    assert trainer.fit_loop.epoch_loop._on_fast_path
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5**5  # the first is the best
    assert validations.steps == [2, 4, 6]


class Own(torch.optim.SGD):
    """Takes a step of the size that the loss has."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None
        return super().step(closure)


@pytest.mark.parametrize("kind", [Own, torch.optim.LBFGS])
def test_an_optimiser_that_asks_for_the_loss_gets_it(tmp_path, kind):
    def module(network: Any) -> ImageClassifier:
        return ImageClassifier(network, optimizer=lambda parameters: kind(parameters, lr=0.01))

    fit(tmp_path, module=module)


def test_a_step_without_a_loss_is_refused_and_one_of_nothing_left_out(tmp_path):
    class Lossless(ImageClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"lost": super().training_step(batch, batch_idx)}

    with pytest.raises(MisconfigurationException, match="'loss' key needs to be present"):
        fit(tmp_path, module=Lossless)

    class Unreduced(ImageClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx).expand(3)

    with pytest.raises(RuntimeError, match=r"a loss of shape \(3,\). HINT: return one number"):
        fit(tmp_path, module=Unreduced)

    class Nothing(ImageClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)

    module = Nothing(Trivial())
    before = [parameter.detach().clone() for parameter in module.parameters()]
    fit(tmp_path, module=lambda network: module)
    assert all(torch.equal(value, parameter) for value, parameter in zip(before, module.parameters(), strict=True))


def test_a_loop_of_ones_own_is_left_alone(tmp_path):
    """A LightningModule whose training_step takes the batch alone."""

    class Plain(ImageClassifier):
        def training_step(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
            return super().training_step(batch, 1)

    trainer = Trainer(max_steps=2, default_root_dir=tmp_path, limit_val_batches=0, accelerator="cpu", logger=False)
    data = ImageData(Synthetic(train_size=64, val_size=64, image_size=8), batch_size=2, num_workers=0)
    trainer.fit(Plain(Trivial()), datamodule=data)
    assert trainer.global_step == 2
