"""Fused optimisers, clipping and precisions, each with each: the same steps as a plain loop takes."""

from itertools import product
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from project import Trainer
from project.errors import UserError
from project.model.fused import fused
from project.step.optimizers import give_zero_momentum

STEPS = 5
CLIPS: list[dict[str, Any]] = [
    {},
    {"gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
]
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters, **fused: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **fused),
    "AdamW": lambda parameters, **fused: torch.optim.AdamW(parameters, lr=0.01, **fused),
}


def samples() -> TensorDataset:
    chance = torch.Generator().manual_seed(0)
    points = torch.randn(4 * STEPS, 6, generator=chance)
    return TensorDataset(points, points.sum(1, keepdim=True))


class Small(LightningModule):
    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.network(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def scaler(precision: str) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=precision == "16-mixed")


def plain(make: Any, clip: dict[str, Any], precision: str) -> dict[str, torch.Tensor]:
    """What torch's documentation tells everybody to do."""
    module, scale = Small(make), scaler(precision)
    optimizer = module.configure_optimizers()
    low = torch.float16 if precision == "16-mixed" else torch.bfloat16
    for batch in DataLoader(samples(), 4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=low, enabled=precision != "32-true"):
            loss = module.training_step(batch, 0)
        scale.scale(loss).backward()
        scale.unscale_(optimizer)
        if "gradient_clip_algorithm" in clip:
            nn.utils.clip_grad_value_(module.parameters(), clip["gradient_clip_val"])
        elif clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip["gradient_clip_val"])
        scale.step(optimizer)
        scale.update()
    return module.state_dict()


@pytest.mark.parametrize(
    ("name", "fused", "precision"), product(OPTIMIZERS, (False, True), ("32-true", "bf16-mixed", "16-mixed"))
)
@pytest.mark.parametrize("clip", CLIPS, ids=["no clipping", "by norm", "by value"])
def test_a_step_is_that_of_a_plain_loop(tmp_path, name, fused, precision, clip):
    def make(parameters: Any) -> Any:
        return OPTIMIZERS[name](parameters, fused=fused)

    module = Small(make)
    how: dict[str, Any] = {"precision": precision}
    if precision != "32-true":  # our Trainer takes another one on a CPU, or on one that is no faster so
        scaling = scaler(precision) if precision == "16-mixed" else None
        how = {"plugins": [MixedPrecision(precision, "cpu", scaler=scaling)]}
    trainer = Trainer(
        max_epochs=1, default_root_dir=tmp_path, accelerator="cpu", devices=1, enable_progress_bar=False, logger=False,
        enable_checkpointing=False, global_batch_size=4, **how, **clip,
    )  # fmt: skip
    trainer.fit(module, DataLoader(samples(), 4))
    assert trainer.global_step == STEPS
    expected = plain(make, clip, precision)
    for key, value in module.state_dict().items():
        assert torch.allclose(value, expected[key], rtol=1e-6, atol=1e-7), key


def trained(folder: Any, fused: bool | None, steps: int, **arguments: Any) -> Trainer:
    module = Small(lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=fused))
    trainer = Trainer(
        max_steps=steps, default_root_dir=folder, accelerator="cpu", devices=1, enable_progress_bar=False, logger=False,
        global_batch_size=4,
    )  # fmt: skip
    trainer.fit(module, DataLoader(samples(), 4), **arguments)
    return trainer


@pytest.mark.parametrize(("before", "now"), [(None, True), (True, None)])
def test_a_run_that_goes_on_computes_its_steps_as_this_start_says(tmp_path, before, now):
    """A checkpoint of a run on CPUs said how they do it, to the GPUs, which then waited for the host, or skipped nothing."""
    trained(tmp_path, before, 2)
    (checkpoint,) = tmp_path.glob("checkpoints/*.ckpt")
    trainer = trained(tmp_path / "more", now, 4, ckpt_path=checkpoint)
    assert trainer.global_step == 4
    assert [group["fused"] for group in trainer.optimizers[0].param_groups] == [now]
    expected = trained(tmp_path / "whole", now, 4)
    for name, value in trainer.lightning_module.state_dict().items():
        assert torch.allclose(value, expected.lightning_module.state_dict()[name], rtol=1e-5, atol=1e-7), name


def test_a_first_step_that_is_skipped_leaves_no_garbage_in_the_momentum():
    """torch leaves it uninitialised (docs/dev/upstream.md): memory that was freed just now is not zero."""
    weight = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    give_zero_momentum(optimizer)
    del [torch.full((1000,), 7.0) for _ in range(100)][:]
    for gradient, overflow in ((torch.inf, 1.0), (0.0, 0.0)):
        weight.grad, optimizer.found_inf = torch.full_like(weight, gradient), torch.tensor(overflow)  # type: ignore[attr-defined]
        optimizer.step()
    assert not weight.any()
    weight.grad = torch.ones(1000)
    optimizer.step()
    assert torch.equal(weight, torch.full((1000,), -0.1))


def test_an_sgd_whose_momentum_can_not_begin_with_zeros_is_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9, dampening=0.1, fused=True)
    with pytest.raises(UserError, match="set fused=false, or dampening=0"):
        give_zero_momentum(optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimiser_is_fused_where_nobody_has_said_otherwise(name):
    def parameters() -> list[Any]:
        weights = [nn.Parameter(torch.full((3,), float(number))) for number in (1, 2)]
        for weight in weights:
            weight.grad = torch.ones(3)
        return weights

    weights, plain = parameters(), parameters()
    grouped: list[Any] = [
        [{"params": some[:1], "weight_decay": 0.5, "lr": 0.3}, {"params": some[1:]}] for some in (weights, plain)
    ]
    made = fused(OPTIMIZERS[name](grouped[0]), devices=("cpu",))
    reference = OPTIMIZERS[name](grouped[1])
    assert made.defaults["fused"]
    assert made.defaults["lr"] == reference.defaults["lr"]
    for group, expected in zip(made.param_groups, reference.param_groups, strict=True):
        assert {**group, "params": 0} == {**expected, "params": 0, "fused": True}
    for _ in range(3):
        made.step()
        reference.step()
    assert all(torch.allclose(weight, expected) for weight, expected in zip(weights, plain, strict=True))
    for setting in ({"fused": False}, {"foreach": True}):
        given = OPTIMIZERS[name](parameters(), **setting)
        assert fused(given, devices=("cpu",)) is given
    given = OPTIMIZERS[name](parameters())
    assert fused(given) is given  # on a CPU
    rarer = torch.optim.RMSprop(parameters())
    assert fused(rarer, devices=("cpu",)) is rarer
