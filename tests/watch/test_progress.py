"""What a user sees of training: their metrics, the best so far, one numbering of steps, one speed; a bar of 80 columns."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from rich.progress import Progress as Bars
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from project import Trainer
from project.cli.watching import main as watch
from project.watch.curves import Curves
from project.watch.fields import Field, Importance, fitted
from project.watch.progress import Progress, _epoch
from tests.conftest import environment, fork

FIT = ("fit", "--model=tests.watch.test_progress.Named", "--run=it", "--trainer.accelerator=cpu", "--trainer.max_epochs=3")
MONITOR = ("--checkpoints.monitor=recall", "--checkpoints.mode=max", "--trainer.log_every_n_steps=5")
RECALLS = (0.3, 0.8, 0.5)


class Named(LightningModule):
    """A user's module, whose metrics have names of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(4, 1)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.network(batch[0]).square().mean()
        self.log("perplexity", loss.exp(), prog_bar=True)
        self.log("a_rather_long_name_of_a_metric[x]", 3.25, prog_bar=True)
        self.log("quiet", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.log("recall", RECALLS[self.current_epoch % 3])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=4)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)


def test_the_least_important_fields_are_left_out() -> None:
    fields = [
        *(Field(Importance.EPOCH, "epoch 3/9"), Field(Importance.PROGRESS, "step 6/96")),
        *(Field(Importance.METRIC, "first 1.0"), Field(Importance.METRIC, "second 2.0")),
        *(Field(Importance.PHASE, "65% backward"), Field(Importance.PROGRESS, "0:02:07 left")),
    ]
    whole = "epoch 3/9  step 6/96  first 1.0  second 2.0  65% backward  0:02:07 left"
    assert fitted(fields, len(whole)) == whole
    assert fitted(fields, len(whole) - 1) == whole.replace("  65% backward", "")
    assert fitted(fields, 46) == "epoch 3/9  step 6/96  first 1.0  0:02:07 left"
    assert fitted(fields, 24) == "step 6/96  0:02:07 left"


@pytest.mark.parametrize("width", range(40, 100))
def test_a_line_is_never_cut_off(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """rich's columns have spaces between them, which count, too."""
    progress, trainer = Progress(), Trainer(max_steps=20, logger=False, accelerator="cpu", default_root_dir="unused")
    texts = ("loss 1.0000", "zeta 12.609", "666 samples/s", "x" * (width % 9), "0:00:02 left")
    monkeypatch.setattr(progress, "_fields", lambda trainer: [Field(Importance.METRIC, text) for text in texts])
    console = Console(width=width, file=io.StringIO(), force_terminal=True)
    bars = Bars(console=console, auto_refresh=False)
    bars.add_task("", total=20, head="", figures="")
    progress._draw(trainer, bars)
    with console.capture() as shown:
        console.print(bars.get_renderable())
    assert "…" not in shown.get()
    assert len(shown.get().splitlines()) == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The run on a terminal of 80 columns: its folder, what was on the screen, and the log."""
    folder, (outer, inner) = tmp_path_factory.mktemp("it"), pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-m", "project", *FIT, *MONITOR, "--trainer.callbacks=tests.watch.test_progress.Slow"],
        cwd=folder, env=environment(TERM="xterm", COLUMNS="80"), stdout=inner, stderr=inner,
    )  # fmt: skip
    os.close(inner)
    screen = b""
    while True:
        try:
            screen += os.read(outer, 65536)
        except OSError:  # the program has closed its side
            break
    assert run.wait() == 0, screen.decode()
    return folder, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode()), (folder / "lightning_logs/it/log.txt").read_text()


class Slow(Callback):
    """Steps take as long as the bar needs to be drawn now and then."""

    def on_train_batch_end(self, *args: object) -> None:
        time.sleep(0.02)


def test_a_bar_fits_80_columns(trained: tuple[Path, str, str]) -> None:
    lines = [line for line in re.split(r"[\r\n]+", trained[1]) if re.match(r"(epoch \d/3  )?step \d+/120", line)]
    assert lines
    assert {len(line.rstrip()) <= 80 for line in lines} == {True}
    later = lines[-1]
    for field in ("epoch 3/3", "step 120/120", "perplexity 1.", "left"):
        assert field in later, later


def test_metrics_of_any_name_are_shown(trained: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, screen, text = trained
    assert "recall 0.8000  best recall 0.8000" in text
    assert "recall 0.5000  best recall 0.8000" in text
    assert "recall 0.500" in screen
    assert watch([str(folder / "lightning_logs/it"), "--once"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    for field in ("step 120/120", "perplexity 1.", "quiet ", "recall 0.5", "best recall 0.8 at step 80", "finished"):
        assert field in line, line


def test_all_curves_number_their_steps_alike(trained: tuple[Path, str, str], tmp_path: Path) -> None:
    """A step has the number of steps that are done with it, as `trainer.global_step` has it then, and a checkpoint."""
    curves = Curves(trained[0] / "lightning_logs/it").read()
    steps = {tag: [point.step for point in points] for tag, points in curves.items()}
    assert steps["perplexity"] == steps["quiet"] == [*range(5, 121, 5)]
    assert {*steps["train/grad_norm"]} <= {*steps["quiet"]}
    assert steps["recall"] == [40, 80, 120]

    logger = CSVLogger(tmp_path)  # a user's own receives Lightning's numbers
    Trainer(
        max_steps=10,
        logger=logger,
        log_every_n_steps=5,
        default_root_dir=tmp_path,
        accelerator="cpu",
        enable_progress_bar=False,
    ).fit(Named())
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    at = rows[0].split(",").index("step")
    assert [row.split(",")[at] for row in rows[1:]] == ["4", "9"]


def test_there_is_one_speed(trained: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, text = trained
    summary = json.loads((folder / "lightning_logs/it/summary.json").read_text())
    printed = re.findall(r"samples/s \(median window ([\d,]+)\)", text)
    watch([str(folder / "lightning_logs/it"), "--once"])
    watched = re.findall(r"([\d,]+) samples/s", capsys.readouterr().out)
    assert printed == watched == [f"{summary['samples_per_s']:,.0f}"]
    assert summary["best"] == {"value": pytest.approx(0.8), "step": 80}
    line = re.search(r"training +120 steps, 480 samples in ([\d.]+) s: ([\d,]+) samples/s", text)
    assert line, text
    assert float(line[2].replace(",", "")) == pytest.approx(480 / float(line[1]), rel=0.02), "what the line itself says"


def test_a_metric_of_an_earlier_epoch_is_marked_and_epochs_count_from_1(trained: tuple[Path, str, str]) -> None:
    _, screen, text = trained
    assert re.findall(r"(epoch \d\S*)  step (\d+)  recall", text) == [
        ("epoch 1/3", "40"),
        ("epoch 2/3", "80"),
        ("epoch 3/3", "120"),
    ]
    bar = [line for line in re.split(r"[\r\n]+", screen) if re.match(r"(epoch \d/3  )?step \d+/120", line)]
    marked = {match[1] for line in bar for match in re.finditer(r"(?<!best )((?:last )?recall) 0\.", line)}
    assert marked == {"last recall"}, bar
    assert not any("last perplexity" in line for line in bar), "each step logs it"


def test_the_last_frame_shows_the_epoch_in_which_the_run_ends(tmp_path: Path) -> None:
    shown = []

    class Last(Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: LightningModule) -> None:
            shown.append(_epoch(trainer))

    for steps in (60, 80):
        settings: dict[str, Any] = {"max_epochs": 9, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        Trainer(max_steps=steps, default_root_dir=tmp_path, callbacks=[Last()], **settings).fit(Named())
    assert shown == ["epoch 2/9", "epoch 2/9"]


def test_warnings_have_a_colour_on_a_terminal_alone(tmp_path: Path) -> None:
    def on_terminal(**extra: str) -> bytes:
        outer, inner = pty.openpty()
        words = ("project.__main__:main", tmp_path, "fit", "--config=nope.yaml")
        run = fork(*words, output=Path(os.ttyname(inner)), TERM="xterm", **extra)
        run.join()
        assert run.exitcode == 2
        return os.read(outer, 65536)

    assert b"\x1b[1;31mERROR  \x1b[0m There is no config" in on_terminal()
    assert b"\x1b[" not in on_terminal(NO_COLOR="1")


class OwnRate(torch.optim.SGD):
    """Has no learning rate in its groups, and finds one by itself, as Adafactor does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.param_groups[0]["lr"] = None

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 0.01
        loss = super().step(closure)
        self.param_groups[0]["lr"] = None
        return loss


class NoRate(Named):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OwnRate(self.parameters())


def test_an_optimiser_without_a_learning_rate_is_trained_and_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for steps in (20, 60):
        trainer = Trainer(default_root_dir=tmp_path, max_steps=steps, accelerator="cpu", log_every_n_steps=5)
        trainer.fit(NoRate(), ckpt_path="last")
        assert trainer.global_step == steps
    curves = Curves(tmp_path).read()
    assert "speed/samples_per_s" in curves
    assert "run/lr" not in curves
    assert "The learning rate is 0" not in caplog.text


class Left(Callback):
    text: list[str]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        progress = trainer.progress_bar_callback
        assert isinstance(progress, Progress)
        self.text = progress._left(trainer)


def test_no_more_time_is_left_than_the_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand hours, by its steps."""
    monkeypatch.chdir(tmp_path)
    left = Left()
    trainer = Trainer(
        max_epochs=10**9, max_time="00:00:00:02", limit_val_batches=0, callbacks=[left], logger=False, accelerator="cpu"
    )
    trainer.fit(Named())
    assert left.text in (["0:00:00 left"], ["0:00:01 left"])
