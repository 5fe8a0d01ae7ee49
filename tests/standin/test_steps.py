"""A steady step on GPUs: the host waits for no device, and asks it for no more than the network needs."""

import json
from pathlib import Path

import pytest

from tests.conftest import Cli
from tests.own import write_texts
from tests.standin.test_runs import DDP, GPT

LONG = (
    "--trainer.max_steps=20",
    "--trainer.max_epochs=100",
    "--trainer.limit_val_batches=0",
    "--trainer.log_every_n_steps=1000",
)
ONE_EPOCH = ("--data.source.init_args.train_size=2048", "--data.global_batch_size=32", *LONG)
COST = {"class_path": "tests.standin.probes.Cost", "init_args": {"first": 12, "last": 18}}
STEADY = "--trainer.callbacks=" + json.dumps([{"class_path": "tests.standin.steady.NoWaits"}, COST])
TEXTS = ("--data.init_args.text=texts", *LONG, "--checkpoints.every_n_steps=1000", "--trainer.global_batch_size=24")


def steady(folder: Path) -> dict[str, float]:
    (file,) = folder.glob("cost-0.json")
    measured: dict[str, float] = json.loads(file.read_text())
    return measured


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("capture", ["none", "auto"])
def test_images_never_make_the_host_wait(gpu: Cli, tmp_path: Path, ranks: int, capture: str) -> None:
    batch = "--data.global_batch_size=48" if ranks == 3 else "--data.global_batch_size=32"
    run = gpu(
        *DDP, *ONE_EPOCH, batch, "--checkpoints.every_n_steps=1000", f"--trainer.capture={capture}",
        STEADY, ranks=ranks,
    )  # fmt: skip
    assert run.code == 0, run.output
    micro_batches = 4 // ranks if ranks < 3 else 2
    assert steady(tmp_path)["launches"] < (12 if capture == "auto" else 150 * micro_batches)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_module_with_prog_bar_and_sync_dist_does_not_either(gpu: Cli, tmp_path: Path, ranks: int) -> None:
    """The loss of LanguageModel is shown on the bar, and reduced over the ranks, in each step."""
    write_texts(tmp_path / "texts")
    run = gpu(*GPT, *TEXTS, STEADY, ranks=ranks)
    assert run.code == 0, run.output
    assert steady(tmp_path)["launches"] > 0


def test_what_a_bar_shows_is_the_loss_of_the_step_before(gpu: Cli, tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    shown = {"class_path": "tests.standin.steady.Shown"}
    words = (*GPT, *TEXTS, "--trainer.max_steps=8", "--trainer.log_every_n_steps=1")
    run = gpu(*words, "--trainer.callbacks=" + json.dumps([shown]), ranks=2)
    assert run.code == 0, run.output
    numbers = {int(step): value for step, value in json.loads((tmp_path / "shown.json").read_text()).items()}
    logged = [value for _, value in run.events("train/loss")]
    assert [numbers[step] for step in range(2, 9)] == pytest.approx(logged[:7])
