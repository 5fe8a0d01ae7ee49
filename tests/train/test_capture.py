"""A step that is recorded and repeated is the step that it was recorded from: on a CPU, with a stand-in for CUDA's graphs."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from project import same
from project.data import ImageData, Synthetic
from project.errors import UserError
from project.model import ImageClassifier, MiniResNet
from project.trainer import Trainer
from tests.conftest import TINY
from tests.train.recorded import OnCpu

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True)


class Dropping(MiniResNet):
    def __init__(self) -> None:
        super().__init__(widths=(8, 8, 8))
        self.head = nn.Sequential(nn.Dropout(0.3), self.head)  # type: ignore[assignment]


class Counting(ImageClassifier):
    """Knows how often Python went through its step."""

    recorded: frozenset[str] = frozenset()
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def fit(folder: Path, recorder: Any, *callbacks: Callback, module: Any = Counting, **settings: Any) -> Any:
    torch.manual_seed(0)
    made = {"max_epochs": 2, **settings}
    trainer = Trainer(
        callbacks=list(callbacks), default_root_dir=folder, accelerator="cpu", devices=1, enable_progress_bar=False,
        num_sanity_val_steps=0, log_every_n_steps=5, threads=1, **made,
    )  # fmt: skip
    trainer.fit_loop.epoch_loop.recorder = recorder  # type: ignore[attr-defined]
    data = ImageData(
        Synthetic(train_size=62, val_size=20, image_size=8), batch_size=4, num_workers=0, crop_padding=1, flip=True
    )
    module = module(Dropping(), optimizer=SGD)
    trainer.fit(module, datamodule=data)
    return trainer, module


SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 2},
    {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5, "val_check_interval": 3},
    {"precision": "bf16-mixed", "nonfinite": "skip"},
    {"accumulate_grad_batches": 3, "plugins": lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 64.0))},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_same_run_to_the_last_bit_and_no_python_in_between(tmp_path, settings):
    found = []
    for name, recorder in (("one by one", OnCpu(steps=10**6)), ("graphs", OnCpu(steps=3))):
        made = {key: value() if callable(value) else value for key, value in settings.items()}
        trainer, module = fit(tmp_path / name, recorder, **made)
        counters = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict()
        found.append((module.state_dict(), trainer.global_step, counters, trainer.callback_metrics, recorder, module.steps))
    (ours, *rest, alone, _), (theirs, *others, graphs, steps) = found
    assert rest[:2] == others[:2]
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())
    assert rest[2] == others[2]
    assert (alone.recorded, alone.replayed) == (0, 0)
    assert graphs.recorded == min(3, settings.get("accumulate_grad_batches", 1))
    assert graphs.replayed > graphs.recorded
    assert steps + graphs.replayed == found[0][-1]
    assert same.main([str(tmp_path / "graphs"), str(tmp_path / "one by one")]) == 0


class Compiled(Counting):
    """What torch.compile makes of a network is recorded like any other operators."""

    recorded: frozenset[str] = frozenset()

    def on_fit_start(self) -> None:
        torch.compiler.reset()
        self.network.compile(backend="aot_eager")


@pytest.mark.slow
def test_with_torch_compile_inside(tmp_path):
    found, recorders = [], (OnCpu(steps=10**6), OnCpu(steps=3))
    for recorder in recorders:
        _, module = fit(tmp_path / f"{recorder.steps}", recorder, module=Compiled, max_epochs=1, accumulate_grad_batches=2)
        found.append(module.network.state_dict())
    assert recorders[1].replayed >= 4
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


class Elsewhere(LightningModule):
    """Somebody's own, over texts of all lengths; what it changes in a step are tensors."""

    recorded: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(50, 8), nn.BatchNorm1d(8), nn.Linear(8, 50)
        self.register_buffer("seen", torch.zeros(50))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, following = batch
        self.seen.index_add_(0, tokens.flatten(), torch.ones(tokens.numel()))
        hidden = nn.functional.dropout(self.norm(self.embedding(tokens).flatten(0, 1)), 0.1)
        return nn.functional.cross_entropy(self.head(hidden), following.flatten())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


def texts(samples: Any) -> Any:
    longest = 5 if sum(samples) % 3 else 7  # most are as long as the first
    tokens = torch.stack([torch.arange(longest + 1) * (7 + one) % 50 for one in samples])
    return tokens[:, :-1], tokens[:, 1:]


def test_of_somebodys_own_with_batches_of_another_size_among_them(tmp_path):
    """Within a step that began as a graph some micro-batches are taken otherwise."""
    found = []
    for recorder in (OnCpu(steps=10**6), OnCpu(steps=2)):
        torch.manual_seed(0)
        module = Elsewhere()
        trainer = Trainer(
            max_epochs=3, accumulate_grad_batches=3, default_root_dir=tmp_path, accelerator="cpu", devices=1, logger=False,
            enable_progress_bar=False, enable_checkpointing=False, log_every_n_steps=1000, threads=1,
        )  # fmt: skip
        trainer.fit_loop.epoch_loop.recorder = recorder  # type: ignore[attr-defined]
        trainer.fit(module, DataLoader(range(150), batch_size=5, shuffle=True, collate_fn=texts))  # type: ignore[arg-type]
        found.append(module.state_dict())
    assert recorder.replayed > 15
    assert recorder.recorded + recorder.replayed < 3 * 30 - 2 * 3  # and some were not
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())
    assert found[0]["seen"].sum() > 1000


class Speaking(ImageClassifier):
    """Logs in its step, which nobody would hear of a second time; that it may be recorded is what another class has said."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss.detach())
        return loss


class LooksWithin(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pass


class LooksBefore(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pass


class Hooked(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.network.stem.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("module", "callbacks", "why"),
    [
        (Speaking, [], "Speaking does not say that it can be recorded"),
        (Counting, [LooksWithin()], "LooksWithin has a hook within the step (on_after_backward)"),
        (Counting, [LooksBefore()], "LooksBefore may look at a batch before the step (on_train_batch_start)"),
        (Counting, [Hooked()], "somebody has put a hook on network.stem"),
        (lambda network, optimizer: Counting(network), [], "SGD is not fused"),
    ],
)
def test_what_can_not_be_recorded_is_said_once_and_taken_as_ever(tmp_path, caplog, module, callbacks, why):
    caplog.set_level("INFO", "project")
    recorder = OnCpu()
    fit(tmp_path, recorder, *callbacks, module=module, max_epochs=2)
    assert recorder.recorded == 0
    said = [one.getMessage() for one in caplog.records if "trainer.capture" in one.getMessage()]
    assert len(said) == 1
    assert f"one operation after the other, as {why}" in said[0]


def test_that_exact_sums_are_not_recorded_is_said_once(tmp_path, caplog):
    caplog.set_level("INFO", "project")
    recorder = OnCpu()
    fit(tmp_path, recorder, exact=True, max_epochs=2)
    assert recorder.recorded == 0
    assert [one.getMessage().partition(", as ")[2] for one in caplog.records if "trainer.capture" in one.getMessage()] == [
        "trainer.exact adds up gradients by itself."
    ]


class Changes(Callback):
    """What it changes in the middle of an epoch is no tensor, or another one."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 6:
            trainer.optimizers[0].param_groups[0]["momentum"] = 0.5
        if batch_idx == 9:
            weight = pl_module.network.stem[0].weight
            weight.data = weight.data.clone()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.network.head[0].p = 0.3 + 0.2 * trainer.current_epoch


def test_what_python_changes_is_recorded_anew(tmp_path):
    found, recorders = [], (OnCpu(steps=10**6), OnCpu(steps=3))
    for recorder in recorders:
        _, module = fit(tmp_path / f"{recorder.steps}", recorder, Changes(), max_epochs=2)
        found.append(module.state_dict())
    assert recorders[1].recorded >= 3
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


def test_what_waits_for_the_device_is_one_line(tmp_path):
    class Looks(Counting):
        recorded: frozenset[str] = frozenset()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() < 100 else None

    with pytest.raises(UserError, match=r"can't be recorded as a graph: .* HINT: set trainer.capture=none"):
        fit(tmp_path, OnCpu(), module=Looks)


# In processes of their own -------------------------------------------------------------------------------------------

FIT = (
    *("fit", "--config=configs/ddp.yaml", *TINY, "--model.optimizer.init_args.fused=true", "--trainer.max_epochs=2"),
    *(
        "--trainer.log_every_n_steps=5",
        "--data.batch_size=4",
        "--data.global_batch_size=24",
        "--data.crop_padding=1",
        "--checkpoints.every_n_steps=4",
    ),
)
AS_GRAPHS = '{"class_path": "tests.probes.StepsAsGraphs"}'


def plugged(*more: str) -> str:
    return f"--trainer.callbacks=[{', '.join(more)}]"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_killed_and_gone_on_with_it_is_the_same_run_on_any_ranks(quick, tmp_path, ranks):
    """After a start the first steps are taken one by one, where the other run repeats its graphs."""
    assert quick(*FIT, "--run=alone", ranks=ranks).code == 0
    words = (*FIT, plugged(AS_GRAPHS[:-1] + ', "init_args": {"kill": 9}}'), "--run=graphs")
    killed = quick(*words, ranks=ranks)
    assert killed.code != 0, killed.output
    resumed = quick(*words, ranks=ranks)
    assert resumed.code == 0, resumed.output
    for rank in range(ranks):
        assert re.search(rf"rank {rank} recorded [23] and repeated \d+", resumed.output)
    assert same.main([str(tmp_path / "lightning_logs" / name) for name in ("alone", "graphs")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("act", ["skip", "stop"])
def test_a_loss_that_is_not_finite_is_found_two_steps_later_and_named(quick, tmp_path, act):
    poisoned = "--data.source.init_args.train=tests.survive.poison.Poisoned"
    words = (
        *(word for word in FIT if not word.startswith("--data.source")),
        *("--data.source=project.data.Datasets", poisoned, "--data.source.init_args.train.init_args.at=100"),
        *("--data.source.init_args.num_classes=10", "--trainer.limit_val_batches=0", f"--trainer.nonfinite={act}"),
    )
    alone = quick(*words, "--run=alone", ranks=2)
    graphs = quick(*words, plugged(AS_GRAPHS), "--run=graphs", ranks=2)
    named = "The loss of step 9 (epoch 0) is not finite: nan on rank 1"
    for run in (alone, graphs):
        assert run.code == (1 if act == "stop" else 0), run.output
        assert named in run.output
    if act == "skip":
        assert "2 of 20 steps were skipped" in graphs.output
        assert "rank 1 recorded 3" in graphs.output, graphs.output
        assert same.main([str(tmp_path / "lightning_logs" / name) for name in ("alone", "graphs")]) == 0
