"""Each way to train on GPUs: as many GPUs as there are ranks, a rank killed and the run resumed, to the last bit."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from project.checkpoints.reading import SafeCheckpointIO, checkpoints_in
from tests.conftest import Run
from tests.own import write_texts
from tests.survive.test_resume import curves, same
from tests.train.test_demos import BORING
from tests.train.test_sharded import EMA, EXACT, RUNS, losses, sharded

pytestmark = pytest.mark.slow

GPU = ("--trainer.accelerator=gpu", "--checkpoints.every_n_steps=2")
FP16, FP32 = "--trainer.precision=16-mixed", "--trainer.precision=32-true"
DDP = (  # 3 steps in an epoch
    *(*RUNS["minires"], *GPU, FP16, "--data.batch_size=8", "--data.source.init_args.train_size=124"),
    "--trainer.limit_val_batches=2",
)
GPT = (*RUNS["gpt"], *GPU, FP16, "--trainer.max_steps=5", "--trainer.limit_val_batches=2", "--data.init_args.batch_size=4")
OWN = (*RUNS["regression"], *GPU, FP32, "--data.init_args.batch_size=4", "--data.init_args.size=76")  # 3 steps in an epoch
CLIP = "--trainer.gradient_clip_val=0.05"
STATE = ("state_dict", "optimizer_states", "lr_schedulers", "position", "current_model_state", "averaging_state")
WAYS: dict[str, tuple[str, ...]] = {
    "ddp": DDP,
    "gpt": GPT,
    "exact": (*DDP, FP32, EXACT),
    "compression": (*DDP, "--trainer.gradient_compression=fp16"),
    "sharded": (*GPT, sharded()),
    "gradients": (*GPT, sharded(shard="gradients")),
    "offload": (*GPT, sharded(cpu_offload=True)),
    "tensor_parallel": (*GPT, sharded(tensor_parallel=2)),
    "sharded_exact": (*DDP, FP32, EXACT, sharded()),
    "clipped": (*DDP, EXACT, CLIP),
    "sharded_clipped": (*DDP, EXACT, CLIP, sharded()),
    "sharded_sgd": (*DDP, sharded()),
    "own": OWN,
    "own_exact": (*OWN, EXACT),
    "demo": (*BORING, *GPU, "--trainer.devices=1", "--trainer.log_every_n_steps=1"),
}
KILLED = [
    ("ddp", 2),
    ("offload", 2),
    ("tensor_parallel", 2),
    ("own_exact", 2),
    ("demo", 2),
    # What these keep is kept by those above, too: AdamW, dropout and shards by "offload", the order of sums by "own_exact".
    *(
        pytest.param(*case, marks=pytest.mark.faults)
        for case in (("gpt", 2), ("sharded", 3), ("exact", 3), ("compression", 2), ("gradients", 2))
    ),
]


def plugged(*entries: dict[str, Any]) -> str:
    return "--trainer.callbacks=" + json.dumps([EMA, *entries])


def fault(rank: int, step: int, how: str) -> dict[str, Any]:
    return {"class_path": "tests.standin.probes.GpuFault", "init_args": {"rank": rank, "step": step, "how": how}}


def final(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = SafeCheckpointIO().load_checkpoint(checkpoints_in(folder / "lightning_logs/it/checkpoints")[-1])
    return {name: loaded[name] for name in STATE if name in loaded}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ways")
    write_texts(place / "texts")
    return place


@pytest.fixture
def train(place: Path, gpu_pool: Any) -> Callable[..., Run]:
    """Trains one of the ways in a folder by name; what was trained before in a folder is resumed."""

    def run(folder: str, name: str, *words: str, ranks: int = 1, **job: Any) -> Run:
        (place / folder).mkdir(exist_ok=True)
        code, output = gpu_pool.run(place / folder, *WAYS[name], *words, ranks=ranks, **job)
        return Run(code, output, place / folder)

    return run


@pytest.fixture
def whole(place: Path, train: Callable[..., Run]) -> Callable[..., Path]:
    """Trains one of the ways to its end, once for all tests that need it, and returns its folder."""

    def run(name: str, ranks: int) -> Path:
        folder = f"{name}-{ranks}"
        if not (place / folder).exists():
            done = train(folder, name, plugged(), ranks=ranks)
            assert done.code == 0, done.output
            assert " on cuda" in done.output
        return place / folder

    return run


@pytest.mark.parametrize(("name", "ranks"), KILLED)
def test_a_killed_run_resumes_to_the_same_bits(
    train: Callable[..., Run], whole: Callable[..., Path], name: str, ranks: int
) -> None:
    uninterrupted, folder = whole(name, ranks), f"{name}-killed"
    kill = plugged(fault(rank=ranks - 1, step=3, how="kill"))  # one after a checkpoint
    killed = train(folder, name, kill, ranks=ranks, one_machine=True)
    assert killed.code not in (0, 1), killed.output
    resumed = train(folder, name, kill, ranks=ranks)
    assert resumed.code == 0, resumed.output
    assert "Resumes from" in resumed.output
    checkpoint, expected = final(resumed.folder), final(uninterrupted)
    assert checkpoint.keys() == expected.keys()
    assert [part for part in checkpoint if not same(checkpoint[part], expected[part])] == []
    assert curves(resumed.folder) == curves(uninterrupted)


@pytest.mark.parametrize(
    ("name", "ranks", "tolerance"),
    [("ddp", [1, 2, 3], 2e-2), ("sharded", [3, 2], 2e-2), ("own", [1, 2, 3], 1e-5)],
)
def test_the_number_of_ranks_changes_rounding_and_nothing_else(
    whole: Callable[..., Path], name: str, ranks: list[int], tolerance: float
) -> None:
    first, *rest = (losses(whole(name, number)) for number in ranks)
    assert first
    for values in rest:
        assert values == pytest.approx(first, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "ranks", "on_one"),
    [("exact", [2, 3], "exact"), ("sharded_exact", [3], "exact"), ("sharded_clipped", [2], "clipped")],
)
def test_exact_has_the_bits_of_one_gpu(whole: Callable[..., Path], name: str, ranks: list[int], on_one: str) -> None:
    """Clipped gradients are those of the loss, and not those of the scaled loss."""
    alone = whole(on_one, 1)
    for together in (whole(name, number) for number in ranks):
        assert same(final(together)["state_dict"], final(alone)["state_dict"])
        assert curves(together) == curves(alone)


@pytest.mark.parametrize(
    ("verb", "name", "ranks"), [("validate", "ddp", 2), ("test", "ddp", 2), ("predict", "sharded_exact", 3)]
)
def test_a_verb_reads_what_a_fit_has_left(gpu_pool: Any, whole: Callable[..., Path], verb: str, name: str, ranks: int) -> None:
    """On three ranks one has a micro-batch less, and its shards are asked for nevertheless."""
    words = [argument for argument in WAYS[name][1:] if not argument.startswith("--checkpoints")]
    code, output = gpu_pool.run(whole(name, ranks), verb, *words, ranks=ranks)
    assert code == 0, output


@pytest.mark.parametrize(("name", "reference"), [("sharded_sgd", "ddp"), ("compression", "ddp"), ("gradients", "sharded")])
def test_another_way_is_nearly_the_same_run(whole: Callable[..., Path], name: str, reference: str) -> None:
    assert losses(whole(name, 2)) == pytest.approx(losses(whole(reference, 2)), rel=2e-2)


def test_preemption_saves_after_the_step(train: Callable[..., Run], whole: Callable[..., Path]) -> None:
    preempt = {"class_path": "tests.probes.Fault", "init_args": {"rank": 1, "step": 3, "number": int(signal.SIGTERM)}}
    stopped = train("preempted", "ddp", plugged(preempt), ranks=2)
    assert stopped.code == 143, stopped.output
    assert train("preempted", "ddp", plugged(preempt), ranks=2).code == 0
    assert same(final(stopped.folder), final(whole("ddp", 2)))
    shutil.rmtree(stopped.folder)


@pytest.mark.parametrize(("act", "precision"), [("stop", "bf16-mixed"), ("skip", "bf16-true")])
def test_a_loss_that_is_not_finite_is_named_and_left_out(train: Callable[..., Run], act: str, precision: str) -> None:
    """GradScaler's check, which is ours, has no kernel of bf16 for GPUs."""
    poison = plugged(fault(rank=1, step=3, how="nan"))
    run = train(f"nan-{act}", "ddp", poison, f"--trainer.nonfinite={act}", f"--trainer.precision={precision}", ranks=2)
    assert "The loss of step 4 (epoch 2) is not finite: nan on rank 1, " in run.output
    assert run.code == (1 if act == "stop" else 0), run.output
    if act == "skip":
        assert "1 of 6 steps were skipped" in run.output


def test_an_overflow_in_the_first_step_leaves_momentum_alone(train: Callable[..., Run]) -> None:
    scale = {"class_path": "tests.standin.probes.Scale", "init_args": {"initial": 2.0**34}}
    run = train("overflow", "ddp", plugged(scale), "--trainer.max_epochs=4", ranks=2)
    assert run.code == 0, run.output
    assert "is skipped by fp16's loss scaling" in run.output
    momenta = final(run.folder)["optimizer_states"][0]["state"].values()
    assert all(state["momentum_buffer"].isfinite().all() and state["momentum_buffer"].abs().max() < 1e3 for state in momenta)


def test_ranks_that_share_a_layer_skip_its_overflow_together(train: Callable[..., Run]) -> None:
    """The infinity is in the part of rank 1, and the first gradient is of a layer that is not shared."""
    scale = {"class_path": "tests.standin.probes.Scale", "init_args": {"initial": 2.0**10}}
    overflow = plugged(scale, fault(rank=1, step=2, how="overflow"))
    run = train("overflow-tensor", "tensor_parallel", overflow, ranks=2)
    assert run.code == 0, run.output
    scales = [json.loads((run.folder / f"scale-{rank}.json").read_text()) for rank in range(2)]
    assert scales[0]["3"] == 2.0**9
    assert scales[0] == scales[1]


def test_offloaded_weights_are_exchanged_when_the_device_has_them(train: Callable[..., Run]) -> None:
    """The stand-in copies at once, so that a copy which is still on its way is not seen: that it is waited for is."""
    waits = {"class_path": "tests.standin.probes.Waits"}
    run = train("offload-waits", "offload", plugged(waits), ranks=2)
    assert run.code == 0, run.output
    assert [json.loads((run.folder / f"waits-{rank}.json").read_text()) for rank in range(2)] == [1, 1]


def test_a_run_on_the_cpu_takes_nothing_of_a_gpu(train: Callable[..., Run]) -> None:
    contexts = {"class_path": "tests.standin.probes.Contexts"}
    words = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_steps=1")
    run = train("gpt-cpu", "gpt", plugged(contexts), *words)
    assert run.code == 0, run.output
    assert json.loads((run.folder / "contexts-0.json").read_text())["devices"] == []


def test_weights_lie_in_the_hosts_memory_on_one_gpu_too(train: Callable[..., Run]) -> None:
    places = {"class_path": "tests.standin.probes.Places"}
    run = train("offload-alone", "offload", plugged(places), "--trainer.devices=1")
    assert run.code == 0, run.output
    assert json.loads((run.folder / "places-0.json").read_text()) == ["cpu"]
