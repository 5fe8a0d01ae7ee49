"""Each of Lightning's callbacks and each of torch's schedules: a run that is killed within an epoch ends as one that is not."""

import json
import re
import signal

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from project import Trainer
from project.errors import UserError
from tests.conftest import forked
from tests.own import Points, PointsData, Regression
from tests.survive.test_resume import curves, same
from tests.train.test_own import newest

RUN = (
    *("fit", "--data=tests.own.PointsData", "--trainer.global_batch_size=12"),
    *("--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1", "--trainer.max_epochs=4", "--run=it"),
    "--checkpoints.every_n_steps=6",
)  # 4 steps in an epoch
LOSS = "val_loss/dataloader_idx_0"
CALLBACKS = {
    "EarlyStopping": {"monitor": LOSS, "min_delta": 0.2, "patience": 1},
    "LearningRateMonitor": {"logging_interval": "step"},
    "ModelCheckpoint": {"monitor": LOSS, "save_top_k": 2},
    "EMAWeightAveraging": {"decay": 0.9},
    "StochasticWeightAveraging": {"swa_lrs": 0.01, "swa_epoch_start": 1, "annealing_epochs": 1},
    "DeviceStatsMonitor": {"cpu_stats": False},
    "OnExceptionCheckpoint": {"dirpath": "exceptions"},
    "RichModelSummary": {},
}


def callbacks(*given):
    return f"--trainer.callbacks={json.dumps([*given])}"


def assert_goes_on(tmp_path, ranks, words, *given, step=6):
    """Killed when the checkpoint of this step is there: in the middle of the second epoch."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    fault = {"rank": ranks - 1, "where": "saved", "step": step, "number": int(signal.SIGKILL)}
    fault = {"class_path": "tests.probes.Fault", "init_args": fault}
    done = forked(whole, *words, callbacks(*given), ranks=ranks)
    assert done.code == 0, done.output
    assert forked(killed, *words, callbacks(*given, fault), ranks=ranks).code != 0
    resumed = forked(killed, *words, callbacks(*given, fault), ranks=ranks)
    assert resumed.code == 0, resumed.output
    assert re.search(r"epoch 2, step [1-4] of it", resumed.output), resumed.output
    actual, expected = newest(killed), newest(whole)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "position"):
        assert same(actual[part], expected[part]), part
    measured = ("speed/", "DeviceStatsMonitor")  # what differs from run to run anyway
    actual, expected = (
        {tag: points for tag, points in curves(folder).items() if not tag.startswith(measured)} for folder in (killed, whole)
    )
    assert actual == expected


RANKS = [pytest.param(1, marks=pytest.mark.faults), pytest.param(2, marks=pytest.mark.faults), 3]  # three ranks show it
TOGETHER = ("LearningRateMonitor", "ModelCheckpoint", "DeviceStatsMonitor", "OnExceptionCheckpoint", "RichModelSummary")
"""What moves no weights and stops no run."""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("names", [*((name,) for name in CALLBACKS if name not in TOGETHER), TOGETHER], ids="-".join)
def test_a_callback_goes_on(tmp_path, names, ranks):
    given = [{"class_path": f"lightning.pytorch.callbacks.{name}", "init_args": CALLBACKS[name]} for name in names]
    assert_goes_on(tmp_path, ranks, (*RUN, "--data.init_args.batch_size=4", "--model=tests.own.Regression"), *given)


class SizedData(PointsData):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Points(48), batch_size=self.batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_a_learning_rate_is_searched_once(tmp_path, ranks):
    finder = {"class_path": "lightning.pytorch.callbacks.LearningRateFinder", "init_args": {"num_training_steps": 60}}
    words = (*RUN, "--model=tests.own.Regression")
    assert_goes_on(tmp_path, ranks, words, finder)
    assert (tmp_path / "killed/output.txt").read_text().count("LearningRateFinder does not search again") == 1


class SearchesLater(LearningRateFinder):
    """As Lightning's page on fine-tuning has it."""

    def on_fit_start(self, *args):
        pass


class SearchesAlways(LearningRateFinder):
    def on_fit_start(self, trainer, pl_module):
        super().on_fit_start(trainer, pl_module)


def test_a_finder_of_another_kind_stays_and_a_second_fit_searches_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    later, first = SearchesLater(), LearningRateFinder(num_training_steps=60)
    settings = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    Trainer(default_root_dir=tmp_path, **settings).fit(Regression(), PointsData())
    resumed = Trainer(default_root_dir=tmp_path, callbacks=[later, first], **{**settings, "max_epochs": 2})
    resumed.fit(Regression(), PointsData(), ckpt_path="last")
    assert first.optimal_lr is None
    assert {later, first} <= {*resumed.callbacks}
    resumed.fit_loop.max_epochs = 4
    resumed.fit(Regression(), PointsData())
    assert first.optimal_lr is not None
    begun = Trainer(default_root_dir=tmp_path, callbacks=[SearchesAlways()], **{**settings, "max_epochs": 9})
    with pytest.raises(UserError, match="before the run's own has been restored"):
        begun.fit(Regression(), PointsData(), ckpt_path="last")
    exact = Trainer(default_root_dir=tmp_path / "exact", callbacks=[first], exact=True, global_batch_size=4, **settings)
    with pytest.raises(UserError, match="finds another rate on another number of ranks"):
        exact.fit(Regression(), PointsData())


def test_a_batch_size_that_was_searched_is_refused_when_the_run_resumes(tmp_path):
    finder = {"class_path": "lightning.pytorch.callbacks.BatchSizeFinder", "init_args": {"init_val": 4, "max_trials": 1}}
    words = ("fit", "--data=tests.survive.test_stock.SizedData", "--model=tests.own.Regression", "--run=it")
    words = (*words, "--trainer.accelerator=cpu", "--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0")
    begun = forked(tmp_path, *words, callbacks(finder), "--trainer.max_epochs=1")
    assert begun.code == 0, begun.output
    assert "so this run will not resume with it" in begun.output
    resumed = forked(tmp_path, *words, callbacks(finder), "--trainer.max_epochs=2")
    assert resumed.code == 2
    assert "which no checkpoint holds" in resumed.output


SCHEDULES = {
    "LambdaLR": {"lr_lambda": lambda at: 1 / (1 + at)},
    "MultiplicativeLR": {"lr_lambda": lambda at: 0.97},
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [2, 5, 7]},
    "ConstantLR": {"total_iters": 7},
    "LinearLR": {"total_iters": 9},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {"total_iters": 12, "power": 2},
    "CosineAnnealingLR": {"T_max": 9},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 4},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 30},
    "ReduceLROnPlateau": {"patience": 0, "threshold": 0.5},
}


class Scheduled(Regression):
    """A network and an optimiser for each of torch's schedules, all of which move with the steps, in a step of its own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.ModuleList(nn.Linear(6, 1).double() for _ in range(len(SCHEDULES) + 2))

    def training_step(self, batch, batch_idx):
        schedules = self.lr_schedulers()
        for layer, optimizer, schedule in zip(self.layers, self.optimizers(), schedules, strict=True):
            loss = nn.functional.mse_loss(layer(batch["point"]), batch["sum"])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                if batch_idx % 2:
                    schedule.step(float(self.trainer.current_epoch * 5 + batch_idx))  # the same on all ranks
            else:
                schedule.step()
        self.log_dict({f"lr/{at}": sgd.param_groups[0]["lr"] for at, sgd in enumerate(self.optimizers())})

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9) for layer in self.layers]
        made = [
            getattr(lr_scheduler, name)(optimizer, **settings)
            for optimizer, (name, settings) in zip(optimizers, SCHEDULES.items(), strict=False)
        ]
        *_, two, three = optimizers
        parts = [lr_scheduler.LinearLR(two, total_iters=5), lr_scheduler.ExponentialLR(two, 0.9)]
        made.append(lr_scheduler.SequentialLR(two, parts, milestones=[7]))
        made.append(lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(three), lr_scheduler.StepLR(three, 3)], three))
        return optimizers, made


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_all_of_torchs_schedules_go_on(tmp_path, ranks):
    words = [argument for argument in RUN if "every_n_steps" not in argument and "global_batch" not in argument]
    optimizers = len(SCHEDULES) + 2
    words += ["--model=tests.survive.test_stock.Scheduled", f"--data.init_args.batch_size={12 // ranks}"]
    words += ["--trainer.strategy=ddp_find_unused_parameters_true", f"--checkpoints.every_n_steps={7 * optimizers}"]
    assert_goes_on(tmp_path, ranks, words, step=7 * optimizers)
