"""One rank fails: all end, and what is printed last is that rank's error, once."""

import json
import re
import socket

import pytest

from project.cli.watching import main as watch
from tests.conftest import TINY, since_struck, took

HOST = socket.gethostname()

pytestmark = pytest.mark.slow

SOON = 30
"""Seconds within which all have ended. Alone it takes five to seven; without what is tested, at least a minute."""
STUCK = 240
"""Seconds after which a run that would never end counts as stuck: ten times what one takes beside another test."""

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


CRAMPED = ("--trainer.callbacks=tests.probes.Cramped", "--trainer.callbacks.rank=0")


@pytest.mark.parametrize("on", [pytest.param(0, marks=pytest.mark.faults), 1, pytest.param(99, marks=pytest.mark.faults)])
def test_the_error_is_printed_once_and_last(cli, on):
    run = cli(*BROKEN, f"--data.source.train.init_args.on={on}", "--trainer.devices=2", timeout=STUCK)
    assert run.code == 1
    assert run.output.count("KeyError: 'this dataset is broken'") == 1
    assert run.output.count("Traceback") == 1
    assert run.output.rstrip().endswith("KeyError: 'this dataset is broken'")
    assert f"ERROR   [rank {on % 99}, {HOST}] " in run.output
    assert_ended_soon(run)


@pytest.mark.parametrize("on", [0, pytest.param(1, marks=pytest.mark.faults)])
def test_connections_that_can_not_be_closed_keep_nobody(quick, on):
    """Every rank ends with its own code, and soon."""
    never = "--trainer.callbacks=tests.probes.ClosesNever"
    run = quick(*BROKEN, f"--data.source.train.init_args.on={on}", never, ranks=2, timeout=STUCK)
    assert run.code == 1
    assert run.output.count("\nKeyError: 'this dataset is broken'") == 1
    assert run.output.count("Traceback") == 1
    assert_ended_soon(run)


def test_nor_one_that_has_finished(quick):
    never = "--trainer.callbacks=tests.probes.ClosesNever"
    run = quick("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.max_steps=2", never, ranks=2, timeout=STUCK)
    assert run.code == 0, run.output
    assert run.output.rstrip().splitlines()[-1].endswith("report.html")


def deaf(*extra_probes, **how):
    """Three ranks whose connections are not closed: one fails, and the others would not notice if they were."""
    probes = [("ClosesNever", {}), ("Deaf", how), *extra_probes]
    callbacks = json.dumps([{"class_path": f"tests.probes.{name}", "init_args": words} for name, words in probes])
    sizes = "--data.batch_size=8", "--data.global_batch_size=24"
    return "fit", "--config=configs/ddp.yaml", *TINY, *sizes, f"--trainer.callbacks={callbacks}"


@pytest.mark.parametrize(
    ("launcher", "on"),
    [
        pytest.param("python", 1, marks=pytest.mark.faults),
        pytest.param("torchrun", 0, marks=pytest.mark.faults),
        ("torchrun", 1),
    ],
)
def test_ranks_that_wait_for_a_device_are_told_of_a_failure_and_end(cli, launcher, on):
    """Stands for NCCL: who waits for its device sees no closed connection."""
    launched = {"torchrun": 3} if launcher == "torchrun" else {}
    run = cli(*deaf(rank=on), *([] if launched else ["--trainer.devices=3"]), timeout=STUCK, **launched)
    seconds = since_struck(run.folder)
    took(f"rank {on} of 3 fails, and the others wait for a device, {launcher}: all have ended after", seconds)
    assert run.code == 1
    assert run.output.count(f"lost another rank: rank {on} on {HOST} has failed: KeyError: 'this device is broken'") == 1
    assert f"[rank {1 if on == 0 else 0}, {HOST}] lost another rank" in run.output
    assert f"ERROR   [rank {on}, {HOST}] " in run.output
    assert seconds < SOON


def test_a_checkpoint_that_is_being_written_is_waited_for(quick):
    words = deaf(("SlowDisk", {"seconds": 9.0}), rank=1, step=4)
    run = quick(*words, "--checkpoints.every_n_steps=3", ranks=3, timeout=STUCK)
    assert run.code == 1
    assert run.output.count("lost another rank: rank 1") == 1
    assert [file.name for file in run.folder.glob("lightning_logs/*/checkpoints/*.ckpt")] == ["step-000000003.ckpt"]


@pytest.mark.faults
def test_a_rank_0_that_is_slow_to_end_is_not_killed_for_the_failure_of_another(cli):
    """Lightning's observer sends a SIGKILL some time after a launched rank has failed; the exit code would be 137."""
    slow = "--trainer.callbacks=tests.probes.SlowToEnd"
    run = cli(*BROKEN, "--data.source.train.init_args.on=1", "--trainer.devices=2", slow)
    assert run.code == 1
    assert run.output.rstrip().endswith("KeyError: 'this dataset is broken'")


def assert_ended_soon(run):
    """Within seconds of the exception, all of it."""
    seconds = since_struck(run.folder)
    took("an error on one rank: all have ended after", seconds)
    assert seconds < SOON


def test_a_rank_that_waits_for_rank_0_ends_when_that_has_refused(cli, tmp_path):
    """torchrun's agent killed it after half a minute: while it waited to be connected, it could note no signal."""
    (tmp_path / "foreign.ckpt").write_bytes(b"of somebody else")
    run = cli("fit", "--config=configs/ddp.yaml", f"--resume={tmp_path / 'foreign.ckpt'}", torchrun=2, timeout=STUCK)
    assert "its manifest can't be read" in run.output
    assert "Sending process" in run.output
    assert "forcefully exiting" not in run.output


def test_torchrun_prints_the_error_of_the_rank_that_failed(cli):
    """And a loader process tells its rank, which says so with its name and host."""
    run = cli(*BROKEN, "--data.source.train.init_args.on=1", "--data.num_workers=1", torchrun=2, timeout=STUCK)
    assert_ended_soon(run)
    assert run.code == 1
    last = run.output.rpartition("Root Cause")[2]
    assert "KeyError: 'this dataset is broken'" in last
    assert f"rank 1, {HOST}: " in last
    assert run.output.count("KeyError: 'this dataset is broken'") <= 2  # in one line of ours, and in torchrun's last word


@pytest.mark.faults
def test_an_error_in_a_loader_process_is_its_ranks(cli):
    run = cli(*BROKEN, "--data.source.train.init_args.on=1", "--data.num_workers=1", "--trainer.devices=2", timeout=STUCK)
    assert_ended_soon(run)
    assert run.code == 1
    assert run.output.count("KeyError: 'this dataset is broken'") == 1
    assert run.output.rstrip().endswith("KeyError: 'this dataset is broken'")
    assert f"ERROR   [rank 1, {HOST}] " in run.output
    assert "Caught KeyError in DataLoader worker process" in run.output


@pytest.mark.parametrize(
    ("how", "what"),
    [
        pytest.param("kill", "was killed by signal 9. HINT: ", marks=pytest.mark.faults),  # as "hog"
        ("hog", "was killed by signal 9, and its cgroup reports an OOM kill. HINT: "),
        ("exit", "has ended.* no error; if it had one, that stands above. HINT: "),
    ],
)
def test_a_loader_process_that_is_killed_is_named_and_not_the_network(quick, how, what, cgroup):
    """It ends while the network computes, and there torch raises its error."""
    words = ("--data.source.train.init_args.on=0", "--data.source.train.init_args.at=255", "--data.num_workers=1")
    words += (f"--data.source.train.init_args.how={how}",)
    words += CRAMPED if how == "hog" else ()
    broken = (argument for argument in BROKEN if ".network" not in argument)
    run = quick(*broken, *words, "--model.network=tests.probes.Slow", timeout=STUCK)
    assert run.code == 1
    assert "Traceback" not in run.output
    assert re.search(f"ERROR   Loader process \\d+ of this rank {what}.*$", run.output.rstrip()), run.output


def test_a_rank_that_is_killed_ends_the_others_which_say_so(cli, capsys):
    words = ("--data.source.train.init_args.on=1", "--data.source.train.init_args.how=kill", "--trainer.devices=3")
    run = cli(*BROKEN, "--data.global_batch_size=24", *words, timeout=STUCK)
    seconds = since_struck(run.folder)
    took("SIGKILL of rank 1 of 3: all have ended after", seconds)
    assert seconds < SOON
    assert run.code == 75
    assert run.output.count(f"rank 1 on {HOST} was killed by signal 9.") == 2  # its warden, and rank 0, which is the last
    why = f"rank 1 on {HOST} was killed by signal 9."
    last = f"[rank 0, {HOST}] lost another rank: {why} There is no checkpoint yet: the same command begins anew."
    assert last in run.output.splitlines()[-1]
    assert run.output.count("lost another rank") == 1
    assert "Traceback" not in run.output
    (folder,) = run.runs
    life, report = (folder / "life.jsonl").read_text(), (folder / "report.html").read_text()
    assert json.loads(life.splitlines()[-1])["why"] == json.loads((folder / "summary.json").read_text())["cause"] == why
    assert report.count(why[:-1]) >= 2  # the state, and the red mark
    assert watch([str(folder), "--once"]) == 1
    assert f"failed: {why[:-1]}" in capsys.readouterr().out
    assert "Connection closed" not in report + life


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.faults), 2])
def test_rank_0_is_killed_for_memory(cli, cgroup, ranks):
    """It launched the others, and they end with it: nobody is left to say so but its warden."""
    words = ("--data.source.train.init_args.on=0", "--data.source.train.init_args.how=hog", f"--trainer.devices={ranks}")
    run = cli(*BROKEN, *words, *CRAMPED, timeout=STUCK)
    took(f"the kernel kills rank 0 of {ranks} for memory: all have ended after", since_struck(run.folder))
    assert run.code == -9
    assert run.output.count("was killed by") == 1
    last = run.output.rstrip().splitlines()[-1]
    assert last.startswith(f"rank 0 on {HOST} was killed by signal 9, and its cgroup reports an OOM kill (seen last: ")
    assert last.endswith("grows from step to step. There is no checkpoint yet: it will begin anew.")


def test_no_compiler_is_one_message(quick, tmp_path):
    """As in an image without one."""
    words = ("--config=configs/ddp.yaml", *TINY, "--model.compile=default")
    run = quick("fit", *words, PATH="/nowhere", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    assert run.code == 1
    assert run.output.splitlines()[-1].endswith("or set model.compile=none.")
    assert "Traceback" not in run.output
