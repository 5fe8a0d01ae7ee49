"""A step that is taken as a CUDA graph is the step that it was recorded from: on the stand-in for a GPU."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project.cli import same
from project.model import ImageClassifier
from project.step.capture import HOOKS_WITHIN_STEP, is_capturable
from project.survive.nonfinite import NonFinite
from project.watch.throughput import Throughput
from tests.conftest import TINY, Cli

FIT = (
    *("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.max_epochs=2", "--trainer.log_every_n_steps=2"),
    *("--data.batch_size=4", "--data.crop_padding=1", "--data.flip=true", "--checkpoints.every_n_steps=4"),
    # Steps are recorded after 3 of them, on several ranks after 11.
    *("--data.source.init_args.train_size=128", "--trainer.limit_val_batches=2", "--trainer.num_sanity_val_steps=0"),
)
GRAPHS = "--trainer.capture=auto"
COUNTS = '{"class_path": "tests.probes.Graphs"}'


def with_callbacks(*entries: str) -> str:
    return f"--trainer.callbacks=[{', '.join(entries)}]"


def curves(folder: Path) -> list[Any]:
    logged = EventAccumulator(str(folder)).Reload()
    names = ("train/loss", "train/acc", "train/grad_norm", "train/loss_epoch")
    return [[(event.step, event.value) for event in logged.Scalars(name)] for name in names]


SETTINGS = [
    (1, "only", ["--data.global_batch_size=4", "--trainer.precision=16-mixed"]),
    (1, "first, last", ["--data.global_batch_size=8", "--trainer.gradient_clip_val=0.5", "--trainer.precision=16-mixed"]),
    (2, "first, last, middle", ["--data.global_batch_size=24"]),
    (1, "first, last", ["--data.global_batch_size=8", "--trainer.precision=bf16-mixed", "--trainer.nonfinite=skip"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kinds", "settings"), SETTINGS)
def test_a_run_is_the_same_to_the_last_bit(gpu: Cli, tmp_path, ranks, kinds, settings):
    """Log points and checksums included: none of them is taken eagerly."""
    arguments = ["--trainer.max_epochs=6"] if ranks > 1 else []
    eager = gpu(*FIT, *settings, *arguments, "--run=eager", ranks=ranks)
    assert eager.code == 0, eager.output
    graphs = gpu(*FIT, *settings, *arguments, GRAPHS, with_callbacks(COUNTS), "--run=graphs", ranks=ranks)
    assert graphs.code == 0, graphs.output
    for rank in range(ranks):
        assert f"rank {rank} has graphs: {kinds}" in graphs.output, graphs.output
    folders = [tmp_path / "lightning_logs" / name for name in ("eager", "graphs")]
    assert same.main([str(folder) for folder in folders]) == 0
    assert curves(folders[0]) == curves(folders[1])


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_run(gpu: Cli, tmp_path):
    """After a start the first steps are taken eagerly, where the other run repeats its graphs; AdamW's, too."""
    words = (*FIT, "--config=adamw.yaml", "--data.global_batch_size=8", GRAPHS)
    adamw = "model: {optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.003}}}"
    (tmp_path / "adamw.yaml").write_text(adamw)
    assert gpu(*words, "--run=whole").code == 0
    kills = with_callbacks(COUNTS[:-1] + ', "init_args": {"kill": 14}}')
    killed = gpu(*words, kills, "--run=killed")
    assert killed.code != 0
    resumed = gpu(*words, kills, "--run=killed")
    assert resumed.code == 0, resumed.output
    assert "has graphs: first, last" in resumed.output
    assert same.main([str(tmp_path / "lightning_logs" / name) for name in ("whole", "killed")]) == 0


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_found_two_steps_later_and_named(gpu: Cli):
    words = (
        *(argument for argument in FIT if not argument.startswith("--data.source")),
        *("--data.source=project.data.Datasets", "--data.source.init_args.train=tests.survive.poison.Poisoned"),
        *("--data.source.init_args.train.init_args.at=100", "--data.source.init_args.num_classes=10"),
        *("--trainer.limit_val_batches=0", "--data.global_batch_size=8"),
    )
    run = gpu(*words, GRAPHS, "--trainer.nonfinite=stop")
    assert run.code == 1, run.output
    assert "is not finite: nan on rank 0" in run.output
    assert "Traceback" not in run.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([with_callbacks('{"class_path": "tests.train.test_capture.LooksWithin"}')], "LooksWithin has a hook"),
        (["--trainer.detect_anomaly=true", "--trainer.max_epochs=1"], "trainer.detect_anomaly has the host look"),
    ],
)
def test_what_can_not_be_recorded_is_logged_once_and_taken_eagerly(gpu: Cli, settings: list[str], reason: str):
    run = gpu(*FIT, "--data.global_batch_size=8", GRAPHS, *settings)
    assert run.code == 0, run.output
    assert run.output.count(f"trainer.capture: steps are taken one operation after the other, as {reason}") == 1


@pytest.mark.slow
def test_what_a_recorded_step_logs_is_refused(gpu: Cli):
    """It would be logged once, and an epoch's mean be that of one micro-batch."""
    declared = "--model=tests.train.test_capture.Declared"
    run = gpu(*FIT[:2], declared, *FIT[2:], "--data.global_batch_size=8", GRAPHS)
    assert run.code == 1, run.output
    assert "self.log('mine') in training_step: that is a part of a graph (trainer.capture)" in run.output
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_a_step_is_recorded_after_a_log_point_too(gpu: Cli):
    """The sums of a log point are on their way when the next step begins, which is the first that is recorded here."""
    run = gpu(*FIT, "--data.global_batch_size=8", "--trainer.log_every_n_steps=3", GRAPHS, with_callbacks(COUNTS))
    assert run.code == 0, run.output
    assert "has graphs: first, last" in run.output


CHANGES = [
    ("Unfreezes", 2, ["--model.lr_scheduler=null"]),
    ("GivesStatesAnew", 1, []),
    ("GivesTensorsAsRates", 1, []),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "settings"), CHANGES)
def test_what_changes_between_epochs_is_in_the_graphs_of_the_next(gpu: Cli, tmp_path, name, ranks, settings):
    change = f'{{"class_path": "tests.train.test_capture.{name}"}}'
    words = (*FIT, "--data.global_batch_size=8", "--trainer.precision=32-true", "--trainer.max_epochs=3", *settings)
    eager = gpu(*words, with_callbacks(change), "--run=eager", ranks=ranks)
    assert eager.code == 0, eager.output
    graphs = gpu(*words, GRAPHS, with_callbacks(change, COUNTS), "--run=graphs", ranks=ranks)
    assert graphs.code == 0, graphs.output
    assert "rank 0 has graphs: " in graphs.output
    folders = [tmp_path / "lightning_logs" / name for name in ("eager", "graphs")]
    assert curves(folders[0]) == curves(folders[1])
    assert same.main([str(folder) for folder in folders]) == 0


class Unfreezes(Callback):
    """Has the last parameter learn from the second epoch on, in a group of its own."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        [*pl_module.parameters()][-1].requires_grad = False

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            (optimizer,) = trainer.optimizers
            parameter = optimizer.param_groups[0]["params"].pop()
            parameter.requires_grad = True
            optimizer.add_param_group({"params": [parameter], "lr": 0.01})


class GivesStatesAnew(Callback):
    """Does with the optimiser what a search for a learning rate does when it is over."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        (optimizer,) = trainer.optimizers
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))


class GivesTensorsAsRates(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = torch.tensor(group["lr"])


class LooksWithin(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pass


class Speaking(ImageClassifier):
    """Logs in its step, which a graph would do once; that it is capturable is what another class says."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss.detach())
        return loss


class Declared(Speaking):
    capturable = True


class Plain(LightningModule):
    pass


def made(kind: type) -> Any:
    return kind.__new__(kind)


def test_a_class_says_so_anew_where_it_gives_a_part_of_the_step_anew():
    of_a_module = ("training_step", "forward", *HOOKS_WITHIN_STEP)
    assert is_capturable(made(ImageClassifier), *of_a_module)
    assert not is_capturable(made(Speaking), *of_a_module)
    assert is_capturable(made(Declared), *of_a_module)
    assert not is_capturable(made(Plain), *of_a_module)
    assert is_capturable(NonFinite(), *HOOKS_WITHIN_STEP)
    assert not is_capturable(Throughput(), *HOOKS_WITHIN_STEP)


def test_a_network_that_torch_puts_into_graphs_is_not_put_into_another():
    module = ImageClassifier(Plain(), compile="reduce-overhead")
    assert not is_capturable(module)
    assert is_capturable(ImageClassifier(Plain(), compile="default"))
