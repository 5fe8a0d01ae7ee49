"""Batch norm's statistics: the mean over a step's forward passes, whatever way a network goes through its layers."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as StockTrainer
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from project.data import ImageData, Synthetic
from project.errors import UserError
from project.exact.batch_norm import StepStatistics
from project.model import ImageClassifier, MiniResNet
from project.step.batch_norm_layers import is_plain
from project.trainer import Trainer
from tests.operators import Operators


class Winding(LightningModule):
    """One layer is gone through twice, one in every other micro-batch, one never; their momenta differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.seldom = (
            nn.BatchNorm1d(3, momentum=None),
            nn.BatchNorm1d(3),
            nn.BatchNorm1d(3, momentum=0.3),
        )
        self.never, self.head = nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.passes: dict[str, list[torch.Tensor]] = {"first": [], "twice": [], "seldom": []}

    def through(self, name: str, values: torch.Tensor) -> torch.Tensor:
        self.passes[name].append(values.detach())
        return getattr(self, name)(values)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        values = self.through("twice", self.through("twice", self.through("first", batch[0])).square())
        if batch_idx % 2:
            values = self.through("seldom", values)
        return self.head(values + self.never.weight.sum() * 0 + self.seldom.weight.sum() * 0).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(48, 3)), batch_size=4)


class EachStep(Callback):
    """The statistics after each step, beside what they were to be."""

    def __init__(self) -> None:
        self.steps = 0
        self.wanted: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.steps += 1
        for name, momentum in (("first", 1 / self.steps), ("twice", 0.1), ("seldom", 0.3)):
            layer, passes = getattr(pl_module, name), pl_module.passes[name]
            mean = torch.stack([inputs.mean(0) for inputs in passes]).mean(0)
            var = torch.stack([inputs.var(0) for inputs in passes]).mean(0)
            wanted = self.wanted.get(name, (torch.zeros(3), torch.ones(3)))
            self.wanted[name] = tuple(old + momentum * (new - old) for old, new in zip(wanted, (mean, var), strict=True))
            torch.testing.assert_close((layer.running_mean, layer.running_var), self.wanted[name])
            assert layer.num_batches_tracked == self.steps
            passes.clear()
        assert pl_module.never.running_var.tolist() == [1, 1, 1]
        assert pl_module.never.num_batches_tracked == 0


def trained(folder: Any, module: Any, kind: Any = Trainer, data: Any = None, **settings: Any) -> dict[str, torch.Tensor]:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu", "devices": 1}
    kind(max_epochs=1, default_root_dir=folder, num_sanity_val_steps=1, **quiet, **settings).fit(module, datamodule=data)
    return dict(module.state_dict())


@pytest.mark.parametrize("accumulation", [2, 4])
def test_every_pass_counts_and_where_there_is_none_nothing_moves(tmp_path, accumulation):
    looks = EachStep()
    trained(tmp_path, Winding(), accumulate_grad_batches=accumulation, callbacks=[looks])
    assert looks.steps == 12 // accumulation


def images() -> dict[str, Any]:
    data = ImageData(Synthetic(train_size=1000, val_size=8, image_size=8), batch_size=4, num_workers=0)
    return {"module": ImageClassifier(MiniResNet(widths=(8, 8, 8))), "data": data}


def test_a_device_has_little_work_with_the_statistics(tmp_path, monkeypatch):
    """Of 15 layers; it was 32 operators a step, 15 of them for the counts."""
    launches: list[int] = []

    def counted(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with Operators() as operators:
                result = method(*args, **kwargs)
            launches.append(operators.launches)
            return result

        return call

    names = ("on_train_batch_start", "_add", "_send", "on_step_taken")
    for name in names:
        monkeypatch.setattr(StepStatistics, name, counted(getattr(StepStatistics, name)))
    trained(tmp_path, **images(), max_steps=4)
    assert len(launches) == 4 * len(names)
    assert sum(launches[-len(names) :]) <= 18


class Counting:
    """A backend of torch.compile that translates nothing, and counts what it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.mark.faults
def test_a_network_is_not_translated_again_for_every_micro_batch(tmp_path):
    """Once for training and once for evaluation. It was once for each of the 8 micro-batches, and then no more."""
    torch.compiler.reset()
    given, backend = images(), Counting()
    given["module"].network.compile(backend=backend)
    trained(tmp_path, **given, accumulate_grad_batches=8, max_steps=31)  # the last step of the epoch is a shorter one
    assert 0 < backend.graphs <= 3


class Kept(nn.BatchNorm1d):
    """Computes as torch's, with an activation behind it, as timm's do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


class Renorm(nn.BatchNorm1d):
    """Goes by its running statistics in training."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        output = (input - self.running_mean) / (self.running_var + 1).sqrt() * self.weight + self.bias
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(input.mean(0), 0.1)
                self.running_var.lerp_(input.var(0), 0.1)
                self.num_batches_tracked += 1
        return output


class Normed(LightningModule):
    """A block that may be computed again in the backward pass."""

    def __init__(self, kind: type[nn.BatchNorm1d] = nn.BatchNorm1d, recompute: str = "", manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = nn.Sequential(nn.Linear(3, 5), kind(5)), nn.Linear(5, 1)
        self.recompute, self.automatic_optimization = recompute, not manual
        self.example = torch.randn(48, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        values = batch[0].requires_grad_()
        values = (
            checkpoint(self.block, values, use_reentrant=self.recompute == "reentrant")
            if self.recompute
            else self.block(values)
        )
        loss = self.head(values).square().mean()
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.example), batch_size=4)


@pytest.mark.parametrize(
    "how", [{}, {"exact": True, "global_batch_size": 8}, {"manual": True}], ids=["plain", "exact", "manual"]
)
@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_what_is_computed_again_in_the_backward_pass_moves_nothing(tmp_path, recompute, how):
    manual, settings = how.get("manual", False), {key: value for key, value in how.items() if key != "manual"}
    once = trained(tmp_path, Normed(manual=manual), **settings)
    assert once["block.1.num_batches_tracked"] == (6 if "exact" in settings else 12)
    twice = trained(tmp_path, Normed(recompute=recompute, manual=manual), **settings)
    assert all(torch.equal(value, twice[name]) for name, value in once.items())


class Looks(Normed):
    """Reads the statistics within its step, as pseudo-labels, a target network, an average and a hook of a layer do."""

    def __init__(self, manual: bool) -> None:
        super().__init__(manual=manual)
        self.target, self.average = copy.deepcopy(self.block), AveragedModel(self.block, use_buffers=True)
        self.labels: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []

    def look(self, layer: Any, inputs: Any, output: Any) -> None:
        self.seen.append(layer.running_mean.clone())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        before = self.block[1].running_mean.clone()
        self.target.load_state_dict(self.block.state_dict())
        with torch.no_grad():
            self.labels.append(self.block.eval()(batch[0]))
        hook = self.block.train()[1].register_forward_hook(self.look)
        loss = super().training_step(batch, batch_idx)
        hook.remove()
        self.average.update_parameters(self.block)
        copied = copy.deepcopy(self.block)
        copied(batch[0])
        assert copied[1].num_batches_tracked == self.block[1].num_batches_tracked + 1
        assert isinstance(self.trainer, Trainer) == torch.equal(self.seen[-1], before)
        return loss


@pytest.mark.parametrize("manual", [False, True])
def test_the_statistics_are_the_layers_own_within_a_step_too(tmp_path, manual):
    """They were those of the micro-batch at hand: labels by an evaluation were of nothing, and copies had them."""
    module, stock = Looks(manual), Looks(manual)
    trained(tmp_path, module)
    trained(tmp_path, stock, StockTrainer)
    torch.testing.assert_close(module.labels, stock.labels)
    for name in ("block", "target"):
        torch.testing.assert_close(getattr(module, name).state_dict(), getattr(stock, name).state_dict())
    assert module.average.module[1].running_mean.any()


class Twice(Normed):
    """Differentiates a loss, and then again, or not, before it goes through the layer once more."""

    def __init__(self, again: bool) -> None:
        super().__init__(manual=True)
        self.again = again

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        loss = self.head(self.block(batch[0])).square().mean()
        self.manual_backward(loss, retain_graph=True)
        if self.again:
            torch.autograd.grad(loss, self.head.weight)
        self.manual_backward(self.head(self.block(2 * batch[0])).square().mean())
        self.optimizers().step()


def test_a_loss_that_is_differentiated_again_hides_no_pass(tmp_path):
    once, again = (trained(tmp_path, Twice(more)) for more in (False, True))
    assert all(torch.equal(value, again[name]) for name, value in once.items())


class Direct(Normed):
    """Calls a layer's `forward` by itself; its head is translated, by a function or as a module, or not."""

    def __init__(self, translate: Any = lambda head: head) -> None:
        super().__init__()
        head = self.head
        self.through_head = translate(head)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        values = self.block[1].forward(self.block[0](batch[0]))
        return self.through_head(values).square().mean()


@pytest.mark.parametrize("translated", ["module", "function"])
def test_what_is_translated_beside_a_layer_is_so_once(tmp_path, translated):
    torch.compiler.reset()
    backend = Counting()

    def translate(head: Any) -> Any:
        return torch.compile(head if translated == "module" else lambda values: head(values), backend=backend, dynamic=False)

    once, plain = (
        trained(tmp_path, Direct(how), max_steps=6, accumulate_grad_batches=2) for how in (translate, lambda head: head)
    )
    assert backend.graphs == 1
    assert all(torch.equal(once[name], value) for name, value in plain.items() if "head" not in name)
    assert plain["block.1.num_batches_tracked"] == 6


def test_a_layer_that_goes_by_its_statistics_in_training_is_left_alone(tmp_path):
    state, stock = (trained(tmp_path, Normed(Renorm), kind, max_steps=9) for kind in (Trainer, StockTrainer))
    assert all(torch.allclose(value, stock[name]) for name, value in state.items())
    with pytest.raises(UserError, match=r"each micro-batch moves the buffer block\.1\.running_mean"):
        trained(tmp_path, Normed(Renorm), exact=True, global_batch_size=8)


def test_which_layers_compute_as_torchs():
    state = torch.get_rng_state()
    kinds = nn.BatchNorm3d(2), nn.SyncBatchNorm(2), Kept(2).to("meta"), Renorm(2)
    assert [is_plain(layer) for layer in kinds] == [True, True, True, False]
    assert torch.equal(state, torch.get_rng_state())


class Own(SequentialSampler):
    """An order that is a user's own: how many batches come is known at their end."""


class Validated(LightningModule):
    """Its validation depends on the statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.layers(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_an_epochs_short_last_step_has_moved_the_statistics_when_the_validation_begins(tmp_path):
    """Five micro-batches, two for a step."""
    data = TensorDataset(torch.randn(18, 3, generator=torch.Generator().manual_seed(0)) * 3 + 1)
    module, loader = Validated(), DataLoader(data, 4, sampler=Own(data))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=2, accumulate_grad_batches=2, default_root_dir=tmp_path, logger=False,
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(data, 4))
    within = trainer.callback_metrics["loss"]
    assert module.layers[0].num_batches_tracked == trainer.global_step == 6
    assert trainer.validate(module, DataLoader(data, 4), verbose=False)[0]["loss"] == within.item()
