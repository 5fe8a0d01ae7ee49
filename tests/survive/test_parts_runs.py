"""Sharded runs that are killed, damaged and moved: on as many ranks or others, from DDP and back, the same to the last bit."""

import functools
import json
import signal
from pathlib import Path

import pytest
import torch

from project.checkpoints.reading import SafeCheckpointIO
from project.errors import UserError
from project.plain_values import plain_values
from project.trainer import Trainer
from tests.conftest import TINY, forked
from tests.survive.test_resume import curves, faults, same

# A global batch for 1, 2, 3 and 4 ranks; weights that three and four ranks don't divide.
FIT = (
    *("fit", "--config=configs/ddp.yaml", *TINY, "--data.source.init_args.train_size=250", "--run=it"),
    *("--data.batch_size=4", "--data.global_batch_size=48"),
    *("--data.crop_padding=2", "--trainer.max_epochs=3", "--checkpoints.every_n_steps=3", "--trainer.val_check_interval=4"),
)
WORDS = [argument for argument in FIT[1:] if "run=" not in argument]
STEPS = 15  # 5 in each epoch
SHARDED, DDP, EXACT = "--trainer.strategy=sharded", "--trainer.strategy=ddp", "--trainer.exact=true"
LEARNED = ("state_dict", "optimizer_states", "lr_schedulers", "position")
AVERAGE = {"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging", "init_args": {"decay": 0.8}}


def checkpoint(folder: Path) -> Path:
    """The newest."""
    return max((folder / "lightning_logs/it/checkpoints").glob("step-*.ckpt"))


def final(folder: Path) -> dict:
    state = SafeCheckpointIO().load_checkpoint(checkpoint(folder))
    assert state["position"]["global_step"] == STEPS
    return state


def assert_same(folder: Path, reference: Path, parts: tuple[str, ...] = LEARNED) -> None:
    actual, expected = final(folder), final(reference)
    for part in parts:
        assert same(actual[part], expected[part]), part
    assert curves(folder) == curves(reference)


def with_average(fault: str) -> str:
    option, _, callbacks = fault.partition("=")
    return f"{option}={json.dumps([AVERAGE, *json.loads(callbacks)])}"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    @functools.cache
    def run(ranks: int, *words: str) -> Path:
        folder = tmp_path_factory.mktemp(f"uninterrupted-{ranks}")
        done = forked(folder, *FIT, *(words or (SHARDED, faults())), ranks=ranks)
        assert done.code == 0, done.output
        return folder

    return run


@pytest.fixture
def linked(uninterrupted, tmp_path):
    """A run of three ranks, which lies in this test's folder, too."""
    run = uninterrupted(3)
    (tmp_path / "lightning_logs").mkdir()
    (tmp_path / "lightning_logs/it").symlink_to(run / "lightning_logs/it")
    return run


def test_a_folder_that_not_all_hosts_see_is_refused(tmp_path, monkeypatch):
    for name, value in (("NODE_RANK", "0"), ("NNODES", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"trainer\.shared_folder=false has none"):
        Trainer(accelerator="cpu", strategy="sharded", num_nodes=2, devices=1, shared_folder=False, default_root_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "where", "step", "number"),
    [
        pytest.param(3, "step", 8, signal.SIGKILL, marks=pytest.mark.faults),  # as in test_recovery.py, on three ranks, too
        pytest.param(3, "step", 7, signal.SIGTERM, marks=pytest.mark.faults),
        pytest.param(2, "accumulation", 7, signal.SIGKILL, marks=pytest.mark.faults),
        pytest.param(3, "write", 6, signal.SIGKILL, marks=pytest.mark.faults),
        pytest.param(3, "validation", 9, signal.SIGKILL, marks=pytest.mark.faults),
    ],
)
def test_struck_and_resumed_on_as_many_ranks(uninterrupted, quick, tmp_path, ranks, where, step, number):
    """Within an epoch, too: the samples are those that would have come."""
    fault = faults({"rank": ranks - 1, "where": where, "step": step, "number": int(number)})
    struck = quick(*FIT, SHARDED, fault, ranks=ranks)
    assert struck.code == 143 if number == signal.SIGTERM else struck.code != 0, struck.output
    assert checkpoint(tmp_path).is_dir()
    resumed = quick(*FIT, SHARDED, fault, ranks=ranks)
    assert resumed.code == 0, resumed.output
    assert "Resumes from" in resumed.output
    assert_same(tmp_path, uninterrupted(ranks))


@pytest.mark.faults
def test_the_world_shrinks_and_grows(uninterrupted, quick, tmp_path):
    places = [(3, 4), (2, 7), (4, 8), (1, 11), (2, 13)]  # ranks, step
    for ranks, step in places:
        struck = quick(*FIT, SHARDED, EXACT, faults({"rank": ranks - 1, "step": step}), ranks=ranks)
        assert struck.code != 0
    resumed = quick(*FIT, SHARDED, EXACT, faults(), ranks=3)
    assert resumed.code == 0, resumed.output
    assert_same(tmp_path, uninterrupted(1, DDP, EXACT, faults()))


@pytest.mark.slow
def test_from_ddp_and_back_with_an_average_of_the_weights(uninterrupted, quick, tmp_path):
    for ranks, strategy, step in ((2, DDP, 3), (3, SHARDED, 6), (2, DDP, 9), (2, SHARDED, 12)):
        fault = with_average(faults({"rank": ranks - 1, "where": "saved", "step": step}))
        struck = quick(*FIT, strategy, EXACT, fault, ranks=ranks)
        assert struck.code != 0
        assert checkpoint(tmp_path).is_dir() == (strategy == SHARDED), struck.output
    resumed = quick(*FIT, SHARDED, EXACT, with_average(faults()), ranks=3)
    assert resumed.code == 0, resumed.output
    averaged = uninterrupted(1, DDP, EXACT, with_average(faults()))
    assert_same(tmp_path, averaged, (*LEARNED, "current_model_state", "averaging_state"))


@pytest.mark.slow
def test_a_lost_part_is_named_and_the_one_before_is_taken(uninterrupted, quick, tmp_path):
    fault = faults({"rank": 1, "where": "step", "step": 8})
    assert quick(*FIT, SHARDED, fault, ranks=2).code != 0
    name = checkpoint(tmp_path).name
    (checkpoint(tmp_path) / "part-00001-of-00002.pt").unlink()
    resumed = quick(*FIT, SHARDED, fault, ranks=2)
    assert resumed.code == 0, resumed.output
    assert "part-00001-of-00002.pt, which rank 1 on" in resumed.output
    assert f"is missing. It is set aside as {name}.bad" in resumed.output
    assert_same(tmp_path, uninterrupted(2))


@pytest.mark.faults
def test_other_verbs_take_a_folder(linked, quick, tmp_path):
    saved = checkpoint(linked)
    figures = []
    for ranks, strategy in ((1, DDP), (2, SHARDED), (3, SHARDED)):
        done = quick("test", *WORDS, strategy, EXACT, f"--ckpt_path={saved}", f"--run=test-{ranks}", ranks=ranks)
        assert done.code == 0, done.output
        (report,) = (tmp_path / f"lightning_logs/test-{ranks}").glob("test*.json")
        figures.append(json.loads(report.read_text())["metrics"])
    assert figures[0] == figures[1] == figures[2]

    done = quick("export", *WORDS, "--run=it", "--ckpt_path=last", "--to=safetensors", "--out=weights")
    assert done.code == 0, done.output
    begun = quick(
        "fit", *WORDS, f"--model.init_from={saved}", "--model.init_prefix=network.", "--run=begun", "--trainer.max_steps=1"
    )
    assert begun.code == 0, begun.output
    assert "tensors begin as in" in begun.output


@pytest.mark.faults
def test_one_file_of_it_goes_on_as_the_folder_does(linked, quick, tmp_path):
    done = quick("export", *WORDS, "--run=it", "--ckpt_path=last", "--to=checkpoint", "--out=one")
    assert done.code == 0, done.output
    (file,) = (tmp_path / "one").glob("*.ckpt")
    with plain_values():
        assert same(torch.load(file, weights_only=True), final(linked))
    for name, source, strategy, ranks in (("a", file, DDP, 1), ("b", checkpoint(linked), DDP, 1), ("c", file, SHARDED, 2)):
        arguments = (f"--run={name}", f"--resume={source}", strategy, EXACT, "--trainer.max_epochs=4", "--change=trainer.exact")
        done = quick("fit", *WORDS, *arguments, ranks=ranks)
        assert done.code == 0, done.output
    ends = [max((tmp_path / f"lightning_logs/{name}/checkpoints").glob("*.ckpt")) for name in "abc"]
    checkpoints = [SafeCheckpointIO().load_checkpoint(path) for path in ends]
    assert checkpoints[0]["position"]["global_step"] == 20
    for part in LEARNED:
        assert same(checkpoints[0][part], checkpoints[1][part]), part
        assert same(checkpoints[0][part], checkpoints[2][part]), part
