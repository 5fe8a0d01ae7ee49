"""A checkpoint that is saved within a step is one of its beginning: a run that resumes takes the whole step again."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from project import Trainer
from tests.conftest import Cli
from tests.own import Points
from tests.survive.within import Counting, Dumps, plain


class Stream(IterableDataset[Any]):
    """Points of which nobody knows how many there are."""

    def __iter__(self) -> Any:
        return (Points(22)[index] for index in range(22))


class OnSlowPath(Counting):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


def fitted(folder: Path, module: Counting, *callbacks: Any, resume: Any = None, stream: bool = False, **settings: Any) -> Any:
    """Returns what a fit leaves: states, metrics, and the values of its last epoch."""
    settings |= {"accumulate_grad_batches": 3} if stream else {"global_batch_size": 6}
    trainer = Trainer(
        default_root_dir=folder, accelerator="cpu", logger=False, max_epochs=2, callbacks=[*callbacks], **settings
    )
    trainer.fit(module, DataLoader(Stream() if stream else Points(22), batch_size=2), ckpt_path=resume)
    metrics = {name: metric.metric_state for name, metric in module.named_modules() if hasattr(metric, "metric_state")}
    return plain([module.state_dict(), module.total, metrics, dict(trainer.callback_metrics)])


@pytest.mark.parametrize("kind", ["plain", "exact", "slow", "stream"])
def test_a_checkpoint_within_a_step_is_one_of_its_beginning(tmp_path: Path, kind: str) -> None:
    """In all of its parts, in each hook of the first, a middle and the last micro-batch; and the run goes on as without it."""
    how = {"exact": kind == "exact", "stream": kind == "stream"}
    kinds = OnSlowPath if kind == "slow" else Counting
    dumps = Dumps()
    disturbed = fitted(tmp_path / "dumps", kinds(kind != "exact"), dumps, **how)
    assert dumps.compared > 70
    assert disturbed == fitted(tmp_path / "whole", kinds(kind != "exact"), **how)


class Failing(Counting):
    """Fails in a micro-batch of the sixth step, by an error or by a loss that is not finite."""

    def __init__(self, at: int, loss: float, moves: bool = True) -> None:
        super().__init__(moves)
        self.at, self.nan = at, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 5 and batch_idx % 3 == self.at:
            if not self.nan:
                raise RuntimeError("a broken sample")
            loss = loss * float("nan")
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("at", "loss"), [(0, 0.0), (2, 0.0), (1, 1.0)])
def test_a_run_that_fails_within_a_step_resumes_before_it(tmp_path: Path, at: int, loss: float, exact: bool) -> None:
    whole = fitted(tmp_path / "whole", Counting(not exact), exact=exact)
    saves = OnExceptionCheckpoint(tmp_path / "saved")
    with pytest.raises(RuntimeError, match="not finite" if loss else "a broken sample"):
        fitted(tmp_path / "failed", Failing(at, loss, not exact), *([] if loss else [saves]), exact=exact)
    path, folder = ("last", "failed") if loss else (tmp_path / "saved" / "on_exception.ckpt", "resumed")
    assert fitted(tmp_path / folder, Counting(not exact), resume=path, exact=exact) == whole


class Teaching(Failing):
    """Moves a teacher's weights in each micro-batch, and not by the optimiser."""

    def __init__(self) -> None:
        super().__init__(1, 0.0)
        self.teacher = nn.Linear(6, 1).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.teacher.weight.mul_(0.9)
        return super().training_step(batch, batch_idx)


def test_what_cannot_be_taken_back_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="a broken sample"):
        fitted(tmp_path, Teaching(), OnExceptionCheckpoint(tmp_path))
    lines = [record.getMessage() for record in caplog.records if "is saved within step" in record.getMessage()]
    assert [line.partition(". HINT")[0] for line in lines] == [
        "A checkpoint is saved within step 6, which a resumed run takes again from its beginning, but teacher.weight has moved "
        "since: such a run is another one"
    ]


@pytest.mark.parametrize("exact", [False, True])
def test_a_skipped_step_is_not_in_a_checkpoint_of_its_end(tmp_path: Path, exact: bool) -> None:
    saves, how = (
        ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1),
        {"exact": exact, "nonfinite": "skip"},
    )
    fitted(tmp_path / "skipped", Failing(1, 1.0, not exact), saves, **how)
    sums = torch.load(tmp_path / "saved" / "epoch=1-step=6.ckpt", weights_only=True)["logged_sums"]
    ((total, samples),) = sums["training_step.loss"]["ranks"]
    assert (bool(total.isfinite().all()), int(samples)) == (True, 12)


@pytest.mark.parametrize(("ranks", "exact"), [(2, "true"), (3, "false")])
def test_several_ranks_save_the_beginning_of_a_step(quick: Cli, ranks: int, exact: str) -> None:
    run = quick(
        *("fit", "--model=tests.survive.within.Counting", f"--model.moves={exact == 'false'}", "--data=tests.own.PointsData"),
        *("--trainer.callbacks=tests.survive.within.Dumps", "--trainer.callbacks.steps=3", f"--trainer.exact={exact}"),
        *("--trainer.max_steps=4", "--trainer.global_batch_size=12", "--run=it"),
        ranks=ranks,
    )
    assert run.code == 0, run.output
