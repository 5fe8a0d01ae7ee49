"""One cause of an end, in every place; a user's own frames of a traceback first, and file and line with them."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, Dataset, TensorDataset

from project import Trainer
from project.cli.main import _at
from project.cli.watching import main as watch
from project.errors import UserError
from project.survive.failure import Folded, cause_of
from tests.conftest import Cli, Run
from tests.survive.test_failure import BROKEN, CRAMPED, STUCK
from tests.watch.test_progress import Named

HOST = socket.gethostname()


class Broken(Named):
    """A user's module with a mistake, two calls deep, in the second step."""

    def training_step(self, batch, batch_idx):  # type: ignore[no-untyped-def]
        if batch_idx == 1:
            return self.divided(batch[0])
        return super().training_step(batch, batch_idx)

    def divided(self, points):  # type: ignore[no-untyped-def]
        return self.network(points).sum() / (1 // 0)


class BrokenOnRank1(Broken):
    def divided(self, points):  # type: ignore[no-untyped-def]
        return super().divided(points) if self.global_rank else self.network(points).sum()


class BrokenEvaluation(Named):
    """A user's module with a mistake in the second batch of an evaluation."""

    def validation_step(self, batch, batch_idx):  # type: ignore[no-untyped-def]
        return batch[0] / (1 // (1 - batch_idx))

    test_step = predict_step = validation_step


class Unreadable(Dataset[int]):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        raise self.error


def summary(run: Run) -> dict[str, str]:
    (folder,) = run.runs
    content: dict[str, str] = json.loads((folder / "summary.json").read_text())
    return content


FIT = ("fit", "--run=it", "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.num_sanity_val_steps=0")


def test_a_users_frames_are_shown_and_the_others_counted(quick: Cli) -> None:
    run = quick(*FIT, "--model=tests.survive.test_cause.Broken")
    assert run.code == 1
    shown = run.output[run.output.index("Traceback") :]
    files = re.findall(r'File "(.+?)"', shown)
    assert {Path(file).name for file in files} == {"test_cause.py"}
    assert len(files) == 2
    assert re.search(r"without \d+ frame\(s\) of project, .*lightning.*; --debug true shows them", shown)
    assert "return self.network(points).sum() / (1 // 0)" in shown
    assert shown.rstrip().endswith("ZeroDivisionError: integer division or modulo by zero")
    log = (run.runs[0] / "log.txt").read_text()
    assert "lightning/pytorch/trainer/" in log  # where all of it is
    assert "ERROR   The run has ended after step 1;" in log
    content = summary(run)
    assert content["cause"] == "ZeroDivisionError: integer division or modulo by zero"
    assert re.fullmatch(r".*test_cause\.py, line \d+, in divided", content["where"])
    assert content["traceback"].rstrip().endswith("by zero")
    assert run.output.count(" Run: ") == (run.runs[0] / "life.jsonl").read_text().count('"event": "stop"') == 1
    whole = quick(*FIT, "--run=whole", "--model=tests.survive.test_cause.Broken", "--debug=true")
    assert "lightning/pytorch/trainer/" in whole.output


def test_an_error_in_an_evaluation_names_it_and_its_batch(quick: Cli, tmp_path: Path) -> None:
    run = quick(*FIT, "--model=tests.survive.test_cause.BrokenEvaluation")
    assert run.code == 1
    assert "The run has ended in the validation after step 40, at its batch 2, of samples 4, 5, 6, 7. " in run.output

    def place(verb: str, **settings: Any) -> str:
        trainer = Trainer(default_root_dir=tmp_path, max_steps=2, accelerator="cpu", logger=False, **settings)
        data = DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=4)
        with pytest.raises(ZeroDivisionError):
            getattr(trainer, verb)(BrokenEvaluation(), data, *[data] * (verb == "fit"))
        return _at(trainer)

    assert place("fit") == "in the sanity check after step 0, at its batch 2, of samples 4, 5, 6, 7"
    assert place("fit", num_sanity_val_steps=0).startswith("in the validation after step 2, at its batch 2, of samples 4, ")
    assert place("validate") == "in the validation, at its batch 2, of samples 4, 5, 6, 7"
    assert place("test") == "in the test, at its batch 2, of samples 4, 5, 6, 7"
    assert place("predict") == "in the prediction, at its batch 2, of samples 4, 5, 6, 7"


def test_an_error_of_rank_0_names_its_rank_and_its_step(quick: Cli) -> None:
    run = quick(*FIT, "--model=tests.survive.test_cause.Broken", "--trainer.global_batch_size=8", ranks=2)
    assert run.code == 1
    assert re.search(rf"Processes: rank 0 is \d+ on {HOST}, rank 1 is \d+ on {HOST}; \d+ thread\(s\) each\n", run.output)
    assert re.fullmatch(rf"rank [01] on {HOST} has failed: ZeroDivisionError: integer .*", summary(run)["cause"])
    assert "It failed in step 2. 1 step was done" in (run.runs[0] / "report.html").read_text()


def test_an_error_of_another_rank_is_the_cause(quick: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    run = quick(*FIT, "--model=tests.survive.test_cause.BrokenOnRank1", "--trainer.global_batch_size=8", ranks=2)
    assert run.code == 1
    content = summary(run)
    assert content["cause"] == f"rank 1 on {HOST} has failed: ZeroDivisionError: integer division or modulo by zero"
    assert "in divided" in content["where"]
    assert "test_cause.py" in content["traceback"]
    assert watch([str(run.runs[0]), "--once"]) == 1
    assert content["cause"] in capsys.readouterr().out
    assert "gloo" not in (run.runs[0] / "report.html").read_text()


@pytest.mark.slow
def test_who_is_left_says_what_filled_the_memory_and_what_to_lower(cli: Cli, cgroup: None) -> None:
    words = ("--data.source.train.init_args.on=1", "--data.source.train.init_args.how=hog", "--trainer.devices=2")
    run = cli(*BROKEN, *words, CRAMPED[0], "--trainer.callbacks.rank=1", timeout=STUCK)
    assert run.code == 75
    last = run.output.splitlines()[-1]
    held = r"\(seen last: \d\.\d GiB of its own, the limit of all processes in its cgroup: 0\.5 GiB\)"
    assert re.search(f"and its cgroup reports an OOM kill {held}", last), last
    assert "HINT: it would be killed again: set data.num_workers or data.batch_size lower" in last
    assert "There is no checkpoint yet: then it begins anew." in last
    assert "same command" not in last
    assert "an OOM kill (seen last: " in summary(run)["cause"]


def test_a_traceback_from_a_loader_process_is_folded_too() -> None:
    with pytest.raises(KeyError) as raised:
        list(DataLoader(Unreadable(KeyError("no such sample")), num_workers=1))
    folded = Folded(raised.value)
    assert "torch/utils/data" in folded.whole
    assert "torch/utils/data" not in folded.text
    assert "in __getitem__" in folded.where
    assert "Original Traceback" in folded.text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(2, "No such file", "x.png"), "FileNotFoundError: [Errno 2] No such file: 'x.png'"),
        (KeyError("sky"), "KeyError: 'sky'"),
        (
            UnicodeDecodeError("x", b"\xff", 0, 1, ""),
            "UnicodeDecodeError: 'x' codec can't decode byte 0xff in position 0: ",
        ),
        (UserError("No such sample.\nHINT: none."), "UserError: No such sample."),
        (StopAsyncIteration(), "StopAsyncIteration"),
    ],
)
def test_an_error_in_a_loader_process_is_named_as_it_was_raised(error: Exception, text: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        list(DataLoader(Unreadable(error), num_workers=1))
    assert cause_of(raised.value).text == f"{text} (in a loader process)"


def test_an_error_without_a_frame_of_the_users_keeps_them_all() -> None:
    with pytest.raises(AttributeError) as raised:
        LightningModule.load_from_checkpoint(None)  # type: ignore[arg-type]
    folded = Folded(raised.value.with_traceback(raised.value.__traceback__ and raised.value.__traceback__.tb_next))
    assert (folded.text, folded.where) == (folded.whole, "")


class EvenBatches(Named):
    """Takes an even number of samples, as mixing pairs of images does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert len(batch[0]) % 2 == 0, "an even number, please"
        return super().training_step(batch, batch_idx)


def test_a_micro_batch_of_another_size_says_why(tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, max_steps=4, accelerator="cpu", logger=False, global_batch_size=4)
    with pytest.raises(AssertionError):
        trainer.fit(EvenBatches(), DataLoader(TensorDataset(torch.zeros(9, 4)), batch_size=4))
    where = "after step 2; this rank's last training micro-batch was of samples 8 (1, not 4: the last step"
    assert _at(trainer).startswith(where)
