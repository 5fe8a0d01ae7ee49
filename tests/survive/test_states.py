"""States that users have where they like: a resumed run continues with all of them, or says which it can't have."""

import csv
import itertools
import logging
import os
import re
import signal
from collections import deque
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch import Trainer as StockTrainer
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MeanSquaredError, MetricTracker

from project import Trainer, run_folders
from project.checkpoints.callback import Checkpoints, copy_to_host
from project.errors import UserError
from project.resume import attributes
from project.sharded.shards import Split
from project.watch.curves import board_tag
from project.watch.history import lives_of
from project.watch.progress import Progress
from tests.conftest import Cli, forked
from tests.own import Points, PointsData, Regression
from tests.survive import keeping
from tests.survive.keeping import Slotted
from tests.survive.test_resume import same


class Stream:
    """A loader of its own, which knows where it is."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.at = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < 6:
            self.at += 1
            self.given.append(self.at)
            points = [Points(60)[6 * self.at + index] for index in range(4)]
            yield {
                name: [p[name] for p in points] if name == "name" else torch.stack([p[name] for p in points])
                for name in points[0]
            }
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Counting(Callback):
    """Counts in an array that it changes in place."""

    def __init__(self) -> None:
        self.counts = np.zeros(5)

    def on_train_batch_end(self, *args: Any) -> None:
        self.counts += 1

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    """The module writes the samples that it sees into the folder that it runs in."""
    monkeypatch.chdir(tmp_path)


class Remembering(Regression):
    """Keeps a mean in a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64), persistent=False)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * batch["point"].mean(0)
        return self.loss({**batch, "point": batch["point"] - self.mean})


def fit(folder: Path, module: Any, loader: Any, steps: int = 4, resume: bool | Path = False, **settings: Any) -> Trainer:
    settings = {"max_epochs": -1, "accelerator": "cpu", "enable_progress_bar": False, "logger": False, **settings}
    trainer = Trainer(default_root_dir=folder, max_steps=steps, **settings)
    trainer.fit(module, loader, ckpt_path="last" if resume is True else resume or None)
    return trainer


def points(size: int = 24) -> DataLoader[Any]:
    return DataLoader(Points(size), batch_size=4, shuffle=True)


def test_a_checkpoint_has_the_values_of_its_step(tmp_path: Path) -> None:
    counting = Counting()
    trainer = fit(tmp_path, Regression(), points(), callbacks=[counting])
    copied: Any = torch.load(trainer.checkpoint_callback.last_model_path, weights_only=False)  # type: ignore[union-attr]
    counting.counts += 100
    (state,) = [state for name, state in copied["callbacks"].items() if "Counting" in name]
    assert state["counts"].tolist() == [4] * 5

    array, tensor = np.zeros(2), torch.zeros(2)
    copy = copy_to_host(Split({"array": array, "deep": [{"tensor": tensor}]}, {})).marked
    array += 1
    tensor += 1
    assert copy["array"].tolist() == copy["deep"][0]["tensor"].tolist() == [0, 0]


def test_a_buffer_that_no_state_dict_has_goes_on(tmp_path: Path) -> None:
    whole, resumed = Remembering(), Remembering()
    resumed.load_state_dict(whole.state_dict())
    fit(tmp_path / "whole", whole, points(), steps=8)
    fit(tmp_path / "parts", resumed, points(), steps=4)
    continued = Remembering()
    fit(tmp_path / "parts", continued, points(), steps=8, resume=True)
    assert torch.equal(whole.mean, continued.mean)
    assert all(map(torch.equal, whole.parameters(), continued.parameters()))


@pytest.mark.parametrize("exact", [False, True])
def test_no_part_of_a_checkpoint_of_ours_is_taken_for_a_users(tmp_path: Path, exact: bool) -> None:
    """A counter of a user's that happened to have its value would count as saved."""
    settings: Any = {"callbacks": [EMAWeightAveraging()], "exact": exact, "global_batch_size": 8, "precision": "32-true"}
    trainer = fit(tmp_path, Regression() if exact else Remembering(), points(), **settings)
    copied: Any = torch.load(trainer.checkpoint_callback.last_model_path, weights_only=False)  # type: ignore[union-attr]
    assert set(copied) - set(attributes._STANDARD) == set()


class Weights(Callback):
    """Keeps the weights that each step begins with."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(pl_module.layer.weight.detach().clone())


def test_averages_of_float64_weights_do_not_round_them(tmp_path: Path) -> None:
    """A validation exchanges the weights for their averages, and back."""
    without, averaged = Weights(), Weights()
    for callbacks in ([without], [averaged, EMAWeightAveraging()]):
        torch.manual_seed(0)
        settings: Any = {"precision": "64-true", "max_epochs": 2, "limit_train_batches": 3, "callbacks": callbacks}
        fit(tmp_path, BoringModel(), None, steps=6, enable_checkpointing=False, **settings)
    assert len(without.seen) == 6
    assert all(map(torch.equal, without.seen, averaged.seen))


def test_without_its_averages_a_run_continues_with_the_weights_that_it_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = []
    for name, callback in (("without", Weights()), ("with", EMAWeightAveraging())):
        torch.manual_seed(0)
        module = BoringModel()
        fit(tmp_path / name, module, None, steps=4, callbacks=[callback])
        fit(tmp_path / name, module := BoringModel(), None, steps=6, resume=True)
        ends.append(module.layer.weight)
    assert torch.equal(*ends)
    assert caplog.text.count("The checkpoint has averaged weights, of a callback that trainer.callbacks no longer has") == 1


class Keeps(BoringModel):
    """Saves what only Python's pickle reads."""

    loaded: object = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["parts"] = deque([1])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["parts"]


def test_who_trusts_a_checkpoint_may_keep_anything_in_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="or set weights_only=False for fit"):
        fit(tmp_path / "safe", Keeps(), None)
    for steps in (4, 8):
        trainer = Trainer(default_root_dir=tmp_path, max_steps=steps, accelerator="cpu", logger=False)
        trainer.fit(module := Keeps(), ckpt_path="last" if steps > 4 else None, weights_only=False)
        assert (tmp_path / f"checkpoints/step-00000000{steps}.ckpt").exists()
    assert module.loaded == deque([1])


def test_a_set_that_has_grown_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Regression(), points(), steps=6)
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, Regression(), points(32), steps=8, resume=True)
    assert "The training set has 32 samples, and had 24 so far: their order is another one from here on." in caplog.text

    fit(tmp_path / "within", Regression(), points(), steps=4)
    with pytest.raises(UserError, match="has 32 samples, and had 24 so far"):
        fit(tmp_path / "within", Regression(), points(32), steps=8, resume=True)


class Noting(Regression):
    """Notes the samples of each step."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.samples, self.asks = dict[int, set[str]](), asks

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.samples.setdefault(self.global_step, set()).update(batch["name"])
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        """Has the loaders made for the length of the run, before it is restored, if it wants to know it."""
        if self.asks:
            self.trainer.estimated_stepping_batches  # noqa: B018
        return super().configure_optimizers()


@pytest.mark.parametrize(("before", "now", "asks"), [(4, 12, False), (12, 4, False), (4, 12, True)])
def test_another_batch_size_goes_on_with_the_next_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: int, now: int, asks: bool
) -> None:
    """A module may divide the global batch by the ranks, of which there are others now."""

    def run(folder: str, size: int, steps: int, resume: bool = False) -> dict[int, set[str]]:
        module, loader = Noting(asks), DataLoader(Points(102), batch_size=size, shuffle=True)
        fit(tmp_path / folder, module, loader, steps, resume, global_batch_size=12)
        return module.samples

    whole = run("whole", now, 16)
    first = run("parts", before, 11)  # of 9 steps an epoch
    with caplog.at_level(logging.WARNING):
        assert first | run("parts", now, 16, resume=True) == whole
    assert f"The training loader's batch_size is {now}, and was {before} so far" in caplog.text


def test_a_batch_size_by_which_the_run_was_stopped_within_a_step_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, Regression(), DataLoader(Points(24), batch_size=4), steps=3)
    with pytest.raises(UserError, match="12 samples into an epoch, which is between two steps of 8"):
        fit(tmp_path, Regression(), DataLoader(Points(24), batch_size=8), steps=6, resume=True)


class SizesByEpoch(LightningDataModule):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes

    def train_dataloader(self) -> Any:
        return DataLoader(Points(24), batch_size=self.sizes[self.trainer.current_epoch])  # type: ignore[union-attr]


def test_a_batch_size_that_changes_by_epoch_is_none_of_another_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Six steps of 4 samples, then three of 8; stopped after 12 samples, which is within a step of 8."""
    settings: Any = {"reload_dataloaders_every_n_epochs": 1}
    fit(tmp_path, Regression(), SizesByEpoch(4, 8), steps=3, **settings)
    with caplog.at_level(logging.WARNING):
        resumed = fit(tmp_path, Regression(), SizesByEpoch(4, 8), steps=9, resume=True, **settings)
    assert (resumed.global_step, resumed.current_epoch) == (9, 2)
    assert "so far" not in caplog.text

    resumed.fit_loop.epoch_loop.max_steps = 12
    resumed.fit(Regression(), DataLoader(Points(24), batch_size=8))  # with the same Trainer, from the beginning
    assert "so far" not in caplog.text


class Curriculum(LightningDataModule):
    """Another set, and other batches, in each epoch."""

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch  # type: ignore[union-attr]
        return DataLoader(Points(8 * (epoch + 1)), batch_size=2 * (epoch + 1))


def test_what_changes_by_epoch_is_no_other_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    often = {"reload_dataloaders_every_n_epochs": 1}
    fit(tmp_path, Regression(), Curriculum(), steps=8, **often)
    assert caplog.text.count("The training loader's batch_size is 4 from epoch 2 on, and was 2") == 1
    fit(tmp_path, Regression(), Curriculum(), steps=12, resume=True, **often)
    assert "The training set has" not in caplog.text


class OfBfloat16(BoringModel):
    """Its optimiser keeps a product of all steps so far in float32."""

    def on_train_epoch_start(self) -> None:
        """Called again where the run resumes: all states are copied before, and restored."""

    def configure_optimizers(self) -> Any:
        return torch.optim.NAdam(self.parameters(), lr=0.1)


def test_an_optimiser_keeps_its_types(tmp_path: Path) -> None:
    def state(folder: Path, *parts: int) -> Any:
        torch.manual_seed(0)
        module, loader = OfBfloat16(), DataLoader(RandomDataset(32, 24), batch_size=4)
        for steps in parts:
            trainer = fit(folder, module, loader, steps=steps, resume=True, precision="bf16-true")
        return [*trainer.optimizers[0].state.values()]

    whole, resumed = state(tmp_path / "whole", 8), state(tmp_path / "parts", 4, 8)
    assert whole[0]["mu_product"].dtype == torch.float32
    assert same(resumed, whole)


class Enclosing(torch.optim.Optimizer):
    """Saves its state in a layout of its own, as pytorch_optimizer's Lookahead does."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.taken = inner, 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.taken = state["taken"]


class Enclosed(Regression):
    def configure_optimizers(self) -> Any:
        return Enclosing(torch.optim.Adam(self.parameters(), lr=0.05))


def test_an_optimisers_own_layout_of_its_state_is_restored(tmp_path: Path) -> None:
    def state(folder: Path, *parts: int) -> Any:
        torch.manual_seed(0)
        module = Enclosed()
        for steps in parts:
            trainer = fit(folder, module, points(), steps=steps, resume=True)
        return trainer.optimizers[0].state_dict()

    assert same(state(tmp_path / "parts", 4, 8), state(tmp_path / "whole", 8))


def test_other_threads_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    threads = torch.get_num_threads()
    try:
        fit(tmp_path, Regression(), points(), threads=1)
        with caplog.at_level(logging.WARNING):
            fit(tmp_path, Regression(), points(), steps=8, resume=True, threads=2)
    finally:
        torch.set_num_threads(threads)
    assert "with 2 thread(s) for each rank's operations in place of 1" in caplog.text


class Taught(Regression):
    """Its teacher is made when the fit begins, and so is not there when a run resumes."""

    def on_fit_start(self) -> None:
        self.teacher = nn.Linear(2, 2)


def test_what_is_made_at_the_start_of_a_fit_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"teacher\.weight was made while the run was going on"):
        fit(tmp_path, module := Taught(), points())
    assert module.trainer.global_step == 0


def test_a_run_of_lightnings_own_trainer_continues_within_its_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Counted in steps, as micro-batches may be others; where an epoch has others, it is refused."""
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=4)
    settings: Any = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    stock = StockTrainer(max_epochs=3, max_steps=5, callbacks=[saves], **settings)
    stock.fit(Regression(), DataLoader(Points(24), batch_size=8))  # 3 steps in an epoch
    again: Any = {"steps": -1, "resume": tmp_path / "epoch=1-step=4.ckpt", "max_epochs": 3}
    ends = fit(tmp_path / "ends", Regression(), points(), global_batch_size=8, **again)
    assert ends.global_step == 9
    assert "the run continues after step 1 of epoch 2" in caplog.text
    with pytest.raises(UserError, match=r"after step 1 of 3 of an epoch, and an epoch has 6 steps here"):
        fit(tmp_path / "other", Regression(), points(), global_batch_size=4, **again)


class LeavesOut(Regression):
    """Leaves its frozen part out of checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {name: value for name, value in kept if not name.startswith("frozen.")}


class PutsBack(LeavesOut):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {**self.state_dict(), **checkpoint["state_dict"]}


class IsNotStrict(LeavesOut):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class Renames(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.rename)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"old.{name}": value for name, value in checkpoint["state_dict"].items()}

    @staticmethod
    def rename(module: nn.Module, saved: dict[str, Any], *more: Any) -> None:
        for name in [*saved]:
            saved[name.removeprefix("old.")] = saved.pop(name)


@pytest.mark.parametrize("kind", [PutsBack, IsNotStrict, Renames])
def test_what_a_module_takes_back_at_a_resume_it_may_save_otherwise(
    kind: type[Regression], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def weights(folder: str, *parts: int) -> Any:
        for steps in parts:
            torch.manual_seed(1)
            fit(tmp_path / folder, module := kind(), points(), steps=steps, resume=steps > parts[0])
        return module.state_dict()

    assert same(weights("parts", 3, 8), weights("whole", 8))
    assert "could not resume" not in caplog.text


def test_what_a_module_does_not_take_back_is_named_before_the_first_step_and_at_the_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, LeavesOut(), points())
    text = r"2 tensor\(s\) differ \(frozen\.weight is not there and \(2, 2\) here"
    assert len(re.findall(rf"could not resume from these checkpoints.*{text}", caplog.text)) == 1
    with pytest.raises(UserError, match=text):
        fit(tmp_path, LeavesOut(), points(), steps=8, resume=True)


def test_a_second_run_in_a_folder_leaves_the_first_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A path that a script has kept leads to the same weights, and the records are those of one run."""
    kept = [best_path(fit(tmp_path, Regression(lr), points())) for lr in (0.01, 0.02, 0.03)]
    bodies = [path.read_bytes() for path in kept]
    assert kept == [tmp_path / run / "checkpoints" / "step-000000004.ckpt" for run in ("", "run-2", "run-3")]
    assert len({*bodies}) == 3
    assert f"this run's folder is {tmp_path / 'run-3'}" in caplog.text
    for run in ("", "run-2", "run-3"):
        assert (tmp_path / run / "fingerprints.jsonl").exists()
        assert len(lives_of(tmp_path / run / "life.jsonl")) == 1
    assert best_path(fit(tmp_path, Regression(), points(), steps=8, resume=True)).parents[1] == tmp_path / "run-3"
    third = fit(tmp_path, Regression(), points(), steps=8, resume=kept[1])
    assert best_path(third).parents[1] == tmp_path / "run-2"
    assert kept[0].read_bytes() == bodies[0]


class Probing(Callback):
    """Trains another network after each epoch, in the same folder."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        fit(Path(trainer.default_root_dir), Regression(), points(), steps=2)


def test_a_fit_within_a_fit_has_a_folder_of_its_own_and_one_that_leaves_nothing_has_none(tmp_path: Path) -> None:
    fit(tmp_path, Regression(), points(), fast_dev_run=True)
    fit(tmp_path, Regression(), points(), enable_checkpointing=False)
    outer = fit(tmp_path, Regression(), points(), steps=8, callbacks=[Probing()])
    assert best_path(outer).parents[1] == tmp_path
    assert best_path(outer).exists()
    assert [*tmp_path.glob("checkpoints-before-*")] == []
    assert (tmp_path / "run-2/checkpoints/step-000000002.ckpt").exists()


def test_checkpoints_of_another_process_are_put_aside_and_no_other_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own := tmp_path / "checkpoints" / "pretrained.ckpt").parent.mkdir()
    own.write_text("mine")
    for steps in (8, 4, 4, 4):  # within a second
        monkeypatch.setattr(run_folders, "_RUNS", {})
        assert best_path(fit(tmp_path, Regression(), points(), steps=steps)).parents[1] == tmp_path
    assert "had checkpoints of another run" in caplog.text
    assert len([*tmp_path.glob("checkpoints-before-*/step-000000008.ckpt")]) == 1
    assert len([*tmp_path.glob("checkpoints-before-*/step-000000004.json")]) == 2
    assert own.read_text() == "mine"


def best_path(trainer: Trainer) -> Path:
    callback = trainer.checkpoint_callback
    assert isinstance(callback, Checkpoints)
    return Path(callback.best_model_path)


class Careless(Regression):
    """Counts in a number, and draws from a generator of its own; what it saves is another matter."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.saved, self.seen = 0, 0, [torch.zeros(())]
        self.generator = torch.Generator()
        self.graph, self.scale = torch.eye(2).to_sparse(), torch.ones(2).to(torch.float8_e4m3fn)  # NumPy has neither

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.steps += 1
        self.saved -= 1
        self.seen.append(batch["point"].mean())
        torch.rand((), generator=self.generator)
        self.graph = self.graph * 2
        return self.loss(batch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["saved"] = self.saved


class Steady(Callback):
    """Changes nothing."""

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def state_key(self) -> str:
        return f"Steady {self.number}"


class Aware(Counting):
    """Saves one of its two counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.calls += 1


def test_what_changes_and_lies_in_no_state_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Careless(), points(48), steps=8, callbacks=[Aware(), Steady(1), Steady(2)])
    (line,) = [record.getMessage() for record in caplog.records if "changed in the first steps" in record.getMessage()]
    assert line.partition(": ")[0] == "Aware.calls, Careless.generator, Careless.graph, Careless.seen, Careless.steps"


class Poisoned(Regression):
    """The loss of its second step is no number."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.trainer.global_step == 1:
            loss = loss * float("nan")
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("count", float(len(batch["name"])), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_that_is_left_out_does_not_count_in_the_mean_of_its_epoch(tmp_path: Path, exact: bool) -> None:
    settings = {"exact": True, "global_batch_size": 4} if exact else {}
    trainer = fit(tmp_path, Poisoned(), points(), steps=6, nonfinite="skip", **settings)
    assert trainer.callback_metrics["loss"].isfinite()
    assert trainer.callback_metrics["count"] == 20


def every(steps: int) -> Checkpoints:
    return Checkpoints(every_n_steps=steps, keep_last=99)


def test_a_checkpoint_within_an_epoch_has_the_place_of_a_loader_before_its_next_batch(tmp_path: Path) -> None:
    fit(tmp_path, Regression(), Stream(), steps=4, callbacks=[every(2)])
    (tmp_path / "checkpoints/step-000000004.ckpt").unlink()
    fit(tmp_path, Regression(), second := Stream(), steps=6, resume=True, callbacks=[every(2)])
    assert second.given == [3, 4, 5, 6]


class Mixed(Dataset[Any]):
    """Draws from a generator of its own, which its data module saves."""

    def __init__(self) -> None:
        self.points, self.generator, self.drawn = Points(24), np.random.default_rng(1), list[float]()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.drawn.append(self.generator.random())
        return self.points[index]


class MixedData(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = Mixed()

    def train_dataloader(self) -> Any:
        return DataLoader(self.mixed, batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.mixed.generator.bit_generator.state, "drawn": self.mixed.drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mixed.generator.bit_generator.state = state_dict["generator"]
        self.mixed.drawn = state_dict["drawn"]


def test_a_generator_that_the_data_saves_goes_on_and_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Regression(), whole := MixedData(), steps=5, callbacks=[every(2)])
    (tmp_path / "checkpoints/step-000000005.ckpt").unlink()
    fit(tmp_path, Regression(), resumed := MixedData(), steps=5, resume=True, callbacks=[every(2)])
    assert resumed.mixed.drawn == whole.mixed.drawn
    assert len(whole.mixed.drawn) == 20
    assert "checkpoint holds" not in caplog.text
    assert "does not hold" not in caplog.text


class Buffer:
    """Any object of the user."""

    def __init__(self) -> None:
        self.kept = deque[float](maxlen=500)


class Lookahead(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.taken = getattr(self, "taken", 0) + 1
        return super().step(closure)


CALLS = [0]


class Hiding(Regression):
    """Keeps what it has seen where nobody looks."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.replay, self.slotted = Buffer(), Slotted()
        self.sobol = torch.quasirandom.SobolEngine(1)
        self.inner = itertools.cycle(range(3))
        self.temperature = 1.0
        self.dropout, self.measure = nn.Dropout(0.1), nn.functional.mse_loss
        self.weights = [*self.parameters()]
        count = itertools.count()

        def look(*_: Any) -> None:
            next(count)

        next(self.children()).register_forward_hook(look)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        CALLS[0] += 1
        Hiding.calls += 1
        self.slotted.calls += 1
        self.sobol.draw(1)
        next(self.inner)
        self.replay.kept.extend(range(100))
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.temperature *= 0.9
        self.dropout.p, self.measure = 0.2, nn.functional.l1_loss

    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters(), lr=0.1)


def test_what_changes_is_seen_wherever_it_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Hiding(), points(), steps=8)
    (line,) = [record.getMessage() for record in caplog.records if "changed in the first steps" in record.getMessage()]
    named = {name.rpartition(".")[2] for name in line.partition(": ")[0].split(", ")}
    assert named == {"replay", "slotted", "sobol", "inner", "calls", "look (a hook)", "taken", "CALLS"}

    caplog.clear()
    Hiding.calls, CALLS[0] = 0, 0
    fit(tmp_path, Hiding(), points(), steps=10, resume=True)
    (line,) = [record.getMessage() for record in caplog.records if "not what it was when" in record.getMessage()]
    assert all(f"Hiding.{name}" in line for name in ("temperature", "dropout.settings", "measure"))
    assert "Hiding.weights" not in line


class CountingLayer(nn.Module):
    """A user's layer, of which torch makes another class: where it is sharded, or one of its weights is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6).double())
        self.generator = torch.Generator().manual_seed(1)
        self.calls = 0

    def forward(self, points: Tensor) -> Tensor:
        self.calls += 1
        return points @ self.weight + torch.randn(1, generator=self.generator).double()


KEPT_BY_LAYER = "WithCountingLayer.network.0.calls, WithCountingLayer.network.0.generator"


class WithCountingLayer(Regression):
    def __init__(self, computed: bool = False) -> None:
        super().__init__()
        layer = CountingLayer()
        if computed:
            nn.utils.parametrizations.orthogonal(layer)
        self.network.insert(0, layer)


def test_what_a_layer_keeps_whose_weight_is_computed_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, WithCountingLayer(computed=True), points(), steps=8)
    (line,) = [record.getMessage() for record in caplog.records if "changed in the first steps" in record.getMessage()]
    assert line.startswith(f"{KEPT_BY_LAYER}: ")


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_a_sharded_run_keeps_is_named(tmp_path: Path, ranks: int) -> None:
    words = ("fit", "--data=tests.own.PointsData", "--model=tests.survive.test_states.WithCountingLayer", "--run=it")
    words += ("--trainer.accelerator=cpu", "--trainer.global_batch_size=24", "--trainer.strategy=sharded")
    run = forked(tmp_path, *words, "--trainer.max_steps=4", ranks=ranks)
    assert run.code == 0, run.output
    assert f"{KEPT_BY_LAYER}: changes with each micro-batch of a rank" in run.output
    assert f"{KEPT_BY_LAYER}: changed in the first steps, and not in what a checkpoint holds" in run.output
    run = forked(tmp_path, *words, "--trainer.max_steps=6", "--change=trainer.max_steps", ranks=ranks)
    assert run.code == 0, run.output
    assert f"{KEPT_BY_LAYER}: not what it was when the checkpoint was saved" in run.output


DRAWN = "import random, numpy, torch\nfrom tests.own import Regression as Drawing\n"
DRAWN += "print('drawn:', random.random(), numpy.random.rand(), torch.rand(1).item(), flush=True)\n"


def test_what_is_drawn_when_a_file_is_imported_follows_from_the_seed(tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(DRAWN)
    words = ("fit", "--data=tests.own.PointsData", "--model=drawing.Drawing", "--trainer.accelerator=cpu")
    words += ("--trainer.max_steps=1", "--trainer.global_batch_size=6")
    drawn = []
    for seed, ranks in ((1, 1), (1, 3), (2, 1)):
        run = forked(tmp_path, *words, f"--seed_everything={seed}", ranks=ranks, PYTHONPATH=str(tmp_path))
        assert run.code == 0, run.output
        drawn.append({*re.findall("drawn: (.*)", run.output)})
    assert drawn[0] == drawn[1] != drawn[2]
    assert [len(numbers) for numbers in drawn] == [1, 1, 1]


class Filed(Regression):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        keeping.move()
        return self.loss(batch)


def test_what_changes_in_a_file_that_the_modules_file_imports_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Filed(), points(), steps=4)
    (line,) = [record.getMessage() for record in caplog.records if "changed in the first steps" in record.getMessage()]
    kept = {"KEPT", "NUMBER", "NUMBERS", "Shared.calls", "attribute", "default", "keyword"}
    assert {*line.partition(": ")[0].split(", ")} == {f"tests.survive.keeping.{name}" for name in kept}


class Starting(Callback):
    """Saves its counts, and begins one of them anew whenever a training starts; and counts on what is not its own."""

    def __init__(self) -> None:
        self.steps, self.lasting = 0, 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.steps = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.steps += 1
        self.lasting += 1
        for thing in (trainer, trainer.optimizers[0], next(pl_module.parameters())):
            thing.seen = getattr(thing, "seen", 0) + self.lasting / 7

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "lasting": self.lasting}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.update(state_dict)


def test_what_a_start_overwrites_and_what_is_hung_on_others_objects_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def named(text: str) -> set[str]:
        (line,) = [record.getMessage() for record in caplog.records if text in record.getMessage()]
        return {*line.partition(": ")[0].split(", ")}

    fit(tmp_path, Regression(), points(), steps=8, callbacks=[Starting()])
    hung = {"Trainer.seen", "AdamW.seen", f"Regression.{next(name for name, _ in Regression().named_parameters())}.seen"}
    assert named("changed in the first steps") == hung
    caplog.clear()
    fit(tmp_path, Regression(), points(), steps=10, resume=True, callbacks=[Starting()])
    assert named("not what it was when") == {"Starting.steps", *hung}


class Overwriting(Regression):
    """Saves what it counts, by hand, and begins one count anew whenever a training starts."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.lasting = self.never_saved = 0

    def on_train_start(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1
        self.lasting += 2
        self.never_saved += 2  # an equal number is saved

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counts"] = self.steps, self.lasting

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.steps, self.lasting = checkpoint["counts"]


def test_what_a_module_saves_and_does_not_have_again_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Overwriting(), points(), steps=8)
    assert "Overwriting" not in caplog.text
    fit(tmp_path, Overwriting(), points(), steps=10, resume=True)
    (line,) = [record.getMessage() for record in caplog.records if "not what it was when" in record.getMessage()]
    assert {*line.partition(": ")[0].split(", ")} == {"Overwriting.steps", "Overwriting.never_saved"}


class OwnSchedule(LRScheduler):
    def __init__(self, optimizer: Optimizer) -> None:
        self.rates: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        self.rates.append(0.1 / (1 + self.last_epoch))
        return [self.rates[-1]]


class OwnOptimizer(torch.optim.SGD):
    """Counts its steps, and saves the count."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.calls = 0
        super().__init__(*args, **settings)

    def step(self, *args: Any, **settings: Any) -> Any:
        self.calls += 1
        return super().step(*args, **settings)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "calls"})
        self.calls = state_dict["calls"]


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = OwnOptimizer(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": OwnSchedule(optimizer), "interval": "step"}}


class Sharing(torch.optim.SGD):
    """Wraps an optimiser that shares its state."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.inner = torch.optim.SGD(self.param_groups, **settings)
        self.load_state_dict(self.state_dict())

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups, self.inner.state = self.param_groups, self.state


class Layered(Regression):
    """Has the parts of a schedule as attributes, and somebody looks at the data's hparams."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def configure_optimizers(self) -> Any:
        optimizer = Sharing(self.parameters(), lr=0.1, momentum=0.9)
        self.warm, self.cosine = LinearLR(optimizer, total_iters=3), CosineAnnealingLR(optimizer, 30)
        schedule = SequentialLR(optimizer, [self.warm, self.cosine], milestones=[3])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *args: Any) -> None:
        self.counts.append(len(self.counts))
        assert not self.trainer.datamodule.hparams  # type: ignore[attr-defined]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counts"] = self.counts

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counts = checkpoint["counts"]


def test_what_an_own_optimiser_and_an_own_schedule_save_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for steps in (8, 10):
        fit(tmp_path, Scheduled(), points(), steps=steps, resume=steps > 8)
        fit(tmp_path / "layered", Layered(), PointsData(), steps=steps, resume=steps > 8, limit_val_batches=0)
    assert "Own" not in caplog.text
    assert "changed in the first steps" not in caplog.text
    assert "not what it was when" not in caplog.text


class ByHand(Scheduled):
    """Steps a schedule and an optimiser that Lightning does not know, and has the ones that it knows as attributes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))

    def configure_optimizers(self) -> Any:
        self.known = super().configure_optimizers()
        self.rates = CosineAnnealingLR(self.known["optimizer"], 30)
        self.optimizer_of_alpha = torch.optim.Adam([self.alpha])
        return self.known

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.alpha.grad = torch.ones(1)
        self.optimizer_of_alpha.step()
        self.rates.step()


def test_a_schedule_and_an_optimiser_that_lightning_does_not_know_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for text, steps in ("changed in the first steps", 8), ("not what it was when", 10):
        caplog.clear()
        fit(tmp_path, ByHand(), points(), steps=steps, resume=steps > 8)
        (line,) = [record.getMessage() for record in caplog.records if text in record.getMessage()]
        assert {*line.partition(": ")[0].split(", ")} == {"ByHand.rates", "ByHand.optimizer_of_alpha"}
        assert "HINT: ByHand.optimizer_of_alpha, ByHand.rates: return it in configure_optimizers" in line


class Wrapper(torch.optim.Optimizer):
    """As many write one around another: without its __init__."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.defaults, self.state = optimizer, optimizer.defaults, optimizer.state
        self.param_groups = optimizer.param_groups


class Keeping(Callback):
    """Saves an optimiser, a schedule, a metric and a network with a metric in it as their own methods give them."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        weight = nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.Adam([weight])
        self.rates, self.wrapper = CosineAnnealingLR(self.optimizer, 30), Wrapper(self.optimizer)
        self.counted = MeanMetric()
        self.counted.persistent(True)
        self.known, self.weight = pl_module.optimizers(), weight

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.weight.grad = torch.ones(1)
        self.optimizer.step()
        self.rates.step()
        self.counted.update(self.weight.detach())

    def state_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, name).state_dict() for name in ("optimizer", "rates", "counted")}
        return {**kept, "weight": self.weight.detach().clone()}


def test_what_is_saved_by_its_own_method_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Regression(), points(), steps=6, callbacks=[Keeping()])
    named = [record.getMessage() for record in caplog.records if "changed in the first steps" in record.getMessage()]
    assert not [line for line in named if re.search(r"Keeping\.(optimizer|rates|counted|known|weight)", line)]


def test_where_a_step_is_an_epoch_its_micro_batches_are_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Regression(), points(8), callbacks=[Average()], global_batch_size=8, steps=1)
    assert "Average.counted, Average.listed, Average.mean" in caplog.text


class Lazy(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1)).double()


def test_a_lazy_layer_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Lazy(), points(), global_batch_size=8)
    assert "Lazy" not in caplog.text
    with pytest.raises(UserError, match=r"network.0.weight has no shape"):
        fit(tmp_path / "exact", Lazy(), points(), global_batch_size=8, exact=True)


@pytest.mark.parametrize("setting", ["exact=true", "exact=false", "strategy=sharded"])
def test_a_lazy_layer_on_several_ranks_is_refused(quick: Cli, setting: str) -> None:
    words = ("fit", "--data=tests.own.PointsData", "--model=tests.survive.test_states.Lazy", "--trainer.accelerator=cpu")
    run = quick(*words, f"--trainer.{setting}", "--trainer.global_batch_size=6", "--trainer.max_steps=2", ranks=3)
    assert run.code == 2, run.output
    assert "network.0.weight has no shape before the first batch" in run.output
    assert "Traceback" not in run.output


class OwnAverage(WeightAveraging):
    """As Lightning's page shows it."""

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


def test_what_a_librarys_callback_saves_of_a_subclass_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for resume in (False, True):
        fit(tmp_path, Regression(), points(), steps=10 if resume else 8, resume=resume, callbacks=[OwnAverage()])
    assert "OwnAverage" not in caplog.text


class Reads(Callback):
    """Reads what was logged, when training starts."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.logged = {**trainer.logged_metrics}


def test_what_was_logged_last_can_be_read_in_a_resumed_run(tmp_path: Path) -> None:
    loggers = {"logger": CSVLogger(tmp_path / "logs"), "log_every_n_steps": 1}
    trainer = fit(tmp_path, Regression(), points(), steps=6, **loggers)  # an epoch
    before, reads = {name: float(value) for name, value in trainer.logged_metrics.items()}, Reads()
    fit(tmp_path, Regression(), points(), steps=10, resume=True, callbacks=[reads], **loggers)
    assert {name: float(value) for name, value in reads.logged.items()} == before
    assert before


class Shifting(Dataset[Any]):
    """Draws from a generator that each loader process has a copy of; a worker_init_fn reaches the dataset itself."""

    def __init__(self) -> None:
        self.points, self.generator = Points(24), np.random.default_rng(1)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.generator.random()
        return self.points[index]


def _begin(number: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    assert isinstance(info.dataset, Shifting)


def test_what_a_dataset_changes_in_a_loader_process_is_named(tmp_path: Path) -> None:
    logging.getLogger("project").addHandler(handler := logging.FileHandler(tmp_path / "log"))
    try:
        fit(tmp_path, Regression(), DataLoader(Shifting(), batch_size=4, num_workers=1, worker_init_fn=_begin))
    finally:
        logging.getLogger("project").removeHandler(handler)
    assert (tmp_path / "log").read_text().count("Shifting.generator: changed in a loader process") == 1


class Average(Callback):
    """Averages of the weights, which it saves: one by micro-batches, one by steps. Metrics, which no checkpoint has."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None
        self.by_step: Tensor | None = None
        self.steps = 0
        self.counted, self.listed = MeanMetric(), [MeanMetric()]

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.by_step = next(pl_module.parameters()).detach().clone()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        weight = next(pl_module.parameters()).detach()
        self.mean = weight.clone() if self.mean is None else 0.9 * self.mean + 0.1 * weight
        self.counted.update(weight)
        self.listed[0].update(weight)

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "steps": self.steps, "by_step": self.by_step}


class Moving(Regression):
    """Has a buffer that forward moves, one that it moves once a step, and batch norm's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6).double()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("steps", torch.zeros(2))
        self.register_buffer("nothing", torch.full((2,), float("nan")))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.seen += 1
        return self.loss({**batch, "point": self.norm(batch["point"])})

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps += 1


@pytest.mark.parametrize("samples", [4, 8])
def test_a_buffer_that_a_micro_batch_moves_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, samples: int) -> None:
    fit(tmp_path, Moving(), points(), global_batch_size=samples)
    (line,) = [record.getMessage() for record in caplog.records if "the network moves it" in record.getMessage()]
    assert line.partition(": ")[0] == "seen"
    with pytest.raises(UserError, match="each micro-batch moves the buffer seen"):
        fit(tmp_path / "exact", Moving(), points(), exact=True, global_batch_size=samples)


class Teaching(Regression):
    """Has a mean of its weights, which the optimiser knows and does not move, or does not know."""

    def __init__(self, hook: str, optimised: bool = True) -> None:
        super().__init__()
        self.optimised = optimised
        self.learns: Any = self.network[-1]
        self.mean: Any = nn.Linear(16, 1).double()
        self.mean.load_state_dict(self.learns.state_dict())
        self.register_buffer("moves", torch.zeros(()))
        setattr(self, hook, self.follow)

    def follow(self, *_: Any) -> None:
        self.moves += 1
        self.mean.weight.data.lerp_(self.learns.weight.data, 0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters() if self.optimised else self.network.parameters(), lr=0.05)


class Encoding(Teaching):
    """Moves it in training_step, or makes it anew."""

    def __init__(self, anew: bool) -> None:
        super().__init__("unused", optimised=not anew)
        self.anew = anew

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if self.anew:
            self.mean.weight = nn.Parameter(0.9 * self.mean.weight.detach() + 0.1 * self.learns.weight.detach())
        else:
            self.follow()
        return super().training_step(batch, batch_idx)


class StepsOnce(Callback):
    """Moves a mean where all gradients of a step are there."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.follow()


def named_as_moved(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns what is named as moved by each micro-batch, line by line."""
    lines = [record.getMessage() for record in caplog.records if "the network moves it" in record.getMessage()]
    caplog.clear()
    return [line.partition(": ")[0] for line in lines]


def test_a_parameter_that_a_micro_batch_moves_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    bare: dict[str, Any] = {"enable_checkpointing": False, "global_batch_size": 8}
    for name, module in {
        "forward": Encoding(False),
        "end": Teaching("on_train_batch_end"),
        "unknown": Teaching("on_train_batch_start", optimised=False),
    }.items():
        fit(tmp_path / name, module, points(), **bare)
        assert named_as_moved(caplog) == ["moves", "mean.weight"], name
    fit(tmp_path / "anew", Encoding(True), points(), **bare)
    assert named_as_moved(caplog) == ["mean.weight"]
    fit(tmp_path / "one", Encoding(False), points(), **{**bare, "global_batch_size": 4})  # on one rank alone
    assert named_as_moved(caplog) == ["moves"]


@pytest.mark.parametrize("hook", ["on_before_zero_grad", "on_before_optimizer_step", "on_train_epoch_start", "unused"])
@pytest.mark.parametrize("samples", [4, 8])
def test_what_moves_once_a_step_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hook: str, samples: int
) -> None:
    monkeypatch.chdir(tmp_path)
    callbacks: list[Callback] = [StepsOnce()] if hook == "unused" else []
    fit(tmp_path, Teaching(hook), points(), callbacks=callbacks, enable_checkpointing=False, global_batch_size=samples)
    assert named_as_moved(caplog) == []


def test_what_goes_by_the_micro_batches_of_a_rank_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path / "many", Regression(), points(), callbacks=[Average()], global_batch_size=8)
    (line,) = [record.getMessage() for record in caplog.records if "changes with each micro-batch" in record.getMessage()]
    assert {*line.partition(": ")[0].split(", ")} == {"Average.mean", "Average.counted", "Average.listed"}
    (line,) = [record.getMessage() for record in caplog.records if "changed in the first steps" in record.getMessage()]
    assert line.startswith("Average.counted, Average.listed: ")
    assert "HINT: Average.counted: make it an attribute of the LightningModule" in line
    assert "Average.listed: keep it in a buffer" in line
    caplog.clear()
    fit(tmp_path / "one", Regression(), points(), callbacks=[Average()], global_batch_size=4)
    assert "changes with each micro-batch" not in caplog.text


class Twice(torch.optim.SGD):
    """Asks for the loss twice, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Sharp(Regression):
    def configure_optimizers(self) -> Any:
        return Twice(self.parameters(), lr=0.01)


def test_a_loss_that_is_asked_for_twice_is_that_of_one_micro_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path / "many", Sharp(), points(), global_batch_size=8)
    assert caplog.text.count("Twice asks for the loss more than once in a step of 2 micro-batches") == 1
    caplog.clear()
    fit(tmp_path / "one", Sharp(), points(), global_batch_size=4)
    assert "asks for the loss" not in caplog.text


class Noisy(Regression):
    """Looks at its gradient after each micro-batch."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            gradient: Any = parameter.grad
            gradient.add_(0.1)


def test_gradients_that_are_not_there_yet_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="on_after_backward needs gradients, which are there after the last micro-batch"):
        fit(tmp_path, Noisy(), points(), exact=True, global_batch_size=8)


class Sampled(Regression):
    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val_loss", self.loss({**batch, "point": batch["point"] + torch.randn_like(batch["point"])}))

    def val_dataloader(self) -> Any:
        return points()


class Augmented(Sampled):
    """Draws on the way of a batch to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = set[float]()

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> Any:
        noise = torch.rand(())
        if self.trainer.validating or self.trainer.sanity_checking:
            self.drawn.add(float(noise))
        return batch

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("module", [Sampled, Augmented])
def test_an_evaluation_that_draws_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, module: type[Regression], exact: bool
) -> None:
    fit(tmp_path, drawing := module(), points(), steps=12, exact=exact, global_batch_size=4)
    if isinstance(drawing, Augmented):  # each of its micro-batches has numbers of its own, the same in each validation
        assert len(drawing.drawn) == (24 if exact else 6)
    assert caplog.text.count("An evaluation draws random numbers (torch)") == int(not exact)


class Averaging(Regression):
    """Logs the mean of what it validates on."""

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.log("val_mean", batch["point"].mean(), batch_size=len(batch["point"]))


def noisy_batch(samples: list[Any]) -> Any:
    return {**(batch := default_collate(samples)), "point": batch["point"] + torch.randn(6)}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("exact", [False, True])
def test_a_batch_of_an_evaluation_that_is_made_at_random_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], workers: int, exact: bool
) -> None:
    logging.getLogger().addHandler(shown := logging.StreamHandler())  # a loader process's log is seen where it is written
    try:
        for collate_fn in (noisy_batch, None):
            validated = DataLoader(Points(8), batch_size=4, num_workers=workers, collate_fn=collate_fn)
            trainer = Trainer(
                default_root_dir=tmp_path, max_steps=12, exact=exact, global_batch_size=4, logger=False, accelerator="cpu"
            )
            trainer.fit(Averaging(), points(), validated)
            drawn = "An evaluation draws random numbers (torch in collate_fn or __getitems__)"
            assert capfd.readouterr().err.count(drawn) == int(collate_fn is not None and not exact)
    finally:
        logging.getLogger().removeHandler(shown)


def test_a_part_of_a_dataset_is_validated_on_the_same_samples_in_any_micro_batches(tmp_path: Path) -> None:
    means = []
    for validated in (Subset(Points(24), range(24)), Points(24)):
        for size in (4, 6):  # as on another number of ranks
            trainer = Trainer(
                default_root_dir=tmp_path, max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu"
            )
            trainer.fit(Averaging(), points(), DataLoader(validated, batch_size=size))
            means.append(trainer.callback_metrics["val_mean"])
    torch.testing.assert_close(torch.stack(means), means[0].repeat(4))


class Predicting(Regression):
    """Draws on the way of a batch to the device, and in the prediction."""

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> Any:
        return {**batch, "drawn": torch.rand(len(batch["point"]))}

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return torch.stack([batch["drawn"], torch.rand(len(batch["drawn"]))])


@pytest.mark.parametrize("exact", [False, True])
def test_what_a_prediction_draws_follows_from_its_micro_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, exact: bool
) -> None:
    drawn = []
    for seed in (1, 2):
        trainer = Trainer(exact=exact, default_root_dir=tmp_path, logger=False, enable_checkpointing=False, accelerator="cpu")
        torch.manual_seed(seed)
        drawn.append(torch.cat(trainer.predict(Predicting(), points()), dim=1))  # type: ignore[arg-type]
    assert torch.equal(*drawn)
    assert drawn[0].unique().numel() == drawn[0].numel()
    assert ("An evaluation draws random numbers (torch)" in caplog.text) != exact


class Exchanging(Regression):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def test_an_optimizer_that_is_exchanged_in_mid_run_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, Exchanging(), points(), steps=8, callbacks=[every(1)])
    assert caplog.text.count("The optimiser is SGD now, and configure_optimizers made Adam") == 1
    with pytest.raises(UserError, match="states of optimisers do not fit Adam"):
        fit(tmp_path, Exchanging(), points(), steps=9, resume=True)


class Announcing(Regression):
    """Uses its logger at the start of each epoch, as Lightning's pages do."""

    folders: tuple[str | None, ...] = ()

    def on_train_epoch_start(self) -> None:
        assert isinstance(self.logger, CSVLogger)
        self.logger.log_metrics({"begins": self.current_epoch}, self.global_step)
        self.logger.experiment.log_metrics({"begins_too": self.current_epoch})
        self.folders = (*self.folders, self.trainer.log_dir, self.logger.log_dir)


def test_the_start_of_an_epoch_that_is_repeated_finds_its_logger_and_logs_nothing_again(tmp_path: Path) -> None:
    begun = []
    for version, steps in enumerate((8, 14)):
        logger = CSVLogger(tmp_path, "curves", version)
        fit(tmp_path, module := Announcing(), points(), steps, resume=version > 0, logger=logger)
        assert {*module.folders} == {logger.log_dir}
        rows = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
        begun += [[row["begins"] for row in rows if row["begins"]]]
    assert begun == [["0", "1"], ["2"]]


class Meaned(Regression):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss


def test_a_finished_run_that_is_started_again_keeps_its_curves(tmp_path: Path) -> None:
    """It ends within an epoch, whose means are logged when the last checkpoint has been saved."""
    curves = []
    for _ in range(2):
        fit(tmp_path, Meaned(), points(), steps=8, resume=True, logger=None, log_every_n_steps=1)
        events = EventAccumulator(str(tmp_path)).Reload()
        curves.append([(event.step, event.value) for event in events.Scalars(board_tag("mean"))])
    assert [step for step, _ in curves[0]] == [6, 8]
    assert curves[0] == curves[1]


class KilledAtTheEnd(Callback):
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not (mark := Path("struck")).exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_has_come_to_its_end_when_its_last_checkpoint_is_written(tmp_path: Path) -> None:
    words = ("fit", "--model=tests.own.Regression", "--data=tests.own.PointsData", "--trainer.accelerator=cpu", "--run=it")
    words += (
        "--trainer.max_epochs=1",
        "--trainer.limit_val_batches=0",
        "--trainer.callbacks+=tests.survive.test_states.KilledAtTheEnd",
    )
    assert forked(tmp_path, *words).code == -signal.SIGKILL
    again = forked(tmp_path, *words)
    assert again.code == 0, again.output


class Growing(Dataset[Any]):
    """Gives points whose size follows from the epoch that it is told."""

    epoch = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return {**Points(24)[index], "epoch": self.epoch}


class Telling(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.dataset, self.seen = Growing(), list[tuple[int, int]]()

    def on_train_epoch_start(self) -> None:
        self.dataset.epoch = self.current_epoch + 1

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.seen += [(self.current_epoch + 1, int(epoch)) for epoch in batch["epoch"]]
        return self.loss(batch)


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_processes_have_what_the_start_of_an_epoch_has_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, persistent: bool
) -> None:
    def loader(module: Telling) -> DataLoader[Any]:
        return DataLoader(module.dataset, batch_size=4, num_workers=1, persistent_workers=persistent)

    fit(tmp_path, first := Telling(), loader(first), steps=8)
    fit(tmp_path, second := Telling(), loader(second), steps=10, resume=True)
    assert all(now == epoch for now, epoch in second.seen)
    assert all(now == epoch for now, epoch in first.seen) is not persistent
    assert ("Growing.epoch: changed, and the loader's processes keep" in caplog.text) is persistent


class Named(Regression):
    """Logs names whose order is not that of the alphabet."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log_dict({"zeta": loss, "alpha": loss * 2}, prog_bar=True, on_epoch=True)
        self.count(batch)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log_dict({"val_z": self.loss(batch), "val_a": 1.0})


@pytest.mark.parametrize("exact", [False, True])
def test_a_resumed_run_shows_its_metrics_in_the_same_order(
    tmp_path: Path, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for steps in (8, 16):
        trainer = Trainer(
            default_root_dir=tmp_path, max_steps=steps, accelerator="cpu", logger=False, exact=exact, global_batch_size=4
        )
        trainer.fit(Named(), points(), DataLoader(Points(4)), ckpt_path="last" if steps > 8 else None)
        progress = trainer.progress_bar_callback
        assert isinstance(progress, Progress)
        fields = [field.text for field in progress._fields(trainer)]
        assert [text.split()[0] for text in fields[:2]] == ["zeta_step", "alpha_step"]
    lines = [text for record in caplog.records if "val_a" in (text := record.getMessage())]
    assert len(lines) == 2
    assert all(re.search(r"val_z [\d.]+  val_a [\d.]+", line) for line in lines)
    names = [name for name in trainer.callback_metrics if name in ("zeta", "alpha", "val_z", "val_a")]
    assert names == ["zeta", "alpha", "val_z", "val_a"]


class Saving(Callback):
    """Keeps the checkpoint that could be written where a fit begins."""

    saved: dict[str, Any] | None = None

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.saved = self.saved or trainer._checkpoint_connector.dump_checkpoint()


@pytest.mark.parametrize("exact", [False, True])
def test_a_checkpoint_right_after_a_resume_has_the_metrics_of_the_one_before(
    tmp_path: Path, exact: bool, recwarn: pytest.WarningsRecorder
) -> None:
    settings: Any = {"exact": exact, "global_batch_size": 4, "accelerator": "cpu"}
    path = fit(tmp_path, Named(), points(), **settings).checkpoint_callback.last_model_path  # type: ignore[union-attr]
    saving = Saving()
    fit(tmp_path, Named(), points(), steps=9, resume=True, callbacks=[saving], **settings)
    assert saving.saved is not None
    assert same(saving.saved["callback_metrics"], torch.load(path, weights_only=False)["callback_metrics"])
    assert not [str(warning.message) for warning in recwarn if "before the ``update``" in str(warning.message)]


class Kind(Tensor):
    """A library's own tensors, as MONAI's MetaTensor: what is computed from them is of their kind."""


class OfKind(Regression):
    """Logs and counts such tensors, within an epoch and at a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.all = MeanMetric(nan_strategy="disable"), CatMetric(nan_strategy="disable")

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        kind = batch["sum"].as_subclass(Kind)
        loss = self.loss({**batch, "sum": kind})
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.total.update(kind)
        self.all.update(kind)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch).as_subclass(Kind), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.trainer.callback_metrics["val_own"] = torch.ones(()).as_subclass(Kind)


@pytest.mark.parametrize("exact", [False, True])
def test_a_librarys_own_tensors_that_are_logged_and_counted_are_in_no_checkpoint(tmp_path: Path, exact: bool) -> None:
    settings: Any = {"exact": exact, "global_batch_size": 4, "accelerator": "cpu", "logger": False, "max_epochs": -1}
    for steps in (2, 9):  # within an epoch, and in the next one, after a validation
        stopping = EarlyStopping("val_loss", patience=9, check_on_train_epoch_end=False)
        trainer = Trainer(default_root_dir=tmp_path, max_steps=steps, callbacks=[stopping], **settings)
        trainer.fit(OfKind(), points(), DataLoader(Points(4)), ckpt_path="last")
        path = trainer.checkpoint_callback.last_model_path  # type: ignore[union-attr]
        assert path.endswith(f"step-{steps:09d}.ckpt")
        names = torch.load(path, weights_only=True)["callback_metrics"].keys()
        assert ("val_own" in names) == (steps > 6)


class Kinds(str, Enum):
    SMALL = "small"


class KeepsArguments(Regression):
    """A library's module, which keeps a class among its arguments, as darts' modules do, and one of its own objects."""

    def __init__(self, parts: Any, kind: Any = torch.optim.Adam, width: int = 3, size: Kinds = Kinds.SMALL) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_arguments_that_no_checkpoint_can_hold_have_texts_in_their_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in (4, 8):
        module = KeepsArguments(deque())
        fit(tmp_path, module, points(), steps=steps, resume=steps > 4)
    kept = torch.load(module.trainer.checkpoint_callback.last_model_path, weights_only=True)["hyper_parameters"]  # type: ignore[union-attr]
    assert kept == {
        "parts": "(not saved: collections.deque)",
        "kind": "(not saved: torch.optim.adam.Adam)",
        "width": 3,
        "size": "small",
    }
    assert module.hparams["kind"] is torch.optim.Adam
    assert module.hparams["size"] is Kinds.SMALL
    assert caplog.text.count("(not saved: ...) in place of what save_hyperparameters keeps as kind, parts. HINT:") == 2


class LateState(Callback):
    """Has a state that no checkpoint can hold, after a step."""

    state: object = None

    def on_train_batch_end(self, *args: Any) -> None:
        self.state = deque([1])

    def state_dict(self) -> dict[str, object]:
        return {"state": self.state}


def test_a_state_that_can_not_be_read_again_after_a_step_ends_the_run_in_its_first_steps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the state of the callback LateState.*Unsupported global: GLOBAL collections\.deque"):
        fit(tmp_path, module := Regression(), points(), steps=8, callbacks=[LateState()])
    assert module.trainer.global_step == 3


class Watching(Callback):
    """Notes what callbacks see after each micro-batch, and the step that has ended then."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append((trainer.global_step, float(trainer.callback_metrics["shared"])))


class Shared(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("shared", loss, sync_dist=True)
        return loss


@pytest.mark.parametrize("exact", [False, True])
def test_callbacks_see_the_last_whole_step_within_a_step(tmp_path: Path, exact: bool) -> None:
    """Also in the first step of an epoch, and after a restart. A ModelCheckpoint would keep the best part of a step."""
    settings: Any = {"global_batch_size": 12, "exact": exact}
    torch.manual_seed(1)
    fit(tmp_path / "whole", Shared(), points(), steps=5, callbacks=[whole := Watching()], **settings)
    values = [{value for step, value in whole.seen if step == number} for number in range(6)]
    assert len(values[0]) == 2
    assert all(len(each) == 1 for each in values[1:])
    assert len(set.union(*values[1:])) == 5
    torch.manual_seed(1)
    fit(tmp_path / "part", Shared(), points(), steps=3, callbacks=[Watching()], **settings)
    fit(tmp_path / "part", Shared(), points(), steps=5, resume=True, callbacks=[resumed := Watching()], **settings)
    assert resumed.seen == whole.seen[9:]


def test_what_is_of_a_later_step_than_a_run_goes_back_to_is_set_aside(tmp_path: Path) -> None:
    """From Python as from the command line: the next start would resume from what was given up."""
    fit(tmp_path, Regression(), points(), steps=6, callbacks=[every(2)])
    trainer = Trainer(default_root_dir=tmp_path, max_steps=3, max_epochs=-1, accelerator="cpu", logger=False)
    trainer.fit(Regression(), points(), ckpt_path=str(tmp_path / "checkpoints/step-000000002.ckpt"))
    assert {path.name for path in tmp_path.glob("checkpoints/*.later")} >= {
        f"step-00000000{step}.ckpt.later" for step in (4, 6)
    }
    assert fit(tmp_path, Regression(), points(), steps=3, resume=True).global_step == 3


class Reduced(Regression):
    """Learns by an ever lower rate, as a plateau's schedule has it."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss_epoch"}}


class OnSlowPath(Reduced):
    """With a hook for which Lightning's own loop takes the steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("kind", [Reduced, OnSlowPath])
def test_a_run_of_so_many_steps_that_resumes_leaves_nothing_out(tmp_path: Path, kind: type[Reduced]) -> None:
    """Lightning takes its loops to be restarted for as long as there is a number of steps, and leaves out in the first epoch a
    plateau's reduction, and at its start a micro-batch, which it counts.
    """
    rates, logged = [], []
    fit(tmp_path / "parts", kind(), points(), steps=8, callbacks=[every(2)])
    for step in (None, 6, 8):
        resume = False if step is None else tmp_path / f"parts/checkpoints/step-00000000{step}.ckpt"
        trainer = fit(tmp_path / f"from {step}", kind(), points(), steps=18, resume=resume)
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        logged.append(trainer.fit_loop.epoch_loop._batches_that_stepped)
    assert rates == [pytest.approx(1e-4)] * 3
    assert logged == [18] * 3


class ReducedBySteps(Reduced):
    """Reduces the rate after a step, by what it has logged."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        return made | {"lr_scheduler": made["lr_scheduler"] | {"interval": "step", "monitor": "loss"}}


class OnSlowPathBySteps(OnSlowPath, ReducedBySteps):
    pass


@pytest.mark.parametrize("kind", [ReducedBySteps, OnSlowPathBySteps])
def test_a_checkpoint_within_a_step_has_its_schedules_due(tmp_path: Path, kind: type[Reduced]) -> None:
    """Lightning's ModelCheckpoint saves a step before the schedules that go by a metric have moved."""

    def ends(folder: str, resume: Path | bool = False) -> Any:
        saves = ModelCheckpoint(tmp_path / folder / "kept", save_top_k=-1, every_n_train_steps=1)
        trainer = fit(tmp_path / folder, module := kind(), points(), steps=9, resume=resume, callbacks=[saves])
        groups = trainer.optimizers[0].param_groups
        return groups[0]["lr"], trainer.fit_loop.epoch_loop._batches_that_stepped, module.state_dict()

    whole = ends("whole")
    assert whole[0] < 0.01
    for file in (tmp_path / "whole/kept").glob("*step=[1-8].ckpt"):
        assert same(ends(file.stem, file), whole), file.name


class Together(Regression):
    """Learns from two loaders at once, of which one may have ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.stack([self.loss(part) for part in batch.values() if part is not None]).sum()


@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle", "min_size"])
def test_a_loader_that_had_ended_has_ended_where_the_run_resumes(tmp_path: Path, mode: Any) -> None:
    """And begins again where it had begun again."""

    def weights(folder: str, steps: int, resume: Path | None = None) -> Any:
        torch.manual_seed(1)
        module = Together()
        loader = CombinedLoader({"long": points(24), "short": points(8)}, mode)
        fit(tmp_path / folder, module, loader, steps=steps, resume=resume or False, callbacks=[every(1)])
        return module.state_dict()

    whole = weights("whole", 8)
    for step in (1, 2, 3, 4, 5, 7):
        assert same(weights(f"{step}", 8, tmp_path / f"whole/checkpoints/step-00000000{step}.ckpt"), whole), step


class Measured(Reduced):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.count(batch)
        return super().training_step(batch, batch_idx)


class SeesErrors(Callback):
    def __init__(self) -> None:
        self.errors: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.errors.append(float(trainer.callback_metrics.get("error", 0.0)))


@pytest.mark.parametrize("exact", [False, True])
def test_a_run_that_resumes_at_the_end_of_an_epoch_has_its_metrics(tmp_path: Path, exact: bool) -> None:
    """Those of torchmetrics, too, which no step of the epoch logs any more; and the next epoch does not count them again."""
    settings: Any = {"exact": exact, "global_batch_size": 4}
    saves = ModelCheckpoint(tmp_path / "kept", save_top_k=-1, every_n_train_steps=6)
    fit(tmp_path / "whole", Measured(), points(), steps=18, callbacks=[saves, whole := SeesErrors()], **settings)
    file = tmp_path / "kept/epoch=0-step=6.ckpt"
    fit(tmp_path / "part", Measured(), points(), steps=18, resume=file, callbacks=[part := SeesErrors()], **settings)
    assert 0 not in whole.errors[1:]
    assert part.errors == whole.errors  # the start of the first epoch is called again


class Composed(Reduced):
    """Logs a metric that is made of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MeanMetric(), MeanMetric()
        self.both = self.first + self.second

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.both.update(batch["sum"].float())
        self.log("both", self.both, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_a_composed_metric_counts_an_epoch_once(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path / "kept", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
    whole = fit(tmp_path / "whole", Composed(), points(24), steps=11, callbacks=[saves])
    (file,) = (tmp_path / "kept").glob("epoch=0-*.ckpt")
    resumed = fit(tmp_path / "part", Composed(), points(24), steps=11, resume=file)
    assert same(resumed.callback_metrics["both"], whole.callback_metrics["both"])


class Computed(Reduced):
    """Computes a metric of its training steps by itself, at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.of_training, self.of_validation = MeanMetric(), MeanMetric()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.of_training.update(batch["sum"].float())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.of_validation.update(batch["sum"].float())

    def on_validation_epoch_end(self) -> None:
        self.log("validated", self.of_validation.compute())
        self.of_validation.reset()

    def on_train_epoch_end(self) -> None:
        self.log("trained", self.of_training.compute())
        self.of_training.reset()


@pytest.mark.parametrize("exact", [False, True])
def test_what_training_has_counted_is_in_a_checkpoint_of_a_validation(tmp_path: Path, exact: bool) -> None:
    """Lightning's ModelCheckpoint saves there, and the validation is repeated."""

    def ends(folder: str, resume: Path | None = None) -> list[float]:
        saves = ModelCheckpoint(tmp_path / folder / "kept", save_top_k=-1, monitor="validated", every_n_epochs=1)
        data = {"train_dataloaders": points(), "val_dataloaders": DataLoader(Points(4), batch_size=4)}
        settings: Any = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "val_check_interval": 0.5, "exact": exact}
        trainer = Trainer(default_root_dir=tmp_path / folder, callbacks=[saves], global_batch_size=4, **settings)
        trainer.fit(Computed(), **data, ckpt_path=resume)
        return [float(trainer.callback_metrics[name]) for name in ("trained", "validated")]

    whole = ends("whole")
    for file in (tmp_path / "whole/kept").glob("*.ckpt"):
        assert ends(file.stem, resume=file) == whole


class Lasting(Regression):
    """Keeps metrics for the whole run: the worst of validations and of epochs, means that nobody resets, a tracker."""

    def __init__(self) -> None:
        super().__init__()
        self.of_validations, self.of_epochs, self.trained, self.validated = MaxMetric(), MaxMetric(), MeanMetric(), MeanMetric()
        self.tracker = MetricTracker(MeanSquaredError(), maximize=True)

    def on_train_start(self) -> None:
        self.of_validations.reset()  # of what the sanity check has counted

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.trained.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.of_epochs.update(self.trained.compute())
        self.log_dict({"trained": self.trained.compute(), "of_epochs": self.of_epochs.compute()})

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.tracker.update(self.network(batch["point"]), batch["sum"])
        self.validated.update(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.of_validations.update(self.tracker.compute())
        self.log_dict({"validated": self.validated.compute(), "of_validations": self.of_validations.compute()})
        best, number = self.tracker.best_metric(return_step=True)
        self.log_dict({"best": best, "number": float(number or 0), "tracked": float(len(self.tracker))})


@pytest.mark.parametrize("exact", [False, True])
def test_metrics_that_outlive_an_epoch_go_on(tmp_path: Path, exact: bool) -> None:
    """From a checkpoint within an epoch, of a validation, and of the end of an epoch."""
    names = ("trained", "of_epochs", "validated", "of_validations", "best", "number", "tracked")
    when: dict[str, dict[str, Any]] = {
        "within": {"every_n_train_steps": 1},
        "validation": {"monitor": "validated"},
        "end": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    }

    def ends(folder: str, resume: Path | None = None) -> dict[str, float]:
        saves = [ModelCheckpoint(tmp_path / folder / kind, save_top_k=-1, **how) for kind, how in when.items()]
        settings: Any = {"max_epochs": 3, "accelerator": "cpu", "logger": False, "val_check_interval": 3, "exact": exact}
        trainer = Trainer(default_root_dir=tmp_path / folder, callbacks=saves, global_batch_size=4, **settings)
        trainer.fit(Lasting(), points(), DataLoader(Points(8), batch_size=4), ckpt_path=resume)
        return {name: float(trainer.callback_metrics[name]) for name in names}

    torch.manual_seed(1)
    whole = ends("whole")
    files = [
        f"{kind}/epoch={epoch}-step={step}.ckpt"
        for kind, epoch, step in (
            ("within", 1, 8),
            ("within", 1, 9),
            ("validation", 1, 9),
            ("validation", 0, 6),
            ("end", 0, 6),
            ("within", 0, 6),
        )
    ]
    assert {file: ends(file.replace("/", " "), tmp_path / "whole" / file) for file in files} == dict.fromkeys(files, whole)
