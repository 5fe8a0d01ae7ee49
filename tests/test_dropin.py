"""What a script that was written for Lightning's Trainer relies on, and nobody would miss before it is gone."""

from datetime import timedelta
from itertools import count

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from project import Trainer
from project.errors import UserError

QUIET = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "logger": False}


def trainer(folder, **settings):
    return Trainer(default_root_dir=folder, **QUIET | settings)


class Counting(BoringModel):
    """Counts what it validates on, and logs its loss."""

    def __init__(self):
        super().__init__()
        self.validated = 0

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated += 1

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 64), batch_size=8)

    val_dataloader = train_dataloader


class Levels(Dataset):
    """A curriculum: what it gives depends on an attribute that somebody sets from outside."""

    def __init__(self):
        self.level = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((32,), float(self.level))


class Curriculum(BoringModel):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_epoch_start(self):
        dataset = self.trainer.train_dataloader.dataset
        assert isinstance(dataset, Levels)
        dataset.level = self.current_epoch

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0, 0].item())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_is_the_users_own_and_can_be_changed(tmp_path, workers):
    """Lightning has begun to read with processes of its own before the hook, and the first one reads what was."""
    module = Curriculum()
    loader = DataLoader(Levels(), batch_size=4, num_workers=workers)
    trainer(tmp_path, max_epochs=3, limit_val_batches=0, enable_checkpointing=False).fit(module, loader)
    assert module.seen == [0, 0, 1, 1, 2, 2]


def test_limits_are_to_be_read_and_set(tmp_path):
    given = {"limit_train_batches": 3, "limit_val_batches": 0.5, "accumulate_grad_batches": 2, "limit_test_batches": 7}
    made, module = trainer(tmp_path, **given, num_sanity_val_steps=0), Counting()
    assert {name: getattr(made, name) for name in given} == given
    made.fit(module)
    assert {name: getattr(made, name) for name in given} == given
    assert (made.global_step, module.validated) == (3, 4)
    made.fit_loop.max_epochs, made.limit_train_batches, made.limit_val_batches = 2, 1.0, 1
    made.fit(module)
    assert (made.global_step, module.validated) == (7, 5)


@pytest.mark.parametrize("name", ["limit_train_batches", "limit_val_batches"])
def test_a_share_of_less_than_one_batch_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=rf"{name}=0.01 of 8 .* least share is 0.125"):
        trainer(tmp_path, **{name: 0.01}).fit(Counting())


def test_fast_dev_run_tries_what_was_switched_off(tmp_path):
    made, module = trainer(tmp_path, fast_dev_run=True, limit_train_batches=0, limit_val_batches=0), Counting()
    made.fit(module)
    assert (made.global_step, module.validated) == (1, 1)
    made, module = trainer(tmp_path, fast_dev_run=2, accumulate_grad_batches=2), Counting()
    made.fit(module)
    assert (made.global_step, module.validated) == (2, 2)


@pytest.mark.parametrize("interval", ["00:00:00:10", {"seconds": 10}, timedelta(seconds=10)])
def test_a_validation_by_the_clock(tmp_path, monkeypatch, interval):
    """Each look at the clock is 4 s later."""
    clock = count(step=4)
    for place in ("fit_loop", "training_epoch_loop", "evaluation_loop"):
        monkeypatch.setattr(f"lightning.pytorch.loops.{place}.time", Clock(clock))
    made, module = trainer(tmp_path, val_check_interval=interval, num_sanity_val_steps=0, limit_val_batches=1), Counting()
    made.fit(module)
    assert module.validated == 2


class Clock:
    def __init__(self, times):
        self.times = times

    def monotonic(self):
        return next(self.times)


def test_steps_are_logged_once_after_a_resume_within_an_epoch(tmp_path):
    """ModelCheckpoint saves in on_train_batch_end, before the step is counted for loggers. And they get nothing else."""
    rows = []
    for start, checkpoint in (("whole", None), ("again", "epoch=0-step=4.ckpt")):
        saved = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
        logger = CSVLogger(tmp_path, name=start, version="")
        made = trainer(tmp_path / start, callbacks=[saved], logger=logger, log_every_n_steps=1, limit_val_batches=0)
        made.fit(Counting(), ckpt_path=checkpoint and tmp_path / checkpoint)
        rows.append((tmp_path / start / "metrics.csv").read_text().splitlines())
    whole, again = rows
    assert whole[0] == "epoch,step,train_loss"
    assert [row.split(",")[1] for row in whole[1:]] == [str(step) for step in range(8)]
    assert again[1:] == whole[5:]


def test_a_checkpoint_of_lightnings_own_trainer_goes_on_within_an_epoch(tmp_path):
    from lightning.pytorch.trainer.trainer import Trainer as Theirs

    steps = []
    for kind, path in ((Theirs, None), (Trainer, tmp_path / "epoch=0-step=4.ckpt")):
        saved = [ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)] if kind is Theirs else None
        logger = CSVLogger(tmp_path, name=kind.__module__, version="")
        made = kind(
            default_root_dir=tmp_path / kind.__module__, callbacks=saved, log_every_n_steps=1, **QUIET | {"logger": logger}
        )
        made.fit(Counting(), ckpt_path=path)
        rows = (tmp_path / kind.__module__ / "metrics.csv").read_text().splitlines()[1:]
        steps.append([int(row.split(",")[1]) for row in rows])
    assert steps == [[*range(8)], [*range(4, 8)]]


def test_settings_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "2")
    monkeypatch.setenv("PL_TRAINER_PRECISION", "64-true")
    made = Trainer(default_root_dir=tmp_path, limit_train_batches=3, accelerator="cpu")
    assert (made.max_epochs, made.limit_train_batches, made.precision) == (7, 3, "64-true")


SAMPLERS = {
    "torch's own, shuffled": (lambda data: BatchSampler(RandomSampler(data), 6, True), 5),
    "torch's own, in order": (lambda data: BatchSampler(SequentialSampler(data), 6, False), 6),
    "with a sampler that repeats": (lambda data: BatchSampler(RandomSampler(data, replacement=True), 6, False), 6),
    "with a part of the samples": (lambda data: BatchSampler(SequentialSampler(range(13)), 6, False), 3),
    "of the user's own": (lambda data: [[0, 1], [2, 3, 4]], 2),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_batch_sampler(tmp_path, kind):
    data = RandomDataset(32, 32)
    make, batches = SAMPLERS[kind]
    made, module = trainer(tmp_path, num_sanity_val_steps=0), Counting()
    made.fit(module, DataLoader(data, batch_sampler=make(data)), DataLoader(data, batch_sampler=make(data)))
    assert (made.global_step, module.validated) == (batches, batches)
