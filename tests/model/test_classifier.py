"""ImageClassifier: the gradient of a step is the mean over its samples, and every part can be replaced."""

import shutil
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import ReduceLROnPlateau
from torch import nn
from torch.nn.functional import cross_entropy

from project.data import ImageData, Synthetic
from project.data.batches import MicroBatches
from project.data.order import Order
from project.data.synthetic import SyntheticImages
from project.errors import UserError
from project.model import ImageClassifier, MiniResNet, WarmupCosine, classifier
from project.model.classifier import lr_factor, refuse_overwritten_gradients
from project.model.delayed import DelayedSums
from project.resume.network import loading
from project.trainer import Trainer
from scripts.bench.worker import Trivial
from tests.conftest import TINY, forked


class Linear(nn.Sequential):
    """No batch norm: so the gradient of a batch is the mean over its samples, and nothing else."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))


@pytest.mark.parametrize("size", [32, 50, 37])
def test_the_gradient_of_a_shorter_last_step_weighs_by_its_true_size(size):
    data = SyntheticImages(size, image_size=8)
    order = Order(size, micro_batch=4, micro_batches=4, seed=0)
    module = ImageClassifier(Linear(), channels_last=False)
    module._trainer = SimpleNamespace(datamodule=None, predicting=False)  # only asked for the number of classes
    batches = MicroBatches(data, order)
    for step in range(order.steps):
        module.zero_grad()
        samples = []
        for number in range(4):
            batch = batches[0, step, number]
            samples += batch["sample"].tolist()
            batch["image"] = batch["image"].float() / 255
            loss = module.training_step(batch, 1) * order.weight(step, number)  # as the Trainer's step weighs it
            (loss / order.micro_batches).backward()  # as Lightning and DDP divide
        accumulated = module.network[1].weight.grad.clone()

        module.zero_grad()
        images, labels = data.__getitems__(samples)
        cross_entropy(module(images.float() / 255), labels).backward()
        torch.testing.assert_close(accumulated, module.network[1].weight.grad)


def test_too_few_outputs_are_named():
    module = ImageClassifier(MiniResNet(num_classes=5, widths=(4,)))
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(num_classes=10), predicting=False)
    with pytest.raises(ValueError, match=r"num_classes=10"):
        module._check(torch.zeros(2, 5))


def test_too_few_outputs_for_the_labels_are_named_where_nobody_knows_the_number_of_classes():
    module = ImageClassifier(MiniResNet(num_classes=5, widths=(4,)))
    module._trainer = SimpleNamespace(datamodule=None, predicting=False)
    module._check(torch.zeros(2, 5), torch.tensor([4, 0]))
    with pytest.raises(UserError, match=r"num_classes=8"):
        module._check(torch.zeros(2, 5), torch.tensor([7, 0]))


def test_a_network_that_does_not_fit_the_images_is_refused_and_its_own_errors_are_not():
    class Own(Linear):
        def forward(self, images):
            raise RuntimeError("a bug of the user's")

    batch = {"image": torch.zeros(2, 3, 4, 4), "label": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(UserError, match=r"the first micro-batch, a tensor \(2, 3, 4, 4\): .*shapes cannot .*\. HINT"):
        ImageClassifier(Linear()).training_step(batch, 0)
    with pytest.raises(RuntimeError, match="a bug of the user's") as raised:
        ImageClassifier(Own()).training_step(batch, 0)
    assert not isinstance(raised.value, UserError)
    with pytest.raises(UserError, match="layers of no shape yet"):
        ImageClassifier(nn.Sequential(nn.Flatten(), nn.LazyLinear(10)))


def test_a_function_that_makes_an_optimiser_may_need_several_parameters(fit):
    def by_layer(parameters):
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.1 / len(rest)}, {"params": rest}])

    fit(ImageClassifier(Linear(), by_layer), max_steps=1, enable_checkpointing=False)


def test_an_optimiser_may_have_no_learning_rate(fit):
    def own_rate(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.param_groups[0]["lr"] = None
        optimizer.step = lambda closure=None: closure() if closure else None
        return optimizer

    trainer = fit(ImageClassifier(Linear(), own_rate, lr_scheduler=None), max_steps=2, log_every_n_steps=1)
    assert trainer.optimizers[0].param_groups[0]["lr"] is None


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (torch.optim.SparseAdam, "SparseAdam does not support dense gradients"),
        (partial(torch.optim.Adam, capturable=True), "capturable=True"),
        (torch.optim.Adagrad, ""),
        (torch.optim.LBFGS, ""),
    ],
)
def test_an_optimiser_that_can_not_step_is_refused_before_it_has_to(fit, make, text):
    with pytest.raises(UserError, match=f"model.optimizer can't be made: .*{text}") if text else nullcontext():
        fit(ImageClassifier(Linear(), make), max_steps=1, enable_checkpointing=False)


def test_a_checkpoint_of_another_network_says_what_differs():
    module = ImageClassifier(MiniResNet(widths=(4,)))
    state = ImageClassifier(MiniResNet(widths=(8,))).state_dict()
    with (
        pytest.raises(ValueError, match=r"network\.stem\.0\.weight is \(8, 3, 3, 3\) there and \(4, 3, 3, 3\) here"),
        loading(module),
    ):
        module.load_state_dict(state)


def test_the_means_of_an_epoch_go_on_from_a_checkpoint():
    """All of them, also where nothing comes after it in the epoch."""
    before, after = (ImageClassifier(Trivial()) for _ in range(2))
    before._trainer = after._trainer = SimpleNamespace(world_size=1, global_rank=0)
    before.epoch_tally.update(torch.eye(10), torch.arange(10), torch.tensor(0.5))
    checkpoint = {"state_dict": before.state_dict()}
    before.on_save_checkpoint(checkpoint)
    after.on_load_checkpoint(checkpoint)
    assert after.epoch_tally.compute() == {"loss": 0.5, "acc": 1.0, "acc5": 1.0}


def test_the_learning_rate_follows_the_global_batch():
    assert lr_factor("linear", 512, 64) == 8
    assert lr_factor("sqrt", 256, 64) == 2
    assert lr_factor("none", 512, 64) == 1


@pytest.fixture
def fit(tmp_path):
    """Fits a module to 64 images, in steps of 16, and returns the Trainer."""

    def run(module, batch_size=16, global_batch_size=None, **settings):
        data = ImageData(Synthetic(64, 8, image_size=8), batch_size=batch_size, global_batch_size=global_batch_size)
        settings = {"limit_val_batches": 0, "logger": False, "accelerator": "cpu", "default_root_dir": tmp_path, **settings}
        trainer = Trainer(**settings)
        trainer.fit(module, datamodule=data)
        return trainer

    return run


@pytest.mark.parametrize("total", [None, 12])
def test_a_schedule_that_moves_once_an_epoch_has_the_rates_of_its_steps(fit, total):
    rates = []

    class Rates(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    schedule = partial(WarmupCosine, warmup_steps=4, total_steps=total)
    module = ImageClassifier(Trivial(), lr_scheduler=schedule, lr_interval="epoch", lr_scaling="none")
    trainer = fit(module, batch_size=8, global_batch_size=16, max_epochs=3, callbacks=[Rates()])
    assert trainer.global_step == 12
    assert rates == pytest.approx([0.01 / 5, 0.01, 0.005])  # before the steps 0, 4 and 8 of 12


class Last(Callback):
    """What was logged of the last step, when a validation is over."""

    def __init__(self):
        self.pairs = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.loss = outputs["loss"].item()

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.pairs.append((self.loss, trainer.callback_metrics["train/loss"].item()))


def test_a_validation_finds_what_was_logged_before_it(fit):
    last = Last()
    fit(
        ImageClassifier(Trivial()),
        max_epochs=1,
        val_check_interval=2,
        log_every_n_steps=1,
        limit_val_batches=1.0,
        callbacks=[last],
    )
    assert len(last.pairs) == 2
    for loss, logged in last.pairs:
        assert logged == pytest.approx(loss)


def test_sums_are_read_when_the_ranks_have_met_in_the_next_gradient(fit, monkeypatch):
    """Before, all would wait for them at every log point."""
    moments, read = [], DelayedSums.read

    class Moments(Callback):
        def on_train_batch_start(self, *_):
            moments.append("start")

        def on_after_backward(self, *_):
            moments.append("met")

    monkeypatch.setattr(DelayedSums, "read", lambda later: moments.append("read") or read(later))
    fit(ImageClassifier(Trivial()), max_steps=4, log_every_n_steps=1, callbacks=[Moments()], enable_checkpointing=False)
    assert moments[:11] == ["start", "met", *["start", "met", "read"] * 3]


@pytest.mark.parametrize("who", ["early stopping", "step", "epoch"])
def test_who_looks_at_the_training_loss_finds_it(fit, who):
    """Also where the only log point of an epoch is its last step, and for a schedule that looks at every step."""
    plateau = partial(ReduceLROnPlateau, monitor="train/loss")
    scheduler = {} if who == "early stopping" else {"lr_scheduler": plateau, "lr_interval": who}
    callbacks = [] if scheduler else [EarlyStopping("train/loss")]
    module = ImageClassifier(Trivial(), **scheduler)
    assert fit(module, max_epochs=2, log_every_n_steps=1 if who == "step" else 4, callbacks=callbacks).global_step == 8


@pytest.mark.parametrize(
    ("mode", "seconds", "compiled"), [("auto", 800, []), ("auto", 1000, [("default", False)]), ("none", 1000, [])]
)
def test_only_a_run_that_is_long_is_compiled(fit, monkeypatch, mode, seconds, compiled):
    calls = []
    monkeypatch.setattr(Trivial, "compile", lambda self, mode, dynamic: calls.append((mode, dynamic)))
    monkeypatch.setattr(Trainer, "least_seconds", seconds)
    fit(ImageClassifier(Trivial(), compile=mode), max_steps=1)
    assert calls == compiled


def test_a_run_takes_its_operations_at_the_peak_of_the_device(fit, monkeypatch):
    trainer = fit(ImageClassifier(Trivial()), max_epochs=3)
    assert trainer.least_seconds == 0  # nobody knows the peak of a CPU
    monkeypatch.setattr("project.watch.flops.peak", lambda trainer: 1000)
    # 192 x 10 weights: a multiplication and an addition, forwards and for the gradient of the weights
    assert trainer.least_seconds == pytest.approx(3 * 64 * 192 * 10 * 2 * 2 / 1000)


def test_a_network_whose_operations_nobody_can_count_is_not_compiled(fit, monkeypatch):
    class Branches(Trivial):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) if images.sum().item() else images.flatten(1)[:, :10]

    monkeypatch.setattr("project.watch.flops.peak", lambda trainer: 1)
    assert fit(ImageClassifier(Branches(), compile="auto"), max_steps=1).least_seconds == 0


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_gradients_that_a_cuda_graph_would_overwrite_are_refused(fit, monkeypatch, mode):
    def as_on_a_gpu(mode, micro_batches, on_gpu):
        refuse_overwritten_gradients(mode, micro_batches, on_gpu=True)

    monkeypatch.setattr(Trivial, "compile", lambda self, mode, dynamic: None)
    monkeypatch.setattr(classifier, "refuse_overwritten_gradients", as_on_a_gpu)
    for batch, wrong in ((16, False), (8, True)):
        with pytest.raises(UserError, match="2 micro-batches overwrite") if wrong else nullcontext():
            fit(ImageClassifier(Trivial(), compile=mode), batch, 16, max_steps=1, devices=1, enable_checkpointing=False)
    refuse_overwritten_gradients(mode, 8, on_gpu=False)
    refuse_overwritten_gradients("default", 8, on_gpu=True)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_network_makes_nearly_the_same_run(tmp_path):
    curves = []
    for mode in ("none", "default"):
        folder = tmp_path / mode
        folder.mkdir()
        words = ("--trainer.max_steps=4", "--trainer.limit_val_batches=0", "--run=it", f"--model.compile={mode}")
        tiny = [argument for argument in TINY if "network" not in argument]
        network = "--model.network=scripts.bench.worker.Trivial"  # the compiler takes its time with every convolution
        run = forked(folder, "fit", "--config=configs/ddp.yaml", *tiny, network, *words)
        assert run.code == 0, run.output
        curves.append(run.curve("train/loss"))
    assert curves[1] == pytest.approx(curves[0], abs=1e-3)
