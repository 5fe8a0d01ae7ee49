"""One rank fails: all end, and what is printed last is that rank's error, once."""

import socket

import pytest

from tests.conftest import since_struck, took

HOST = socket.gethostname()

pytestmark = pytest.mark.timed  # ten seconds are the promise, on a machine that has the cores for it

BROKEN = (
    "fit",
    "--config=configs/ddp.yaml",
    "--data.source=project.data.Datasets",
    "--data.source.num_classes=10",
    "--data.source.train=tests.probes.Faulty",
    "--data.source.val=tests.probes.Faulty",
    "--data.num_workers=0",
    "--data.batch_size=8",
    "--data.global_batch_size=32",
    "--model.network.init_args.widths=[8]",
    "--model.network.init_args.blocks=1",
    "--trainer.num_sanity_val_steps=0",
)


@pytest.mark.parametrize("on", [0, 1, 99])
def test_the_error_is_printed_once_and_last(cli, on):
    run = cli(*BROKEN, f"--data.source.train.init_args.on={on}", "--trainer.devices=2", timeout=60)
    assert run.code == 1
    assert run.output.count("KeyError: 'this dataset is broken'") == 1
    assert run.output.count("Traceback") == 1
    assert run.output.rstrip().endswith("KeyError: 'this dataset is broken'")
    assert f"ERROR   [rank {on % 99}, {HOST}] " in run.output
    assert_ended_soon(run)


def assert_ended_soon(run):
    """Within ten seconds of the exception, all of it."""
    seconds = since_struck(run.folder)
    took("an error on one rank: all have ended after", seconds)
    assert seconds < 10


def test_torchrun_prints_the_error_of_the_rank_that_failed(cli):
    """And a loader process tells its rank, which says so with its name and host."""
    run = cli(*BROKEN, "--data.source.train.init_args.on=1", "--data.num_workers=1", torchrun=2, timeout=60)
    assert_ended_soon(run)
    assert run.code == 1
    last = run.output.rpartition("Root Cause")[2]
    assert "KeyError: 'this dataset is broken'" in last
    assert f"rank 1, {HOST}: " in last
    assert run.output.count("KeyError: 'this dataset is broken'") <= 2  # in one line of ours, and in torchrun's last word


def test_an_error_in_a_loader_process_is_its_ranks(cli):
    run = cli(*BROKEN, "--data.source.train.init_args.on=1", "--data.num_workers=1", "--trainer.devices=2", timeout=60)
    assert_ended_soon(run)
    assert run.code == 1
    assert run.output.count("KeyError: 'this dataset is broken'") == 1
    assert run.output.rstrip().endswith("KeyError: 'this dataset is broken'")
    assert f"ERROR   [rank 1, {HOST}] " in run.output
    assert "Caught KeyError in DataLoader worker process" in run.output


def test_a_rank_that_is_killed_ends_the_others(cli):
    words = ("--data.source.train.init_args.on=1", "--data.source.train.init_args.how=kill", "--trainer.devices=2")
    run = cli(*BROKEN, *words, timeout=60)
    seconds = since_struck(run.folder)
    took("SIGKILL of rank 1 of 2: all have ended after", seconds)
    assert seconds < 10
    assert run.code != 0
    assert "[rank 0, " in run.output
    assert "lost another rank" in run.output
    assert "Traceback" not in run.output
