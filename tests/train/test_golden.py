"""The losses of a training's first steps, as they always were. Write them anew with: python -m tests.train.test_golden"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from project.step.state import micro_batch
from tests.conftest import TINY, forked

GOLDEN = Path(__file__).with_name("golden.json")
STEPS = 8
# Augmentation, accumulation, a shorter last step, a second epoch and batch norm: all that has a say in a loss.
FIT = (
    *("fit", "--config=configs/ddp.yaml", *(argument for argument in TINY if "precision" not in argument)),
    *("--trainer.precision=64-true", "--trainer.accelerator=cpu", f"--trainer.max_steps={STEPS}"),
    *("--data.source.init_args.train_size=61", "--data.batch_size=8", "--data.global_batch_size=16"),
    *("--trainer.limit_val_batches=0", "--trainer.callbacks=tests.train.test_golden.Losses"),
)


class Losses(Callback):
    """Writes the loss of each step: the mean over its samples, in float64, which TensorBoard has not."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.losses.append(0.0)
        self.losses[-1] += outputs["loss"].double().item() * micro_batch(trainer).weight  # divided by their number already

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Path("losses.json").write_text(json.dumps(self.losses))


def test_the_first_losses_are_what_they_were(quick, tmp_path):
    run = quick(*FIT)
    assert run.code == 0, run.output
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses) == STEPS
    assert losses == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-9)  # other CPUs round otherwise


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        run = forked(Path(folder), *FIT)
        assert run.code == 0, run.output
        GOLDEN.write_text(json.dumps(json.loads((Path(folder) / "losses.json").read_text()), indent=1) + "\n")
        print(GOLDEN.read_text())
