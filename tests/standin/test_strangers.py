"""Modules of somebody who knows nothing of this project, on GPUs: what they bring that no module of this project has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from tests.conftest import Cli
from tests.own import Duel, Regression
from tests.standin.test_runs import DDP, EXACT
from tests.train.test_sharded import sharded

OWN = (
    *(
        "fit",
        "--data=tests.own.PointsData",
        "--data.init_args.size=96",
        "--trainer.global_batch_size=12",
        "--trainer.max_epochs=1",
    ),
    *("--trainer.accelerator=gpu", "--trainer.precision=32-true", "--trainer.log_every_n_steps=1"),
)


class OnTheHost(Regression):
    """Logs what it has counted on the host, beside what it has computed."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        number = torch.tensor(float(self.global_rank + 1))
        how = {"on_step": True, "on_epoch": True, "sync_dist": True, "prog_bar": True}
        self.log("mean", number, **how)  # type: ignore[arg-type]
        self.log("most", number, reduce_fx="max", **how)  # type: ignore[arg-type]
        self.log("sum", number, reduce_fx="sum", **how)  # type: ignore[arg-type]
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True)  # which does not lie there
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


class DuelWithNan(Duel):
    """The second optimiser, which is not fused, once gets a gradient that is not finite."""

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.network.parameters(), lr=self.lr, fused=True)
        second = torch.optim.SGD(self.critic.parameters(), lr=self.lr, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.7)]

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:  # type: ignore[override]
        spoil = self.critic.weight.register_hook(lambda gradient: gradient * torch.nan) if self.global_step == 4 else None
        super().training_step(batch, batch_idx)
        if spoil is not None:
            spoil.remove()

    def on_train_end(self) -> None:
        Path("finite.json").write_text(json.dumps([bool(parameter.isfinite().all()) for parameter in self.parameters()]))


class StepsByItself(Regression):
    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.automatic_optimization, self.fused = False, fused

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=self.fused)


@pytest.mark.parametrize("fused", [True, False])
def test_the_norm_of_a_gradient_that_is_scaled_is_not_shown(gpu: Cli, tmp_path: Path, fused: bool) -> None:
    words = ("--model=tests.standin.test_strangers.StepsByItself", f"--model.init_args.fused={fused}".lower())
    run = gpu(*OWN, *words, "--data.init_args.batch_size=12", "--trainer.precision=16-mixed", "--run=it")
    assert run.code == 0, run.output
    shown = EventAccumulator(str(tmp_path / "lightning_logs/it")).Reload().Tags()["scalars"]
    assert ("train/grad_norm" in shown) is not fused


SKIP = (sharded(), "--trainer.nonfinite=skip")  # what may be taken back again is copied, and no sharded network can be


@pytest.mark.parametrize("settings", [SKIP, (EXACT,)], ids=["sharded", "exact"])
def test_what_lies_on_the_host_is_reduced_over_gpus(gpu: Cli, settings: tuple[str, ...]) -> None:
    run = gpu(*OWN, *settings, "--model=tests.standin.test_strangers.OnTheHost", ranks=2)
    assert run.code == 0, run.output
    for name, value in (("mean", 1.5), ("most", 2.0), ("sum", 9.0)):
        assert {number for _, number in run.events(f"{name}_step")} == {value}


def test_a_step_is_skipped_by_an_optimiser_that_is_not_the_first_and_not_fused(gpu: Cli, tmp_path: Path) -> None:
    run = gpu(
        *OWN, "--model=tests.standin.test_strangers.DuelWithNan", "--data.init_args.batch_size=12", "--trainer.nonfinite=skip"
    )
    assert run.code == 0, run.output
    assert "The step is skipped (1 so far)" in run.output
    assert all(json.loads((tmp_path / "finite.json").read_text()))


FP16 = (*DDP, "--trainer.log_every_n_steps=1", "--trainer.max_epochs=1", "--trainer.limit_val_batches=0")


@pytest.mark.parametrize("clip", ["null", "0.5"])
def test_lightnings_own_loop_has_gradients_without_the_loss_scale(gpu: Cli, tmp_path: Path, clip: str) -> None:
    """A profiler has Lightning take the steps. Its own way leaves fused optimisers their scaled gradients."""
    words = (*FP16, f"--trainer.gradient_clip_val={clip}")
    norms = []
    for name, settings in (("own", ()), ("lightning", ("--trainer.profiler=simple",))):
        run = gpu(*words, *settings, f"--run={name}")
        assert run.code == 0, run.output
        events = EventAccumulator(str(tmp_path / "lightning_logs" / name)).Reload()
        norms.append([(event.step, event.value) for event in events.Scalars("train/grad_norm")])
    assert norms[0]
    assert norms[0] == norms[1]


def test_a_network_that_is_sharded_goes_on_in_the_same_process(gpu_pool: Any, tmp_path: Path) -> None:
    code, output = gpu_pool.run(tmp_path, ranks=2, program="tests.standin.twice:main")
    assert code == 0, output
    for rank in range(2):
        results = json.loads((tmp_path / f"twice-{rank}.json").read_text())
        best, second, saved = results["sharded"]
        assert [best, second, saved] == pytest.approx(results["ddp"], rel=1e-4)
        assert saved == pytest.approx(second, rel=1e-4)
        assert "UserError: strategy=sharded: EMAWeightAveraging copies the network" in results["average"]
        assert results["fails"] == "ArithmeticError: of the module"
        assert "UserError: strategy=sharded: cpu_offload needs gloo beside NCCL" in results["offload"]


def test_nor_does_its_memory_move_to_the_host_on_one_gpu(gpu_pool: Any, tmp_path: Path) -> None:
    code, output = gpu_pool.run(tmp_path, program="tests.standin.twice:alone")
    assert code == 0, output
    assert "UserError: strategy=sharded: cpu_offload needs gloo beside NCCL" in (tmp_path / "alone.txt").read_text()


def test_fsdp_is_refused_by_name(gpu_pool: Any, tmp_path: Path) -> None:
    words = (*OWN, "--model=tests.own.Regression", "--trainer.strategy=fsdp", "--trainer.devices=2")
    code, output = gpu_pool.run(tmp_path, *words, gpus=2)
    assert code == 2, output
    assert "trainer.strategy=fsdp has no network of which a checkpoint could be made here. HINT: " in output


def test_states_of_callbacks_come_to_no_other_gpu(gpu: Cli, tmp_path: Path) -> None:
    """The best score of ModelCheckpoint lies on a rank's own GPU, and goes into the checkpoint of all."""
    best = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "val_loss/dataloader_idx_0"}}
    contexts = {"class_path": "tests.standin.probes.Contexts"}
    words = (*OWN, "--model=tests.own.Regression", "--trainer.callbacks=" + json.dumps([best, contexts]))
    run = gpu(*words, ranks=2)
    assert run.code == 0, run.output
    assert [json.loads((tmp_path / f"contexts-{rank}.json").read_text())["devices"] for rank in range(2)] == [[0], [1]]
