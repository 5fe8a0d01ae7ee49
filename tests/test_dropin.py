"""What a script that was written for Lightning's Trainer relies on, and nobody would miss before it is gone."""

import gc
import logging
import shutil
from datetime import timedelta
from inspect import signature
from itertools import count
from weakref import ref

import lightning.pytorch
import pytest
import torch
from lightning.fabric.plugins.environments import KubeflowEnvironment, LightningEnvironment, SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from project import Trainer
from project.errors import NonFiniteError, UserError
from project.survive.requeue import REQUEUE
from project.watch.history import lives_of
from project.watch.progress import Progress
from tests.own import Points, PointsData

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
    whole, resumed = rows
    assert whole[0] == "epoch,step,train_loss"
    assert [row.split(",")[1] for row in whole[1:]] == [str(step) for step in range(8)]
    assert resumed[1:] == whole[5:]


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


class Updated(Counting):
    """Has a schedule that torch does not know, as timm's are."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(self.global_step)
        self.rates.append(scheduler.get_last_lr())


@pytest.mark.parametrize("exact", [False, True])
def test_a_schedule_that_the_module_moves(tmp_path, exact):
    from lightning.pytorch.trainer.trainer import Trainer as Theirs

    rates = []
    for kind, settings in ((Theirs, {}), (Trainer, {"exact": exact, "global_batch_size": 8})):
        module = Updated()
        kind(default_root_dir=tmp_path / kind.__module__, **QUIET, **settings).fit(module)
        rates.append(module.rates)
    assert len(rates[0]) == 4
    assert rates[0] == rates[1]


def test_a_command_line_of_ones_own(tmp_path, monkeypatch):
    """`trainer_class` is all that changes: it has this Trainer's arguments, and resumes its runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "trainer: {accelerator: cpu, exact: true, global_batch_size: 4, limit_train_batches: 3, limit_val_batches: 1, "
        "default_root_dir: run, enable_progress_bar: false}\n"
    )

    def steps(*words):
        args = ["fit", "--config=run.yaml", *words]
        made = LightningCLI(
            BoringModel, BoringDataModule, trainer_class=Trainer, args=args, save_config_kwargs={"overwrite": True}
        )
        return made.trainer.global_step

    assert steps("--trainer.max_epochs=1") == 3
    assert steps("--trainer.max_epochs=2", "--ckpt_path=last") == 6
    assert (tmp_path / "run/checkpoints/step-000000006.ckpt").exists()
    assert [life.step for life in lives_of(tmp_path / "run/life.jsonl")] == [0, 3]


def test_settings_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    monkeypatch.setenv("PL_TRAINER_LIMIT_TRAIN_BATCHES", "2")
    monkeypatch.setenv("PL_TRAINER_PRECISION", "64-true")
    made = Trainer(default_root_dir=tmp_path, limit_train_batches=3, accelerator="cpu")
    assert (made.max_epochs, made.limit_train_batches, made.precision) == (7, 3, "64-true")


def test_its_signature_has_all_that_it_takes():
    """Libraries hand on those of their settings that it names."""
    of_lightning, taken = signature(lightning.pytorch.Trainer.__init__).parameters, signature(Trainer.__init__).parameters
    assert of_lightning.keys() <= taken.keys()
    assert taken.keys() - of_lightning.keys() >= {"exact", "threads"}
    assert "kwargs" not in taken
    assert taken["accumulate_grad_batches"].default == "auto"


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


class Balanced(BatchSampler):
    """As torch's, in an order of its own; it knows its batch_size."""


def test_a_batch_sampler_of_ones_own_says_of_how_many_samples_a_step_is(tmp_path):
    batches = Balanced(SequentialSampler(range(32)), 4, False)
    made = trainer(tmp_path, global_batch_size=8, num_sanity_val_steps=0)
    made.fit(Counting(), DataLoader(RandomDataset(32, 32), batch_sampler=batches))
    assert (made.accumulate_grad_batches, made.global_step) == (2, 4)


class OwnBatches(PointsData):
    def train_dataloader(self):
        return DataLoader(Points(self.size), batch_sampler=[[0, 1], [2, 3]])


def test_a_batch_sampler_of_ones_own_is_refused_in_a_line_on_two_ranks(quick):
    run = quick("fit", "--model=tests.own.Regression", "--data=tests.test_dropin.OwnBatches", "--trainer.max_epochs=1", ranks=2)
    assert run.code == 2
    assert "2 ranks can't share the batch sampler list" in run.output
    assert "Traceback" not in run.output


class HalfInBatches(PointsData):
    def train_dataloader(self):
        return DataLoader(Points(16), batch_sampler=BatchSampler(SequentialSampler(range(8)), 4, False))


def test_ranks_share_the_samples_and_batches_of_torchs_own_batch_sampler(quick, tmp_path):
    words = ("--data=tests.test_dropin.HalfInBatches", "--trainer.accelerator=cpu", "--trainer.max_epochs=1")
    run = quick("fit", "--model=tests.own.Regression", *words, "--trainer.global_batch_size=8", ranks=2)
    assert run.code == 0, run.output
    seen = [(tmp_path / f"seen-{rank}.txt").read_text().split() for rank in range(2)]
    assert [len(words) for words in seen] == [5, 5]  # the step, and a batch
    assert sorted(int(sample) for words in seen for sample in words[1:]) == [*range(8)]


def test_a_prediction_reads_what_its_batch_sampler_gives(tmp_path):
    batches = BatchSampler(SequentialSampler(range(3)), 2, False)
    predicted = trainer(tmp_path).predict(BoringModel(), DataLoader(RandomDataset(32, 16), batch_sampler=batches))
    assert [len(batch) for batch in predicted] == [2, 1]


@pytest.mark.parametrize("exact", ["true", "false"])
def test_values_of_one_rank_are_named(quick, exact):
    words = ("--data=tests.own.PointsData", "--trainer.accelerator=cpu", "--trainer.max_epochs=1", f"--trainer.exact={exact}")
    done = quick("fit", "--model=tests.own.Stepwise", *words, "--trainer.global_batch_size=24", ranks=2)
    assert done.code == 0, done.output
    assert (
        done.output.count("error of a step is rank 0's own")
        == done.output.count("loss is rank 0's own value")
        == (exact == "false")
    )


def test_what_no_rank_shares_is_foretold_on_one(tmp_path, caplog):
    with caplog.at_level("INFO"):
        trainer(tmp_path).fit(BoringModel(), DataLoader(RandomDataset(32, 4), batch_sampler=[[0], [1, 2, 3]]))
    assert "several ranks can't share it" in caplog.text


class Printing(Counting):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss * 0 + 0.001234, prog_bar=True)
        return loss

    def on_train_epoch_end(self):
        self.print("printed")
        bar = self.trainer.progress_bar_callback
        self.shown = (bar.is_enabled, bar.is_disabled, bar.refresh_rate, bar.train_progress_bar.n, bar.train_progress_bar.total)


class Figures(Progress):
    def on_train_batch_end(self, trainer, *args):
        super().on_train_batch_end(trainer, *args)
        self.figures = "  ".join(field.text for field in self._fields(trainer))


def test_the_bar_prints_and_shows_what_was_asked_for(tmp_path, capsys):
    module, bar = Printing(), Figures()
    trainer(tmp_path, enable_progress_bar=True, callbacks=[bar]).fit(module)
    assert "printed" in capsys.readouterr().out
    assert module.shown == (True, False, 1, 8, 8)
    assert "mine 1.23e-03" in bar.figures


def test_an_environment_of_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    for made in (LightningEnvironment, KubeflowEnvironment):
        environment = made()
        assert trainer(tmp_path, plugins=environment, strategy="ddp").strategy.cluster_environment is environment


def test_slurms_environment_switches_requeueing_off(tmp_path, monkeypatch):
    monkeypatch.setattr(REQUEUE, "given_up", False)
    trainer(tmp_path, plugins=[SLURMEnvironment(auto_requeue=False)]).fit(BoringModel())
    assert REQUEUE.given_up


class Scored(Counting):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float([3, 1, 2][self.current_epoch]))


class Better(Counting):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 0.5)


class Told(CSVLogger):
    def __init__(self, folder):
        super().__init__(folder)
        self.scores = []

    def after_save_checkpoint(self, checkpoint_callback):
        self.scores.append((float(checkpoint_callback.current_score), float(checkpoint_callback.best_model_score)))


def test_the_checkpoint_callback_is_read_as_lightnings(tmp_path, caplog):
    logger = Told(tmp_path)
    made = trainer(tmp_path, max_epochs=3, logger=logger)
    made.fit(Scored())
    saved = made.checkpoint_callback
    assert logger.scores[-1] == (2, 1)
    assert saved.dirpath == str(tmp_path / "checkpoints")
    assert saved.best_k_models == {saved.best_model_path: torch.tensor(1.0)}
    assert saved.best_model_path.endswith("step-000000016.ckpt")
    made.validate(Better(), verbose=False)  # on another set, say
    assert (saved.best_model_score, saved.current_score) == (1, 2)
    assert saved.best_model_path.endswith("step-000000016.ckpt")
    assert "is read before" not in caplog.text


def test_the_best_path_that_is_read_too_early_says_so(tmp_path, caplog):
    class Reads(Callback):
        def on_train_end(self, trainer, pl_module):
            self.early = trainer.checkpoint_callback.best_model_path

        def on_fit_end(self, trainer, pl_module):
            self.warnings, self.path = caplog.text, trainer.checkpoint_callback.best_model_path

    reads = Reads()
    trainer(tmp_path, max_epochs=2, callbacks=[reads]).fit(Scored())
    assert not reads.early.endswith("step-000000016.ckpt")
    assert reads.path.endswith("step-000000016.ckpt")
    assert reads.warnings.count("is read before the checkpoint of the last validation") == 1
    assert caplog.text == reads.warnings


class Bringing(Scored):
    def configure_callbacks(self):
        return [ModelCheckpoint(monitor="val_loss")]


def test_a_checkpoint_callback_of_the_module_replaces_ours(tmp_path):
    made = trainer(tmp_path, max_epochs=3)
    made.fit(Bringing())
    assert [type(callback) for callback in made.checkpoint_callbacks] == [ModelCheckpoint]
    assert made.checkpoint_callback.best_model_path.endswith("epoch=1-step=16.ckpt")


class Diverging(Counting):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 3 else 1)


def test_a_loss_that_is_not_finite_can_be_caught(tmp_path):
    made = trainer(tmp_path)
    with pytest.raises(NonFiniteError, match="The loss of step 4"):
        made.fit(Diverging())
    assert list(tmp_path.glob("checkpoints/step-000000003.ckpt"))


@pytest.mark.parametrize("left_out", [0, 2])
def test_a_batch_of_nothing_is_no_step(tmp_path, left_out):
    """A collate_fn may give None: for the run's first batch, too."""
    module, given, heard = Counting(), count(), []

    def collate(samples):
        return None if next(given) == left_out else torch.stack(samples)

    class Listens(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            heard.append(outputs is None)

    made = trainer(tmp_path, limit_train_batches=4, limit_val_batches=0, callbacks=[Listens()])
    with pytest.warns(UserWarning, match="yielded None"):
        made.fit(module, DataLoader(RandomDataset(32, 64), batch_size=8, collate_fn=collate))
    assert made.global_step == 3
    assert heard == [number == left_out for number in range(4)]


def test_a_run_that_is_to_leave_nothing_leaves_nothing(tmp_path):
    trainer(tmp_path / "it", enable_checkpointing=False).fit(Counting())
    saved = ModelCheckpoint(tmp_path / "saved")
    trainer(tmp_path / "it", callbacks=[saved]).fit(Counting())
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["epoch=0-step=8.ckpt"]
    trainer(tmp_path / "it", callbacks=[saved], fingerprints=True).fit(Counting())
    assert (tmp_path / "it/fingerprints.jsonl").is_file()


def test_loaders_can_be_prepared_before_any_loop(tmp_path):
    made, model = trainer(tmp_path, max_steps=7, limit_train_batches=2), Counting()
    made.strategy.connect(model)
    made._data_connector.attach_data(model, train_dataloaders=DataLoader(RandomDataset(32, 64)))
    assert made.estimated_stepping_batches == 2


@pytest.mark.parametrize("settings", [{}, {"exact": True, "global_batch_size": 8}, {"strategy": "ddp", "barebones": True}])
def test_a_process_that_outlives_its_trainer_can_free_it_and_the_model(tmp_path, settings):
    fitted, model = trainer(tmp_path, **settings), Counting()
    fitted.fit(model)
    fitted.validate(model)
    left = ref(fitted), ref(model)
    del fitted, model
    gc.collect()
    assert [each() for each in left] == [None, None]


def test_errors_are_of_the_kind_that_is_expected(tmp_path):
    for kind, settings in (
        (MisconfigurationException, {"overfit_batches": -3}),
        (TypeError, {"devices": "x"}),
        (ValueError, {"barebones": True, "logger": True}),
    ):
        with pytest.raises(kind) as caught:
            Trainer(default_root_dir=tmp_path, accelerator="cpu", **settings)
        assert isinstance(caught.value, UserError)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint") as caught:
        trainer(tmp_path).fit(Counting(), ckpt_path=tmp_path / "nope.ckpt")
    assert isinstance(caught.value, UserError)


class Keyed(Callback):
    @property
    def state_key(self):
        return Keyed

    def state_dict(self):
        return {"unreadable": object()}


def test_a_state_under_a_key_that_is_no_word_is_named(tmp_path):
    with pytest.raises(UserError, match=r"the callback <class .*Keyed"):
        trainer(tmp_path, callbacks=[Keyed()]).fit(Counting())


def test_records_of_the_log_stay_the_programs(tmp_path):
    class Record(logging.LogRecord):
        pass

    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(Record)
    try:
        trainer(tmp_path)
        assert logging.getLogRecordFactory() is Record
    finally:
        logging.setLogRecordFactory(before)


class Monitoring(Scored):
    """What it monitors is there when an epoch of training is over."""

    def __init__(self, monitor="train_loss_epoch"):
        super().__init__()
        self.monitor = monitor

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self.monitor}}


class AtTheEnd(Monitoring):
    def on_train_epoch_end(self):
        self.log("train_los_epoch", 1.0)


def test_a_metric_of_a_whole_epoch_of_training_may_be_monitored(tmp_path):
    stop, saved = EarlyStopping("train_loss_epoch"), ModelCheckpoint(tmp_path, monitor="train_loss_epoch")
    latest = ModelCheckpoint(tmp_path, filename="latest", monitor="step", mode="max")
    made = trainer(tmp_path, max_epochs=2, callbacks=[stop, saved, latest])
    made.fit(Monitoring())
    assert made.current_epoch == 2
    assert saved.best_model_score == made.callback_metrics["train_loss_epoch"]
    second = trainer(tmp_path, max_epochs=2, callbacks=[EarlyStopping("train_los_epoch"), EarlyStopping("nope", strict=False)])
    second.fit(AtTheEnd())
    assert second.current_epoch == 2


@pytest.mark.parametrize("name", ["train_los", "nope", "val_los"])
def test_a_metric_that_nobody_logs_is_named_when_it_could_have_come(tmp_path, name):
    with pytest.raises(UserError, match=rf"EarlyStopping.monitor={name}: there is no such metric"):
        trainer(tmp_path, max_epochs=2, callbacks=[EarlyStopping(name)]).fit(Monitoring())


class OfStages(Monitoring):
    """Logs its loss by the name of the stage, and so by another one in the sanity check."""

    def validation_step(self, batch, batch_idx):
        stage = {"validate": "val"}.get(self.trainer.state.stage.value, self.trainer.state.stage.value)
        self.log(f"{stage}_of_stage", self.step(batch))


class NotInSanityCheck(Monitoring):
    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.log("val_of_stage", self.step(batch))


@pytest.mark.parametrize("kind", [OfStages, NotInSanityCheck])
def test_a_metric_that_the_sanity_check_does_not_log_may_be_monitored(tmp_path, kind, caplog):
    trainer(tmp_path, max_epochs=2, callbacks=[EarlyStopping("val_of_stage")], num_sanity_val_steps=2).fit(kind())
    assert "no such metric" not in caplog.text


class StopsAfter(Callback):
    def __init__(self, epochs=2):
        self.epochs = epochs

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = trainer.should_stop or trainer.current_epoch + 1 == self.epochs


class OfLists(EarlyStopping):
    """Has an argument that is no number."""

    def __init__(self, limits):
        super().__init__("val_loss", patience=limits[0])
        self.limits = limits


class Listless(Scored):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0)


@pytest.mark.parametrize(
    ("stopping", "other", "epochs_then"),
    [
        (lambda: EarlyStopping("val_loss", patience=1), lambda: EarlyStopping("val_loss", patience=3), 4),
        (lambda: OfLists([1]), lambda: OfLists([3]), 3),  # its patience may be a state
    ],
    ids=["EarlyStopping", "OfLists"],
)
def test_a_run_that_stopped_early_ends_at_once_when_it_resumes(tmp_path, caplog, request, stopping, other, epochs_then):
    """Until it is made longer, or what stopped it has other settings."""

    def epochs(callback, copy="", **settings):
        folder = tmp_path / (copy or "run")
        if copy:
            shutil.copytree(tmp_path / "run", folder)
        caplog.clear()
        made, module = trainer(folder, **{"max_epochs": 9} | settings, callbacks=[callback]), Listless()
        made.fit(module, ckpt_path="last")
        module.cpu()
        line = f"The run stopped early, by {request.node.callspec.id}, after step {made.global_step}: nothing is left to do"
        weights.append(module.layer.weight.detach().clone())
        return made.global_step // 8, caplog.text.count(line)

    weights = []
    assert epochs(stopping()) == (2, 0)
    assert epochs(stopping()) == (2, 1)
    assert torch.equal(*weights)
    assert epochs(stopping(), "short", min_epochs=4) == (4, 0)
    assert epochs(stopping(), "long", max_epochs=3) == (3, 0)
    assert epochs(stopping(), "timed", max_time="01:00:00:00")[0] > 2
    assert epochs(other(), "other") == (epochs_then, 0)
    made = trainer(tmp_path / "run", max_epochs=9, callbacks=[stopping()])
    made.fit(Listless())
    made.fit(Listless(), ckpt_path="last")
    assert made.global_step == 16


def test_a_run_that_a_users_own_code_stopped_trains_on(tmp_path):
    """Its reason may have been a clock."""
    for epochs in (2, 9):
        made = trainer(tmp_path, max_epochs=9, callbacks=[StopsAfter()])
        made.fit(Listless(), ckpt_path="last")
        assert made.current_epoch == epochs


def test_a_run_keeps_to_its_decision_to_stop_until_it_may(tmp_path):
    """It was killed between the decision and `min_epochs`."""

    class Ends(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 3:
                raise KeyError

    settings = {"max_epochs": 9, "min_epochs": 5}
    with pytest.raises(KeyError):
        trainer(tmp_path, callbacks=[EarlyStopping("val_loss", patience=1), Ends()], **settings).fit(Listless())
    made = trainer(tmp_path, callbacks=[EarlyStopping("val_loss", patience=1)], **settings)
    made.fit(Listless(), ckpt_path="last")
    assert made.current_epoch == 5


def test_a_validation_that_was_due_when_modelcheckpoint_saved_is_made_up_for(tmp_path):
    """It saves in on_train_batch_end, before the validation that follows the step; and totals are those of a whole run."""
    validated = []
    for start, checkpoint in (("whole", None), ("again", "epoch=0-step=4.ckpt")):
        saved = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
        settings = {"val_check_interval": 4, "num_sanity_val_steps": 0, "limit_val_batches": 1, "max_epochs": 2}
        made, module = trainer(tmp_path / start, callbacks=[saved], **settings), Counting()
        made.fit(module, ckpt_path=checkpoint and tmp_path / checkpoint)
        validated.append(module.validated)
        assert made.global_step == 16
    assert validated == [4, 4]
