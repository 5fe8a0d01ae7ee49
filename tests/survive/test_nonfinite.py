"""A loss or a gradient that is not finite: named, kept out of the weights, and the run stopped or the step left out."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from project.data.order import Order
from project.step.finite import not_finite
from project.step.micro_batch import MicroBatch
from project.survive.nonfinite import NonFinite
from tests.conftest import Cli, forked, since_struck, took
from tests.survive.test_resume import curves, same

STEP, SAMPLE = 3, 77  # where the order of this run takes this sample first


def words(*arguments: str, at: int = SAMPLE, network: str = "tests.probes.Dropped") -> tuple[str, ...]:
    def data(split: str, **settings: int) -> str:
        dataset = {"class_path": "tests.survive.poison.Poisoned", "init_args": settings}
        return f"--data.source.init_args.{split}={json.dumps(dataset)}"

    return (
        *("fit", "--config=configs/ddp.yaml", "--data.source=project.data.Datasets", "--data.source.init_args.num_classes=10"),
        *(data("train", at=at), data("val", size=50), "--data.num_workers=0", "--data.batch_size=8"),
        *("--data.global_batch_size=32", "--trainer.precision=32-true", "--trainer.log_every_n_steps=1", "--run=it"),
        *("--trainer.max_epochs=1", f"--model.network={network}", "--checkpoints.keep_last=99", *arguments),
    )


def saved(folder: Path, step: int) -> dict:
    return torch.load(folder / f"lightning_logs/it/checkpoints/step-{step:09d}.ckpt", weights_only=True)


def steps(folder: Path) -> list[int]:
    return [int(path.stem.split("-")[1]) for path in sorted((folder / "lightning_logs/it/checkpoints").glob("*.ckpt"))]


def callback(name: str) -> str:
    return f"--trainer.callbacks=tests.survive.poison.{name}"


def assert_same_state(actual: dict, expected: dict, *parts: str) -> None:
    for state in (actual, expected):
        for name in [name for name in state["state_dict"] if name.endswith("num_batches_tracked")]:
            del state["state_dict"][name]  # counts forward passes, until the run is over
    for part in ("state_dict", *parts):
        assert same(actual[part], expected[part]), part
    momenta = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (actual, expected)]
    assert momenta[0]
    assert same(*momenta)


@pytest.mark.slow
def test_two_ranks_stop_together_and_then_go_past_it(quick: Cli, tmp_path):
    run = quick(*words(), ranks=2)
    code, output = run.code, run.output
    took("a sample is NaN: all have ended after", since_struck(tmp_path))
    assert code == 1, output
    assert output.count("HINT") == output.count("is not finite") == 1, output
    assert 'set trainer.nonfinite: skip (in Python nonfinite="skip").' in output
    assert "Traceback" not in output
    assert f"The loss of step {STEP} (epoch 1) is not finite: nan on rank 1, " in output
    assert f", in micro-batch 3 of 4: the input of sample {SAMPLE} has NaN or infinite values." in output
    assert steps(tmp_path) == [STEP - 1]

    run = quick(*words("--trainer.nonfinite=skip", callback("Digest")), ranks=2)
    code, output = run.code, run.output
    assert code == 0, output
    assert output.count(f"The loss of step {STEP} (epoch 1) is not finite: nan on rank 1, ") == 1, output
    assert "1 of 8 steps were skipped" in output
    assert (tmp_path / "digest-0").read_text() == (tmp_path / "digest-1").read_text()


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The same run without the bad sample, and all its checkpoints."""
    folder = tmp_path_factory.mktemp("clean")
    run = forked(folder, *words("--checkpoints.every_n_steps=1", at=-1))
    assert run.code == 0, run.output
    return folder


def test_stop_leaves_the_state_from_before_and_meets_it_again(quick: Cli, tmp_path, clean):
    for _ in range(2):
        run = quick(*words())
        assert run.code == 1, run.output
        assert f"The loss of step {STEP} (epoch 1) is not finite: nan on rank 0" in run.output
        assert str(tmp_path / f"lightning_logs/it/checkpoints/step-{STEP - 1:09d}.ckpt. HINT") in run.output
        assert steps(tmp_path) == [STEP - 1]
        assert_same_state(saved(tmp_path, STEP - 1), saved(clean, STEP - 1), "lr_schedulers", "position", "epoch_sums")


def test_the_last_step_of_an_epoch_is_met_again(quick: Cli, tmp_path):
    order = Order(size=250, micro_batch=8, micro_batches=4, seed=0)
    last = int(order.indices((0, order.steps - 1, 0))[0])
    for _ in range(2):
        run = quick(*words("--trainer.max_epochs=2", at=last))
        assert run.code == 1, run.output
        assert f"The loss of step {order.steps} (epoch 1) is not finite: nan on rank 0" in run.output
        assert steps(tmp_path) == [order.steps - 1]


CLIPPED = ("--trainer.gradient_clip_algorithm=value", "--trainer.gradient_clip_val=1e9")  # where nothing is left to clip


@pytest.mark.parametrize("how", ["at once", "by Lightning's loop", "as on a GPU"])
def test_skip_leaves_no_trace_but_the_count(quick: Cli, tmp_path, clean, how):
    late = (callback("AsOnGpu"), "--model.optimizer.init_args.fused=true") if how == "as on a GPU" else ()
    profiler = ("--trainer.profiler=simple",) if how == "by Lightning's loop" else ()
    run = quick(*words("--trainer.nonfinite=skip", "--checkpoints.every_n_steps=1", *CLIPPED, *late, *profiler))
    assert run.code == 0, run.output
    assert run.output.count("The step is skipped") == 1
    assert f"The loss of step {STEP} (epoch 1)" in run.output
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    before, after = saved(tmp_path, STEP - 1), saved(tmp_path, STEP)
    if not late:  # the fused optimiser rounds otherwise
        assert_same_state(before, saved(clean, STEP - 1))
    assert_same_state(before, after, "epoch_sums")
    assert not same(saved(tmp_path, STEP + 1)["state_dict"], after["state_dict"])
    for part in ("position", "lr_schedulers"):  # these go on
        assert same(after[part], saved(clean, STEP)[part])
    assert all(value.isfinite().all() for value in saved(tmp_path, 8)["state_dict"].values())
    scalars = curves(tmp_path)
    assert scalars["train/skipped_steps"] == [(STEP, 1.0)]
    assert scalars["train/loss_epoch"][0][1] == pytest.approx(curves(clean)["train/loss_epoch"][0][1], abs=0.1)


def test_as_on_a_gpu_no_checkpoint_is_made_of_it(quick: Cli, tmp_path, clean):
    """The flag is known two steps later, or when the next checkpoint would be saved; the weights are NaN by then."""
    run = quick(*words(callback("AsOnGpu"), "--trainer.max_steps=7", "--checkpoints.every_n_steps=2"))
    assert run.code == 1, run.output
    assert f"The loss of step {STEP} (epoch 1) is not finite: nan on rank 0" in run.output
    assert steps(tmp_path) == [2]
    assert_same_state(saved(tmp_path, 2), saved(clean, 2))


def test_a_gradient_alone_is_named_by_its_parameters(quick: Cli, tmp_path):
    run = quick(*words(at=-1, network="tests.survive.poison.BadBackward"))
    took("a gradient is infinite: ended after", since_struck(tmp_path))
    assert run.code == 1, run.output
    assert "is not finite, though all losses are: that of network.layers.1.bias, network.layers.1.weight, " in run.output
    assert run.output.count("HINT") == 1
    assert steps(tmp_path) == [2]
    assert all(value.isfinite().all() for value in saved(tmp_path, 2)["state_dict"].values())


KINDS = {
    "sparse": torch.sparse_coo_tensor([[0, 2]], [1.0, 1.0], (4,), check_invariants=True),
    "complex": torch.ones(3, dtype=torch.complex64),
    "of_half_precision": torch.ones(2, 2, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_all_kinds_are_looked_at(kind):
    gradients = [torch.ones(3), KINDS[kind]]
    assert not not_finite(gradients, torch.ones(()))
    assert not_finite([torch.ones(3), KINDS[kind] * torch.inf], torch.ones(()))


def test_a_network_with_sparse_gradients_trains(quick: Cli):
    run = quick(
        "fit",
        "--data=tests.own.PointsData",
        "--model=tests.own.Sparse",
        "--trainer.log_every_n_steps=1",
        "--trainer.max_epochs=1",
    )
    assert run.code == 0, run.output
    assert run.events("train/grad_norm")


@pytest.mark.parametrize("extra", [0.0, torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_spoils_a_gradient_that_would_be(extra):
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum() + extra
    trainer = SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(micro_batch=MicroBatch(), graphs=None)))
    NonFinite().on_before_backward(trainer, None, loss)
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((3,), 2.0)) if not extra else weight.grad.isnan().all()


FP16 = {
    "class_path": "lightning.pytorch.plugins.MixedPrecision",
    "init_args": {
        "precision": "16-mixed",
        "device": "cpu",
        "scaler": {"class_path": "torch.amp.GradScaler", "init_args": {"device": "cpu", "init_scale": 2.0**40}},
    },
}


@pytest.mark.parametrize("how", ["at once", "as on a GPU"])
def test_fp16_that_scales_too_high_is_counted_and_no_fault(quick: Cli, tmp_path, how):
    late = (callback("AsOnGpu"),) if how == "as on a GPU" else ()
    fp16 = ("--trainer.precision=null", f"--trainer.plugins={json.dumps(FP16)}", "--trainer.max_epochs=5", *late)
    run = quick(*words(*fp16, at=-1, network="tests.survive.poison.Linear"))
    assert run.code == 0, run.output
    counted = curves(tmp_path)["train/fp16_skipped_steps"]
    assert 5 < len(counted) < 40
    assert [count for _, count in counted] == list(range(1, len(counted) + 1))
    assert run.output.count("is skipped by fp16's loss scaling") == len(counted)
    assert "is not finite" not in run.output
    after = saved(tmp_path, 40)["MixedPrecision"]
    assert after["scale"] == 2.0 ** (40 - len(counted))

    worse = quick(*words(*fp16, "--run=other", network="tests.survive.poison.Linear"))  # and a true one
    assert worse.code == 1, worse.output
    assert f"The loss of step {STEP} (epoch 1) is not finite: nan on rank 0" in worse.output
