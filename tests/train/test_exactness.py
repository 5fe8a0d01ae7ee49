"""What can't be the same on any number of ranks is refused, with its name and what to do."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, RandomSampler
from torchmetrics import MeanSquaredError, PearsonCorrCoef

from project import Trainer
from project.errors import NonFiniteError, UserError
from tests.own import Duel, Points, Regression


class AsksForRanks(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.world_size)


class AsksForItsRank(Regression):
    def on_train_start(self) -> None:
        torch.manual_seed(self.global_rank)
        assert self.trainer.is_global_zero
        assert self.trainer.estimated_stepping_batches == 12


class AsksForMicroBatches(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.trainer.num_training_batches * 3
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=int(total))]


class ComputesWithin(Regression):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("so_far", self.error.compute())
        return loss


class OfEachRank(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.correlation = PearsonCorrCoef()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.correlation.update(batch["point"][:, 0], batch["sum"][:, 0])
        return super().training_step(batch, batch_idx)


class LogsEachStep(Regression):
    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), on_step=True)


class StepsByItself(Regression):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


class MovesABuffer(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(()))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.running = 0.9 * self.running + 0.1 * loss.detach()
        return loss


class Teaches(Regression):
    """A teacher follows in a hook that each rank comes to after its own first forward pass."""

    hook: str | None = "on_before_zero_grad"

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(16, 1).double().requires_grad_(False)
        if self.hook:
            setattr(self, self.hook, self.follow)

    def follow(self, *_: Any) -> None:
        self.teacher.weight.data.lerp_(self.network[-1].weight.data, 0.1)


class TeachesInEach(Teaches):
    hook = "on_train_batch_end"


class TeachesOnce(Teaches):
    hook = "on_before_optimizer_step"


class MovesACodebook(Teaches):
    hook = None

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.follow()
        return super().training_step(batch, batch_idx)


class MakesACodebookAnew(Teaches):
    """As implementations of VQ-VAE do, with a parameter that the optimiser does not know."""

    hook = None

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.teacher.weight = torch.nn.Parameter(0.9 * self.teacher.weight.detach(), requires_grad=False)
        return super().training_step(batch, batch_idx)


class CountsItsMoves(MovesABuffer):
    """Moves a buffer in a hook, as averages of weights that count do."""

    def on_before_zero_grad(self, *_: Any) -> None:
        self.running += 1

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return Regression.training_step(self, batch, batch_idx)


class Gathers(Regression):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return self.all_gather(self.loss(batch), sync_grads=True).mean()


class Sparse(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 4, sparse=True)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        return self.loss(batch) + self.table(torch.tensor([1, 2])).sum()


class Complex(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.phase = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))


class OfRankZero(Regression):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("mine", loss, rank_zero_only=True)
        return loss


class ReturnsNone(Regression):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        pass


class MeetsInSteps(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError(dist_sync_on_step=True)


@pytest.fixture
def fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(module, loader=None, **settings):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        settings = {"global_batch_size": 2, **settings}
        trainer = Trainer(**{"exact": True, **settings}, max_epochs=2, default_root_dir=tmp_path, **quiet)
        loader = loader or DataLoader(Points(12), batch_size=2)
        trainer.fit(module, loader, DataLoader(Points(6), batch_size=2))
        return trainer

    return run


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (AsksForRanks, "AsksForRanks.configure_optimizers asks for trainer.world_size"),
        (AsksForMicroBatches, "AsksForMicroBatches.configure_optimizers asks for trainer.num_training_batches"),
        (ComputesWithin, "The metric error was computed within an epoch"),
        (OfEachRank, "The metric correlation (PearsonCorrCoef) brings the ranks' states together in a way of its own"),
        (LogsEachStep, "self.log('val_loss', on_step=True) in validation_step logs each micro-batch of rank 0"),
        (MovesABuffer, "each micro-batch moves the buffer running"),
        (
            CountsItsMoves,
            "forward pass of each rank, and ranks have others. HINT: move it once a step, in on_before_optimizer_step",
        ),
        (MakesACodebookAnew, "each micro-batch moves the parameter teacher.weight in its forward pass"),
        (MovesACodebook, "each micro-batch moves the parameter teacher.weight in its forward pass"),
        (Teaches, "moves the parameter teacher.weight in on_before_zero_grad"),
        (TeachesInEach, "moves the parameter teacher.weight in a hook between the micro-batches"),
        (Gathers, "self.all_gather brings together what the ranks have at once"),
        (Sparse, "the gradient of table.weight is sparse"),
        (Complex, "phase is complex"),
        (OfRankZero, "self.log('mine', rank_zero_only=True) in training_step logs the micro-batches of rank 0"),
        (ReturnsNone, "training_step returned None"),
        (MeetsInSteps, "The metric error brings the ranks together in each step (dist_sync_on_step)"),
        (StepsByItself, "StepsByItself has a method optimizer_step of its own"),
        (Duel, "Duel steps by itself (automatic_optimization is False)"),
    ],
)
def test_a_module_that_depends_on_the_ranks(fit, module, says):
    with pytest.raises(UserError) as refused:
        fit(module(), global_batch_size=4 if issubclass(module, Teaches) else 2)
    assert says in str(refused.value)
    assert "HINT: " in str(refused.value)


class Compiled(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.network.compile(backend="eager")


class CompiledForShapes(Compiled):
    static_shapes = True


def test_what_a_module_compiles_by_itself(fit, caplog):
    with pytest.raises(UserError, match=r"exact can't be kept: torch\.compile translates network anew as shapes change"):
        fit(Compiled())
    fit(CompiledForShapes())
    assert "torch.compile" not in caplog.text
    fit(Compiled(), exact=False)
    assert caplog.text.count("torch.compile translates network anew") == 1


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon])
def test_optimisers_that_take_one_gradient_for_a_step_are_taken(fit, kind):
    class Learns(Regression):
        def configure_optimizers(self) -> Any:
            return kind([parameter for parameter in self.parameters() if parameter.ndim == 2])

    fit(Learns())


class Foreign(torch.optim.SGD):
    """Somebody's optimiser: asks for the loss first, as torch's do."""


class AsksTwice(Foreign):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class AsksElsewhere(Foreign):
    """Moves the weights, and asks for their gradient, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        return closure()


class AsksForAGradient(Foreign):
    def step(self, closure: Any = None) -> Any:
        self.zero_grad()
        return super().step(closure)


class GoesByTheLoss(Foreign):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 0.1 * float(closure())
        return super().step()


def learning_by(kind):
    class Learns(Regression):
        def configure_optimizers(self) -> Any:
            return kind(self.parameters(), lr=0.05)

    torch.manual_seed(0)
    return Learns()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (AsksTwice, "AsksTwice asks for the loss again"),
        (AsksElsewhere, "AsksElsewhere asks for the loss again"),
        (AsksForAGradient, "AsksForAGradient asks for the loss again"),
        (GoesByTheLoss, "the optimiser computes with the loss"),
        (torch.optim.LBFGS, "LBFGS may ask for the loss again"),
    ],
)
def test_an_optimiser_that_needs_more_than_one_gradient_is_refused_in_its_first_step(fit, kind, says):
    with pytest.raises(UserError, match=f"^trainer.exact can't be kept: {says}"):
        fit(module := learning_by(kind))
    assert module.trainer.global_step == 0


def test_an_optimiser_of_somebodys_takes_the_steps_of_torchs(fit):
    modules = [learning_by(kind) for kind in (torch.optim.SGD, Foreign)]
    for module in modules:
        fit(module, global_batch_size=4)
    assert all(map(torch.equal, *(module.parameters() for module in modules)))


def test_a_teacher_that_follows_once_a_step_is_no_trouble(fit):
    fit(TeachesOnce(), global_batch_size=4)


def test_a_module_that_asks_for_its_rank_is_warned_once(fit, caplog):
    """It may only want to name a file; and it may ask for what is the same everywhere."""
    fit(AsksForItsRank())
    assert caplog.text.count("AsksForItsRank.on_train_start asks for trainer.") == 1
    assert "AsksForItsRank.on_train_start asks for trainer.global_rank" in caplog.text


def test_a_module_that_asks_for_its_micro_batches_is_warned_without_exact_too(fit, caplog):
    class Anneals(Regression):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            return self.loss(batch) * (1 - batch_idx / self.trainer.num_training_batches)

    fit(Anneals(), exact=False)
    (line,) = [record.getMessage() for record in caplog.records if "asks for trainer." in record.getMessage()]
    assert line.startswith("Anneals.training_step asks for trainer.num_training_batches")
    assert "HINT: trainer.estimated_stepping_batches" in line


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sync_batchnorm": True}, "trainer.sync_batchnorm"),
        ({"gradient_compression": "fp16"}, "trainer.gradient_compression"),
        ({"benchmark": True}, "trainer.benchmark"),
        ({"deterministic": False}, "trainer.deterministic"),
    ],
)
def test_a_setting_that_does(fit, settings, says):
    with pytest.raises(UserError, match=rf"trainer.exact can't be kept: {says} .*HINT: "):
        fit(Regression(), **settings)


class TakesBatches(Regression):
    def validation_step(self, dataloader_iter: Any) -> None:
        batch, _, _ = next(dataloader_iter)
        self.log("val_loss", self.loss(batch), batch_size=2)


def test_a_step_that_takes_its_batches_out_of_several_loaders(tmp_path):
    loaders = [DataLoader(Points(6), batch_size=2) for _ in range(2)]
    trainer = Trainer(exact=True, logger=False, accelerator="cpu", default_root_dir=tmp_path)
    trainer.validate(TakesBatches(), loaders[:1])
    with pytest.raises(UserError, match=r"validation_step\(dataloader_iter\) takes batches of 2 loaders.*HINT: "):
        trainer.validate(TakesBatches(), loaders)


def test_a_loader_with_an_order_of_its_own(fit):
    with pytest.raises(UserError, match=r"the train loader \(DataLoader\) gives its samples in its own order.*HINT: "):
        fit(Regression(), DataLoader(Points(12), batch_size=2, sampler=RandomSampler(range(12), replacement=True)))


def halves(items: list[dict[str, Any]]) -> Any:
    batch = torch.utils.data.default_collate(items)
    return {**batch, "point": batch["point"] / 2}


class Plain(DataLoader[Any]):
    """As those of libraries that bring a function of theirs, and no more."""

    def __init__(self, size: int, **settings: Any) -> None:
        super().__init__(Points(size), collate_fn=halves, **settings)
        self.note = size


class Own(Plain):
    def __len__(self) -> int:
        return super().__len__()


def test_a_subclass_of_the_loader_without_methods_is_dealt_out(fit):
    settings = {"batch_size": 2, "shuffle": True, "generator": torch.Generator().manual_seed(3)}
    weights = []
    for loader in (DataLoader(Points(12), collate_fn=halves, **settings), Plain(12, **settings)):
        torch.manual_seed(1)
        module = Regression()
        trainer = fit(module, loader)
        weights.append(module.network[0].weight.detach().clone())
    assert torch.equal(*weights)
    assert trainer.train_dataloader.note == 12
    with pytest.raises(UserError, match=r"the train loader \(Own\) gives .*: it is of a class of its own"):
        fit(Regression(), Own(12, **settings))


def test_a_batch_that_lies_anywhere_in_memory_is_aligned(fit):
    """Libraries may take another way through memory that does not begin at a multiple of their vectors."""

    class Sees(Regression):
        at: ClassVar[set[int]] = set()

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            self.at.add(batch["point"].data_ptr() % 64)
            return self.loss(batch)

    def shifted(items):
        batch = torch.utils.data.default_collate(items)
        room = torch.empty(batch["point"].numel() + 1, dtype=torch.float64)[1:]
        return {**batch, "point": room.view_as(batch["point"]).copy_(batch["point"])}

    fit(Sees(), DataLoader(Points(12), batch_size=2, collate_fn=shifted))
    assert Sees.at == {0}


@dataclass(frozen=True)
class Fixed:
    """A batch that Lightning moves by its own `to`."""

    point: torch.Tensor
    sum: torch.Tensor

    def to(self, device: torch.device, **_: Any) -> "Fixed":
        return Fixed(self.point.to(device), self.sum.to(device))


@pytest.mark.parametrize("factor", [1.0, float("nan")])
def test_a_batch_that_cannot_be_changed_is_taken(fit, factor):
    class OfFixed(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert {values.data_ptr() % 64 for values in (batch.point, batch.sum)} == {0}
            return self.loss(vars(batch)) * factor

    def collate(items):
        batch = torch.utils.data.default_collate(items)
        room = torch.empty(batch["sum"].numel() + 1, dtype=torch.float64)[1:]
        return Fixed(batch["point"], room.view_as(batch["sum"]).copy_(batch["sum"]))

    with nullcontext() if factor == 1 else pytest.raises(NonFiniteError):
        fit(OfFixed(), DataLoader(Points(12), batch_size=2, collate_fn=collate))


@pytest.mark.parametrize(("settings", "threads"), [({}, 1), ({"threads": 2}, 2)])
def test_threads_are_part_of_the_run(fit, settings, threads):
    class Counts(Regression):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            assert torch.get_num_threads() == threads
            return self.loss(batch)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        fit(Counts(), **settings)
    finally:
        torch.set_num_threads(before)


def test_without_a_global_batch_a_step_would_follow_from_the_ranks(fit):
    with pytest.raises(UserError, match=r"needs trainer.global_batch_size"):
        fit(Regression(), global_batch_size=None)


def test_data_that_ask_for_the_number_of_ranks_are_refused(tmp_path):
    class Asks(LightningDataModule):
        def setup(self, stage: str) -> None:
            assert self.trainer is not None
            self.size = 24 // self.trainer.world_size

        def train_dataloader(self) -> Any:
            return DataLoader(Points(12), batch_size=self.size)

    trainer = Trainer(
        exact=True, global_batch_size=24, max_epochs=1, default_root_dir=tmp_path, accelerator="cpu", logger=False
    )
    with pytest.raises(UserError, match=r"Asks.setup asks for trainer.world_size"):
        trainer.fit(Regression(), datamodule=Asks())
