"""The same run, killed or not: the same weights to the last bit, the same curve, every sample once."""

import json
import signal
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project.plain_values import plain_values
from project.watch.history import OURS
from tests.conftest import TINY, forked

FIT = (
    *("fit", "--config=configs/ddp.yaml", *(argument for argument in TINY if "network" not in argument)),
    *("--data.source.init_args.train_size=250", "--data.batch_size=8", "--data.global_batch_size=32", "--run=it"),
    *("--data.crop_padding=2", "--trainer.max_epochs=3", "--checkpoints.every_n_steps=3", "--trainer.val_check_interval=5"),
    "--model.network=tests.probes.Dropped",
)
STEPS = 24  # 8 in each epoch, the last of 26 samples


def final(folder: Path, steps: int = STEPS) -> dict:
    with plain_values():
        return torch.load(folder / f"lightning_logs/it/checkpoints/step-{steps:09d}.ckpt", weights_only=True)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What was learned, that is: how fast it went is never the same, and where it ran need not be."""
    events = EventAccumulator(str(folder / "lightning_logs/it")).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith(OURS)]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def same(value: object, expected: object) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(expected, torch.Tensor) and value.dtype == expected.dtype and torch.equal(value, expected)
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(same(value[key], expected[key]) for key in value)
    if isinstance(value, (list, tuple)):
        return len(value) == len(expected) and all(map(same, value, expected))
    return value == expected


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folders = {}

    def run(world_size: int) -> Path:
        if world_size not in folders:
            folders[world_size] = tmp_path_factory.mktemp(f"uninterrupted-{world_size}")
            done = forked(folders[world_size], *FIT, faults(), ranks=world_size)
            assert done.code == 0, done.output
        return folders[world_size]

    return run


def assert_same_run(folder: Path, whole: Path) -> None:
    actual, expected = final(folder), final(whole)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "position"):
        assert same(actual[part], expected[part]), part
    assert curves(folder) == curves(whole)


# where, step
FAULTS = [
    ("accumulation", 4),
    ("step", 6),
    ("validation", 5),
    ("validation", 13),
    ("step", 8),
    ("accumulation", 15),
    ("write", 9),
]


def faults(*chosen: dict) -> str:
    """A command-line word that plugs in probes.Fault, one for each."""
    return "--trainer.callbacks=" + json.dumps(
        [{"class_path": "tests.probes.Record"}, *({"class_path": "tests.probes.Fault", "init_args": init} for init in chosen)]
    )


@pytest.mark.parametrize(("where", "step"), FAULTS)
def test_killed_once(uninterrupted, quick, tmp_path, where, step):
    fault = (faults({"where": where, "step": step}),)
    killed = quick(*FIT, *fault)
    assert killed.code == -signal.SIGKILL, killed.output
    resumed = quick(*FIT, *fault)
    assert resumed.code == 0, resumed.output
    assert_same_run(tmp_path, uninterrupted(1))


SIGNALS, PLACES = (
    (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
    (("accumulation", 3), ("step", 8), ("validation", 5), ("validation", 21)),
)
STOPPED = [
    pytest.param(*place, number, marks=() if at == of else pytest.mark.faults)  # each place once, each signal at least once
    for of, place in enumerate(PLACES)
    for at, number in enumerate(SIGNALS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "step", "number"), STOPPED)
def test_stopped_once(uninterrupted, quick, tmp_path, where, step, number):
    fault = (faults({"where": where, "step": step, "number": int(number)}),)
    stopped = quick(*FIT, *fault)
    assert stopped.code == 128 + number, stopped.output
    newest = max((tmp_path / "lightning_logs/it/checkpoints").glob("*.ckpt"))
    due = where == "validation"
    assert newest.name == f"step-{step + (where == 'accumulation'):09d}{'-validation' * due}.ckpt", stopped.output
    resumed = quick(*FIT, *fault)
    assert resumed.code == 0, resumed.output
    assert_same_run(tmp_path, uninterrupted(1))


def test_stopped_in_the_validation_that_ends_an_epoch(quick, tmp_path):
    """Nothing is left to train in that epoch; the next one is whole."""
    words = [argument for argument in FIT if "val_check_interval" not in argument]
    fault = faults({"where": "validation", "step": 8, "number": int(signal.SIGTERM)})
    assert quick(*words, fault).code == 143
    resumed = quick(*words, fault)
    assert resumed.code == 0, resumed.output
    assert [step for step, _ in curves(tmp_path)["train/loss"]] == list(range(1, STEPS + 1))


def test_with_loader_processes(uninterrupted, quick, tmp_path):
    words = (*FIT, "--data.num_workers=2", faults({"step": 11}))
    assert quick(*words).code == -signal.SIGKILL
    assert quick(*words).code == 0
    assert_same_run(tmp_path, uninterrupted(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "where", "step"), [pytest.param(0, "accumulation", 12, marks=pytest.mark.faults), (1, "validation", 13)]
)
def test_one_rank_of_two_is_killed(uninterrupted, quick, tmp_path, rank, where, step):
    fault = faults({"rank": rank, "where": where, "step": step})
    assert quick(*FIT, fault, ranks=2).code != 0
    resumed = quick(*FIT, fault, ranks=2)
    assert resumed.code == 0, resumed.output
    assert_same_run(tmp_path, uninterrupted(2))
