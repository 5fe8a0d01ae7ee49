"""trainer.exact: the same bits on any number of ranks, and through any of them after kills."""

import json
import signal

import pytest
import torch

from tests.conftest import TINY, forked
from tests.own import write_texts
from tests.survive.test_resume import curves, faults, same

EXACT = (
    *("--trainer.exact=true", "--trainer.accelerator=cpu", "--trainer.devices=1"),
    *("--trainer.log_every_n_steps=1", "--run=it"),
)
SCORE = {"class_path": "tests.probes.ByScore"}
EMA = {"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging", "init_args": {"decay": 0.9}}
RUNS = {
    # Batch norm, augmentation, clipping, a kept tail, a plateau schedule, moving averages; 5 steps in an epoch
    "minires": (
        *("fit", "--config=configs/ddp.yaml", *TINY, *EXACT, "--data.source.init_args.train_size=220"),
        *("--data.batch_size=4", "--data.global_batch_size=48", "--data.crop_padding=2", "--trainer.max_epochs=3"),
        *("--trainer.gradient_clip_val=0.5", "--checkpoints.every_n_steps=3", "--trainer.val_check_interval=2"),
        *("--model.lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau", "--model.lr_scheduler.monitor=val/loss"),
        *("--model.lr_scheduler.patience=0", "--model.lr_scheduler.threshold=0.5", "--model.lr_interval=epoch"),
    ),
    # AdamW, dropout, clipping, bf16
    "gpt": (
        *("fit", "--config=configs/gpt.yaml", *EXACT, "--trainer.precision=bf16-mixed", "--trainer.global_batch_size=24"),
        *("--trainer.max_steps=15", "--trainer.val_check_interval=2", "--trainer.gradient_clip_val=0.1"),
        *("--data.init_args.text=../texts", "--data.init_args.held_out=0.2", "--data.init_args.context=32"),
        *("--data.init_args.batch_size=2", "--model.init_args.context=32", "--model.init_args.layers=2"),
        *("--model.init_args.heads=2", "--model.init_args.width=32", "--model.init_args.dropout=0.2"),
        *("--model.init_args.warmup_steps=3", "--checkpoints.every_n_steps=3"),
    ),
    # That of somebody who knows nothing of this: logs and metrics of each kind; a kept tail
    "talkative": (
        *("fit", "--data=tests.own.PointsData", "--model=tests.own.Talkative", "--trainer.max_epochs=3", *EXACT),
        *("--trainer.global_batch_size=24", "--checkpoints.every_n_steps=3", "--data.init_args.size=140"),
        *("--trainer.val_check_interval=2", "--trainer.gradient_clip_val=0.5"),
    ),
}


def plugged(*chosen):
    """What is plugged in beside a run's own, as one word."""
    name, _, value = faults(*chosen).partition("=")
    return f"{name}={json.dumps([*json.loads(value), EMA, SCORE])}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Each run on one rank."""
    place = tmp_path_factory.mktemp("exact")
    write_texts(place / "texts")
    folders = {}

    def once(name):
        if name not in folders:
            folder = folders[name] = place / name
            folder.mkdir()
            done = forked(folder, *RUNS[name], plugged())
            assert done.code == 0, done.output
        return folders[name]

    return once


def assert_same_bits(folder, reference):
    files = [max((run / "lightning_logs/it/checkpoints").glob("*.ckpt")) for run in (folder, reference)]
    checkpoint, expected = (torch.load(file, weights_only=True) for file in files)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "current_model_state", "exact_grids"):
        assert same(checkpoint.get(part), expected.get(part)), part
    assert checkpoint["exact_grids"]
    assert curves(folder) == curves(reference)


# Those that --faults adds are met on the way, below.
OURS = [
    pytest.param(name, ranks, marks=() if (name, ranks) == ("gpt", 3) else pytest.mark.faults)
    for name in ("minires", "gpt")
    for ranks in (2, 3, 4, 6)
]


@pytest.mark.parametrize(("name", "ranks"), [*OURS, pytest.param("talkative", 3, marks=pytest.mark.slow)])
def test_any_number_of_ranks(trained, name, ranks):
    whole = trained(name)
    folder = whole.parent / f"{name}-{ranks}"
    folder.mkdir()
    done = forked(folder, *RUNS[name], plugged(), ranks=ranks)
    assert done.code == 0, done.output
    assert_same_bits(folder, whole)
    kept, expected = (sorted((run / "lightning_logs/it/checkpoints").glob("*.ckpt")) for run in (folder, whole))
    assert [file.name for file in kept] == [file.name for file in expected]
    for file, reference in zip(kept, expected, strict=True):  # within an epoch and at its end
        assert file.read_bytes() == reference.read_bytes(), file.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minires", *(pytest.param(name, marks=pytest.mark.faults) for name in ("gpt", "talkative"))])
def test_killed_on_two_gone_on_with_on_three_on_one_on_six_on_four(trained, name):
    whole = trained(name)
    folder = whole.parent / f"{name}-killed"
    folder.mkdir()
    struck = [
        {"rank": 1, "step": 2, "where": "accumulation"},
        {"rank": 2, "step": 5},
        {"step": 8, "where": "accumulation", "number": int(signal.SIGTERM)},
        {"rank": 5, "step": 11},
    ]
    for ranks, code in ((2, None), (3, None), (1, 143), (6, None), (4, 0)):
        done = forked(folder, *RUNS[name], plugged(*struck), ranks=ranks)
        assert done.code == code if code is not None else done.code != 0, f"{ranks} ranks, {done.code}: {done.output}"
    assert len(list(folder.glob("struck-*"))) == len(struck)
    assert_same_bits(folder, whole)
