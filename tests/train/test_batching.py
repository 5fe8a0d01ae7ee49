"""How a global batch is made up of micro-batches, ranks and accumulation."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, ManualOptimBoringModel, RandomDataset
from lightning.pytorch.trainer.states import RunningStage
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset

from project import Trainer
from project.errors import UserError
from project.step import loaders
from project.step.batching import accumulation, check_elastic
from project.step.micro_batch import count_samples

KEYS = "data.global_batch_size data.batch_size"


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_accumulation_makes_up_the_global_batch(batch, world_size, count):
    made = batch * world_size * count
    assert accumulation(made, batch, world_size, "auto", KEYS) == count
    assert accumulation(made, batch, world_size, count, KEYS) == count
    with pytest.raises(ValueError, match=f"accumulate_grad_batches={count}"):
        accumulation(made, batch, world_size, count + 1, KEYS)


def test_plain_accumulation_works_without_a_global_batch():
    assert accumulation(None, 8, 4, 3, KEYS) == 3
    assert accumulation(None, 8, 4, "auto", KEYS) == 1


def test_a_world_size_that_does_not_fit_is_told_which_do():
    with pytest.raises(ValueError, match=r"ranks that fit: 1, 2, 4, 8; nearest global batch for 3 rank\(s\): 144"):
        accumulation(128, 16, 3, "auto", KEYS)


@pytest.mark.parametrize("keys", [KEYS, "trainer.global_batch_size batch_size"])
@pytest.mark.parametrize(("ranks", "fits"), [(16, True), (64, True), (3, False), (128, False)])
def test_a_refusal_names_the_config_for_clusters_where_it_fits(keys: str, ranks: int, fits: bool) -> None:
    config = "configs/ddp_cluster.yaml" if keys == KEYS else "configs/gpt_cluster.yaml"
    with pytest.raises(ValueError, match="can't make a global batch of 128") as refusal:
        accumulation(128, 16, ranks, "auto", keys)
    assert (f"{config} takes 1 to 64 ranks" in str(refusal.value)) == fits
    assert [accumulation(1024, 16, 2**power, "auto", keys) for power in range(7)] == [64, 32, 16, 8, 4, 2, 1]


def test_a_number_of_nodes_that_may_come_is_refused_before_it_comes(monkeypatch):
    check_elastic(128, 4, 8, KEYS)
    monkeypatch.setenv("PROJECT_NODES", "1:4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    check_elastic(96, 1, 8, KEYS)
    with pytest.raises(
        UserError, match=r"NNODES=1:4 may start this run on 3 node\(s\), and 12 rank\(s\) .* a global batch of 128"
    ):
        check_elastic(128, 4, 8, KEYS)


@pytest.mark.parametrize("module", [BoringModel, ManualOptimBoringModel])
@pytest.mark.parametrize(("settings", "warned"), [({}, True), ({"global_batch_size": 4}, False)])
def test_a_step_that_follows_from_the_number_of_ranks_is_warned_of(tmp_path, caplog, module, settings, warned):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    loaders._warn_of_no_global_batch.cache_clear()
    for _ in range(2):  # once in a process
        trainer = Trainer(max_steps=1, default_root_dir=tmp_path, limit_val_batches=0, **quiet, **settings)
        trainer.fit(module(), DataLoader(RandomDataset(32, 64), batch_size=4))
    assert caplog.text.count("HINT: trainer.global_batch_size=4") == warned


def test_an_accumulation_that_is_set_later_is_taken(tmp_path):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, limit_val_batches=0, **quiet)
    data = DataLoader(RandomDataset(32, 64), batch_size=4)
    for micro_batches, steps in ((4, 4), (2, 12)):
        trainer.accumulate_grad_batches = micro_batches
        trainer.fit(BoringModel(), data)
        assert (trainer.global_step, trainer.accumulate_grad_batches) == (steps, micro_batches)
        trainer.fit_loop.max_epochs += 1
        trainer.validate(BoringModel(), data, verbose=False)
    trainer.accumulate_grad_batches = 0
    with pytest.raises(UserError, match="accumulate_grad_batches is 1 at least"):
        trainer.fit(BoringModel(), data)


class Dealt(BoringDataModule):
    """A data module of the user's that deals its samples itself, as ImageData does."""

    def deal(self, dealing):
        self.dealing = dealing

    def batch_sizes(self):
        return 4, 8

    def loader_processes(self):
        return 0

    def sample_shape(self):
        return (32,)

    def fingerprint(self):
        return {}

    def description(self):
        return {}

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 64), batch_size=4)


def test_a_data_module_that_deals_its_samples_says_how_large_a_batch_is(tmp_path):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, limit_train_batches=5, limit_val_batches=0, **quiet)
    trainer.fit(BoringModel(), datamodule=(data := Dealt()))
    assert (trainer.global_step, trainer.global_batch, trainer.accumulate_grad_batches) == (5, 8, 2)
    assert (data.dealing.limits["train"], data.dealing.shared_by, data.dealing.exact) == (5, 1, False)


def test_the_samples_of_a_packed_sequence_are_counted():
    assert count_samples({"words": pack_sequence([torch.ones(3), torch.ones(2)])}) == 5


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(4)


@pytest.mark.parametrize("loader", [DataLoader(Stream()), Stream()])
def test_a_dataset_that_each_rank_reads_whole_is_warned_of(tmp_path, monkeypatch, caplog, loader):
    trainer = Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu", enable_progress_bar=False)
    monkeypatch.setattr(loaders, "data_ranks", lambda trainer: SimpleNamespace(count=3, rank=0, shared_by=1))
    trainer._data_connector.note_limits()
    trainer._data_connector._prepare_undealt(loader, RunningStage.VALIDATING, "it can only be read from its beginning")
    assert "Each of 3 ranks reads all of the val set (Stream)" in caplog.text
    assert "they are others" not in caplog.text
