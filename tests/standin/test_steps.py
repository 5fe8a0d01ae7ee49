"""A steady step on GPUs: the host waits for no device, and asks it for no more than the network needs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

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


class LogsNumbers(LightningModule):
    """Logs numbers of Python, and gives one beside its loss."""

    capturable = True

    def __init__(self, within: bool = True) -> None:
        super().__init__()
        self.within, self.calls, self.network = within, 0, torch.nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.calls += 1
        if self.within:
            self.log("number", 3.5 * self.global_step, on_step=True, on_epoch=True, prog_bar=True)
            self.log_dict({"most": self.calls, "flag": self.calls > 3}, on_step=True, reduce_fx="max")
        return {"loss": self.network(batch).square().mean(), "calls": self.calls}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("calls", outputs["calls"], on_step=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class PinnedRows(LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(list(torch.ones(240, 4)), batch_size=6, pin_memory=True)


def steady(folder: Path) -> dict[str, float]:
    (file,) = folder.glob("cost-0.json")
    measured: dict[str, float] = json.loads(file.read_text())
    return measured


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.faults), 3])
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


@pytest.mark.slow
def test_a_module_with_prog_bar_and_sync_dist_does_not_either(gpu: Cli, tmp_path: Path) -> None:
    """The loss of LanguageModel is shown on the bar, and reduced over the ranks, in each step."""
    write_texts(tmp_path / "texts")
    run = gpu(*GPT, *TEXTS, STEADY, ranks=3)
    assert run.code == 0, run.output
    assert steady(tmp_path)["milliseconds"] > 0


def test_what_a_bar_shows_is_the_loss_of_the_step_before(gpu: Cli, tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    shown = {"class_path": "tests.standin.steady.Shown"}
    words = (*GPT, *TEXTS, "--trainer.max_steps=8", "--trainer.log_every_n_steps=1")
    run = gpu(*words, "--trainer.callbacks=" + json.dumps([shown]), ranks=2)
    assert run.code == 0, run.output
    numbers = {int(step): value for step, value in json.loads((tmp_path / "shown.json").read_text()).items()}
    logged = [value for _, value in run.events("train/loss")]
    assert [numbers[step] for step in range(2, 9)] == pytest.approx(logged[:7])


NUMBERS = (
    *("fit", "--model=tests.standin.test_steps.LogsNumbers", "--data=tests.standin.test_steps.PinnedRows"),
    *("--trainer.accelerator=gpu", "--trainer.global_batch_size=12", "--trainer.max_epochs=1"),
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_number_that_is_logged_does_not_make_the_host_wait(gpu: Cli, ranks: int) -> None:
    own = [{"class_path": "tests.standin.steady.NoWaits", "init_args": {"first": 12, "last": 18}}]
    words = ("--trainer.log_every_n_steps=19", "--trainer.callbacks=" + json.dumps(own))
    run = gpu(*NUMBERS, *words, ranks=ranks)
    assert run.code == 0, run.output
    assert run.events("number_step") == [(19, 3.5 * 18)]
    assert run.events("number_epoch") == [(20, 3.5 * 9.5)]
    assert run.events("most") == [(19, 38.0 / ranks)]
    assert run.events("calls") == [(19, 37.5 if ranks == 1 else 19.0)]  # the mean of the step's micro-batches
    assert run.events("flag") == [(19, 1.0)]


def test_a_number_beside_the_loss_is_not_repeated_by_a_graph(gpu: Cli) -> None:
    run = gpu(*NUMBERS, "--model.init_args.within=false", "--trainer.capture=auto", "--trainer.log_every_n_steps=1")
    assert run.code == 0, run.output
    assert [value for _, value in run.events("calls")] == [2.0 * step - 0.5 for step in range(1, 21)]
    assert "as training_step gives 'calls', which is not only tensors (int)" in run.output
