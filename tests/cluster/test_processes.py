"""Real processes: the same run on one and on two."""

import json
import socket
from collections import Counter

import pytest

from tests.cluster.machine import wait_until
from tests.conftest import TINY, forked

FIT = (
    "fit",
    "--config=configs/ddp.yaml",
    *TINY,
    "--data.batch_size=8",
    "--data.global_batch_size=32",
    "--trainer.max_epochs=2",
)
RECORD = "--trainer.callbacks=tests.probes.Record"


def records(folder, world_size):
    return [json.loads((folder / f"record-{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run on one process: what every other must equal."""
    folder = tmp_path_factory.mktemp("alone")
    run = forked(folder, *FIT, RECORD, "--data.source.init_args.train_size=250")
    assert run.code == 0, run.output
    return run


def test_two_processes_make_the_same_run_as_one(alone, cli):
    words = (*FIT, RECORD, "--trainer.callbacks+=tests.probes.Threads", "--data.source.init_args.train_size=250")
    run = cli(*words, "--trainer.devices=2")
    assert run.code == 0, run.output
    assert "1 host x 2 processes x micro-batch 8 x accumulation 2 = global batch 32" in run.output
    assert run.output.count("global batch") == 1  # nothing is printed by every rank

    (reference,), ranks = records(alone.folder, 1), records(run.folder, 2)
    for step, samples in reference["steps"].items():
        assert Counter(samples) == Counter(ranks[0]["steps"][step] + ranks[1]["steps"][step])
    assert [len(samples) for samples in reference["steps"].values()] == [32] * 7 + [26] + [32] * 7 + [26]

    # Each validation counts every sample once, though 101 is odd.
    assert Counter(reference["evaluated"]) == Counter(ranks[0]["evaluated"]) + Counter(ranks[1]["evaluated"])
    assert set(reference["evaluated"].values()) == {2}
    assert len(reference["evaluated"]) == 101

    # Gradients travel once a step: not in the micro-batches that only accumulate.
    for record in ranks:
        assert [count > 0 for count in record["reductions"]] == [False, True] * 16

    # Gloo's have ended before Python does: one that outlives it may abort the process (pytorch#190489).
    wait_until(lambda: len([*run.folder.glob("threads-*.txt")]) == 2, 60, "both ranks at their ends")
    threads = [file.read_text() for file in run.folder.glob("threads-*.txt")]
    assert not any("gloo" in names for names in threads)

    expected, losses = alone.curve("train/loss"), run.curve("train/loss")
    assert losses.keys() == expected.keys() == set(range(1, 17))
    assert max(abs(expected[step] - losses[step]) for step in expected) < 1e-4
    assert alone.curve("train/lr") == run.curve("train/lr")


def test_independent_copies_are_refused(quick):
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    run = quick(*FIT, "--trainer.strategy=single_device", TORCHELASTIC_RUN_ID="it", MASTER_ADDR="127.0.0.1", **ranks)
    assert run.code != 0
    assert "torchrun started 2 processes" in run.output
    assert "HINT: set trainer.strategy=ddp" in run.output


def test_fewer_validation_samples_than_ranks(quick):
    run = quick(*FIT, "--data.source.init_args.val_size=1", "--trainer.max_epochs=1", ranks=2)
    assert run.code == 0, run.output
    assert "val/acc" in run.output


def test_debugging_leaves_a_log_for_each_rank(quick):
    run = quick(*FIT, "--trainer.max_steps=1", "--debug=true", ranks=2)
    assert run.code == 0, run.output
    (folder,) = run.runs
    assert "is rank 1 of 2" in (folder / "rank-1.log").read_text()
    assert (folder / "rank-0.log").exists()


def test_a_port_in_use_is_one_line(cli):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run = cli(*FIT, "--trainer.devices=2", MASTER_PORT=port, MASTER_ADDR="127.0.0.1")
    assert run.code == 1
    assert f"Port {port} on " in run.output
    assert "is in use by another program" in run.output
    assert "Traceback" not in run.output
