"""A dry run: one process says what each rank of a fit would hold, and leaves nothing."""

import re

import pytest
import torch

from project import Trainer
from project.doctor.dry_run import numbers, per_host
from project.errors import UserError
from project.model.gpt import LanguageModel
from project.train.foretold import tell
from project.train.held import Sharing
from project.train.on_paper import made_on_paper
from tests.conftest import TINY

GPT = ("fit", "--config=configs/gpt.yaml")


def cells(output):
    """Of the table's rows, by strategy and ranks."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    return {(row[2], row[0]): row for row in rows}


def test_of_any_number_of_ranks_in_one_process_and_nothing_is_left(quick):
    run = quick(*GPT, "--dry_run=2,64", "--trainer.strategy=sharded", "--trainer.devices=2")
    assert run.code == 0, run.output
    assert not run.runs
    table = cells(run.output)
    assert list(table) == [("sharded, full", "2"), ("sharded, full", "64"), ("ddp", "any")]
    assert table["sharded, full", "64"][1] == "32"  # hosts, of two devices each
    assert "whole, until the last micro-batch of a step (2 on 2 ranks)" in run.output
    assert "64 ranks: 64 rank(s) with micro-batches of 16 can't make a global batch of 64" in run.output
    assert re.search(r"2 ranks: fits a device like the one here", run.output)


def test_images_with_ddp_see_the_sharded_one_beside_it(quick):
    run = quick("fit", "--config=configs/ddp.yaml", *TINY, "--dry_run", "--trainer.devices=3", "--data.global_batch_size=48")
    assert run.code == 0, run.output
    assert not run.runs
    assert list(cells(run.output)) == [("ddp", "any"), ("sharded, full", "3")]
    assert "trainer.strategy is ddp" in run.output
    assert "not known" not in run.output


@pytest.mark.slow
def test_a_network_that_no_machine_holds(quick):
    huge = ("--model.init_args.layers=80", "--model.init_args.heads=64", "--model.init_args.width=8192")
    run = quick(*GPT, *huge, "--trainer.global_batch_size=null", "--trainer.strategy=sharded", "--dry_run=8,1024")
    assert run.code == 0, run.output
    assert "64.4 B parameters, 80 block(s) of Block" in run.output
    assert cells(run.output)["sharded, full", "8"][3] == "30 GiB"  # 64.4e9 x 4 bytes / 8
    assert re.search(r"8 ranks: does not fit a device like the one here.*HINT: checkpoint_activations=true", run.output)


@pytest.mark.faults
def test_it_takes_one_process(cli):
    run = cli(*GPT, "--dry_run", torchrun=2)
    assert run.code != 0
    assert "fit --dry_run takes one process. HINT" in run.output


def test_numbers_of_ranks():
    assert numbers("true", 4) == [4]
    assert numbers("true", 1) == [2]
    assert numbers("64,8", 1) == [8, 64]
    assert [per_host(ranks, 1) for ranks in (2, 8, 64)] == [2, 8, 8]
    assert per_host(64, 4) == 4
    for wrong in ("8,many", "0", "-2"):
        with pytest.raises(UserError, match="numbers of ranks"):
            numbers(wrong, 1)


def a_fit(tmp_path, module, batch):
    quiet = {"logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    trainer = Trainer(max_steps=1, accelerator="cpu", devices=1, **quiet)
    trainer.strategy.connect(module)
    module.trainer = trainer
    module.train_dataloader = lambda: torch.utils.data.DataLoader([batch] * 4, batch_size=2)
    return trainer


def gpt():
    return LanguageModel(vocabulary=50, context=16, layers=3, heads=2, width=24, dropout=0.0)


def test_at_the_start_of_a_sharded_fit_a_line_says_what_each_rank_will_hold(tmp_path, caplog, monkeypatch):
    one = torch.arange(16) % 50
    trainer = a_fit(tmp_path, made_on_paper(gpt), (one, one))
    with caplog.at_level("INFO"):
        tell(trainer, None, Sharing(2, "full", per_host=2))
    assert re.search(r"Each rank will hold at most .*: parameters .*, activations \d", caplog.text)
    assert "WARNING" not in caplog.text
    monkeypatch.setattr("project.train.foretold.room", lambda device, ranks: 200_000)
    with caplog.at_level("INFO"):
        tell(trainer, None, Sharing(2, "full", per_host=2))
    assert re.search(r"WARNING .*its device has 195 KiB. HINT: \w+=\w+ makes it", caplog.text)
