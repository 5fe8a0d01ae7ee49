"""What is drawn at random is a function of the run, wherever it is drawn."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from project import Trainer
from project.data.dealing import chance_kept
from project.errors import UserError
from tests.conftest import forked
from tests.own import PointsData, Regression
from tests.survive.test_resume import same
from tests.train.chancy import Moody
from tests.train.test_own import OFTEN, newest, seen

RUN = ("fit", "--trainer.max_epochs=3", "--trainer.global_batch_size=12", *OFTEN)
DRAWING = (*RUN, "--model=tests.train.chancy.Drawing", "--data=tests.train.chancy.DrawnData")
EXACT = "--trainer.exact=true"


def killed(step: int) -> str:
    how = f'{{"rank": 0, "step": {step}, "where": "step", "number": {int(signal.SIGKILL)}}}'
    return f'--trainer.callbacks=[{{"class_path": "tests.probes.Fault", "init_args": {how}}}]'


@pytest.fixture
def learned(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Trains in a folder by name, again where it was killed, and returns the weights."""

    def run(folder: str, *words: str, ranks: int = 1) -> dict[str, Any]:
        (tmp_path / folder).mkdir()
        run = forked(tmp_path / folder, *words, ranks=ranks)
        if any("Fault" in argument for argument in words):
            assert run.code not in (0, 1), run.output
            run = forked(tmp_path / folder, *words, ranks=ranks)
        assert run.code == 0, run.output
        assert "drawn outside" not in run.output
        weights: dict[str, Any] = newest(tmp_path / folder)["state_dict"]
        return weights

    return run


def test_it_is_the_same_on_any_number_of_ranks_after_a_kill_and_with_loader_processes(
    learned: Callable[..., dict[str, Any]],
) -> None:
    whole = learned("whole", *DRAWING, EXACT)
    assert same(learned("processes", *DRAWING, EXACT, "--data.init_args.num_workers=2"), whole)
    assert same(learned("ranks", *DRAWING, EXACT, ranks=3), whole)
    assert same(learned("killed", *DRAWING, EXACT, killed(step=6)), whole)


def test_a_sampler_of_its_own_draws_the_same_order_where_a_run_resumes_at_an_epoch(
    learned: Callable[..., dict[str, Any]],
) -> None:
    weighted = (*DRAWING, "--data.init_args.sampler=weighted", "--checkpoints.every_n_steps=null")
    assert same(learned("killed", *weighted, killed(step=6)), learned("whole", *weighted))


def test_ranks_take_the_seed_of_rank_0s_generator(learned: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    learned("ranks", *DRAWING, "--data.init_args.sampler=ranks", ranks=2)
    assert sum(map(len, seen(tmp_path / "ranks").values())) == 3 * 47


def test_strings_have_the_same_hash_in_each_process() -> None:
    program = "from project.__main__ import hash_alike; hash_alike(); print(hash('x'))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    runs = [
        subprocess.run([sys.executable, "-c", program], env=environment, text=True, capture_output=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_drawn_outside_any_hook_is_reported(tmp_path: Path, exact: bool) -> None:
    logger = '--trainer.logger={"class_path": "tests.train.chancy.Moody", "init_args": {"save_dir": "."}}'
    words = (*RUN, "--model=tests.own.Regression", "--data=tests.own.PointsData", logger)
    run = forked(tmp_path, *words, *([EXACT] if exact else []))
    assert run.code == int(exact), run.output
    assert run.output.count("(random) were drawn outside any hook, between ") == 1
    assert ("trainer.exact can't be kept: random numbers" in run.output) == exact


def test_what_a_script_draws_between_two_verbs_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second network, say. What a logger draws in a later fit is reported all the same."""
    monkeypatch.chdir(tmp_path)
    at = {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=1, global_batch_size=12, exact=True, **at)
    trainer.fit(Regression(), datamodule=PointsData())
    trainer.validate(Regression(), datamodule=PointsData(), verbose=False)
    torch.rand(1)
    trainer.fit_loop.max_epochs, trainer.loggers = 2, [Moody(tmp_path)]
    with pytest.raises(UserError, match=r"random numbers \(random\) were drawn outside any hook"):
        trainer.fit(Regression(), datamodule=PointsData())


def test_a_script_draws_what_it_would_without_the_verbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else each trial of a search, or each member of an ensemble, is the second one again."""
    monkeypatch.chdir(tmp_path)

    def drawn(verb: str | None) -> list[float]:
        seed_everything(5, verbose=False)
        numbers: list[float] = []
        for trial in range(3):
            numbers += [random.random(), np.random.rand(), float(torch.rand(()))]
            module, data = Regression(), PointsData()
            if verb:
                at = {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path / f"{verb}-{trial}", "logger": False}
                trainer = Trainer(max_epochs=1, limit_val_batches=1, enable_progress_bar=False, **at)
                getattr(trainer, verb)(module, datamodule=data)
                if verb == "fit":
                    with chance_kept():
                        torch.rand(1)
                        trainer.save_checkpoint(tmp_path / "saved.ckpt")
        return numbers

    assert drawn("fit") == drawn("validate") == drawn(None)
    assert "outside any hook" not in caplog.text
