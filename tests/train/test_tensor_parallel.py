"""tensor_parallel of project.Sharded: the same run, of which several ranks share a layer and see the same micro-batches."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel

from project.checkpoints.reading import SafeCheckpointIO
from project.errors import UserError
from project.sharded.tensor_parallel import plan_of, refuse_settings, refuse_single_rank
from project.step.data_ranks import DataRanks
from tests.conftest import TINY, environment, forked
from tests.own import Regression, write_texts
from tests.survive.test_resume import curves, faults, same
from tests.train.shared import Planned, Tied
from tests.train.test_sharded import ALL, EMA, callbacks, far, sharded, training, weights
from tests.train.test_sharded import RUNS as SHARDED

DDP = "--trainer.strategy=ddp"
RUNS = {
    "gpt": (
        *(*SHARDED["gpt"], "--trainer.precision=64-true", "--trainer.global_batch_size=12", "--trainer.max_steps=5"),
        *("--trainer.limit_val_batches=3", "--model.init_args.layers=2", "--model.init_args.width=24"),
    ),
    # Of somebody who has a plan and knows nothing else of this; torchmetrics, two loaders, a kept tail
    "planned": (
        *("fit", "--data=tests.own.PointsData", "--model=tests.train.shared.Planned", "--trainer.max_epochs=2", *ALL),
        *("--trainer.global_batch_size=24", "--data.init_args.size=140", "--trainer.gradient_clip_val=0.5"),
    ),
    # Augmentation, a network of one plan
    "pixels": (
        *("fit", "--config=configs/ddp.yaml", *(argument for argument in TINY if "network" not in argument), "--run=it"),
        *("--data.source.init_args.train_size=250", "--data.batch_size=4", "--data.global_batch_size=24"),
        *(
            "--data.crop_padding=2",
            "--trainer.max_epochs=2",
            "--trainer.val_check_interval=4",
            "--trainer.num_sanity_val_steps=0",
        ),
        *("--model.network=tests.train.shared.Pixels", "--trainer.precision=64-true"),
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("tensor")
    write_texts(place / "texts")
    return place


@pytest.fixture(scope="module")
def train(place):
    return training(place, RUNS)


def assert_close(expected, state):
    state, expected = dict(state), dict(expected)
    assert state.pop("spread")
    expected.pop("spread")
    assert far(expected, state) < 1e-12
    assert state["optimizers"][0]["state"]


def assert_same_curves(alone, folder):
    """What is logged is written as float32."""
    expected, logged = curves(alone), curves(folder)
    assert expected.keys() == logged.keys()
    for tag, points in expected.items():
        steps, values = zip(*points, strict=True)
        logged_steps, logged_values = zip(*logged[tag], strict=True)
        assert steps == logged_steps, tag
        assert logged_values == pytest.approx(values, rel=1e-6, abs=1e-6), tag


def checkpoint(folder: Path) -> Path:
    return max((folder / "lightning_logs/it/checkpoints").glob("step-*.ckpt"))


def agree(shared_by):
    return {"class_path": "tests.train.shared.Agree", "init_args": {"shared_by": shared_by}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "share"), [pytest.param(2, 2, marks=pytest.mark.faults), (4, 2), pytest.param(3, 3, marks=pytest.mark.faults)]
)
def test_a_gpt_is_the_run_of_one_rank(train, ranks, share):
    """Accumulation of 6, 3 and 6."""
    alone = train("gpt")
    folder = train("gpt", sharded(tensor_parallel=share), ranks=ranks, plugged=(agree(share),))
    assert_close(weights(alone), weights(folder))
    assert_same_curves(alone, folder)
    report = json.loads((folder / "agree.json").read_text())
    assert report["agree"]
    assert {"network.tokens.weight", "network.blocks.1.attention_norm.weight"} <= {*report["whole"]}
    assert len(report["cut"]) == 2 * 8  # four layers of a block, with their biases


FORMS = [
    (2, 2, {}),
    pytest.param(4, 2, {"shard": "node"}, marks=pytest.mark.faults),
    pytest.param(4, 2, {"shard": "gradients", "blocks": ["network"], "checkpoint_activations": True}, marks=pytest.mark.faults),
    pytest.param(3, 3, {"blocks": ["Linear"], "deferred": False}, marks=pytest.mark.faults),
    pytest.param(4, 4, {}, marks=pytest.mark.faults),
]


@pytest.mark.parametrize(("ranks", "share", "settings"), FORMS)
def test_whoever_has_a_plan_has_the_run_of_one_rank(train, ranks, share, settings):
    """Each sample counts once in sums, in metrics, and for the bar."""
    alone = train("planned", plugged=(EMA,))
    folder = train("planned", sharded(tensor_parallel=share, **settings), ranks=ranks, plugged=(EMA, agree(share)))
    assert_close(weights(alone), weights(folder))
    assert weights(folder)["average"]
    assert_same_curves(alone, folder)
    assert [value for _, value in curves(folder)["count"]] == [140, 140]
    assert [value for _, value in curves(folder)["samples"]] == [140, 140]

    seen = [(folder / f"seen-{rank}.txt").read_text() for rank in range(ranks)]
    assert all(seen[rank] == seen[rank // share * share] for rank in range(ranks))
    whole = [number for text in seen[::share] for line in text.splitlines() for number in line.split()[1:]]
    assert sorted(map(int, whole)) == sorted([*range(140)] * 2)

    report = json.loads((folder / "agree.json").read_text())
    assert report["agree"]
    assert report["cut"] == ["network.0.bias", "network.0.weight", "network.2.bias", "network.2.weight"]
    assert report["samples"] == 2 * 140
    output = (folder / "output.txt").read_text()
    assert f"1 host x {ranks} processes ({ranks // share} x {share} tensor parallel) x micro-batch 2 x accumulation " in output
    assert f"accumulation {12 * share // ranks} = global batch 24" in output


@pytest.mark.faults
def test_a_step_that_is_not_finite_is_left_out(train):
    words = ("--trainer.nonfinite=skip", "--model=tests.train.shared.PlannedAndPoisoned")
    alone, folder = train("planned", *words), train("planned", *words, sharded(tensor_parallel=2), ranks=4)
    assert_close(weights(alone), weights(folder))
    output = (folder / "output.txt").read_text()
    assert "The step is skipped (1 so far)" in output
    assert output.count("in micro-batch 6 of 12") == 1


@pytest.mark.slow
def test_lightnings_own_loop_clips_so_too(train):
    words = ("--model=tests.train.shared.ByLightning",)
    alone, folder = train("planned", *words), train("planned", *words, sharded(tensor_parallel=2), ranks=2)
    assert_close(weights(alone), weights(folder))
    assert_same_curves(alone, folder)


@pytest.mark.faults
def test_images_that_are_classified_count_once(place, train):
    """Also in the means of an epoch that was killed within, and goes on on one rank."""
    folder = place / "killed-pixels"
    folder.mkdir()
    for ranks, strategy, step in ((4, sharded(tensor_parallel=2), 5), (2, sharded(tensor_parallel=2), 8), (1, DDP, None)):
        fault = json.loads(faults(*([{"rank": ranks - 1, "step": step}] if step else [])).partition("=")[2])
        done = forked(folder, *RUNS["pixels"], strategy, "--checkpoints.every_n_steps=1", callbacks(*fault), ranks=ranks)
        assert (done.code == 0) == (step is None), done.output
    alone = train("pixels")
    expected, state = weights(alone), weights(folder)
    assert far(expected["module"], state["module"]) < 1e-12
    assert {"train/loss_epoch", "val/acc"} <= curves(alone).keys()
    assert_same_curves(alone, folder)


@pytest.mark.slow
def test_every_prediction_is_there_once(place, train):
    """On one rank, which has the network whole, they are the same."""
    trained = checkpoint(train("planned", sharded(tensor_parallel=2), ranks=2, plugged=(EMA, agree(2))))
    written = []
    for ranks in (4, 1):
        folder = place / f"predicted-{ranks}"
        folder.mkdir()
        words = ("predict", "--data=tests.train.shared.Predicted", "--model=tests.train.shared.Planned", "--run=predicted")
        words += ("--trainer.accelerator=cpu", f"--trainer.callbacks={json.dumps([EMA])}", f"--ckpt_path={trained}")
        done = forked(folder, *words, sharded(tensor_parallel=2), ranks=ranks, timeout=120)
        assert done.code == 0, done.output
        written.append((folder / "lightning_logs/predicted/predictions.csv").read_text())
    assert [int(line.split(",")[0]) for line in written[0].splitlines()[1:]] == [*range(11)]
    assert written[0] == written[1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("planned", (3, 5, 8)), pytest.param("gpt", (2, 3, 4), marks=pytest.mark.faults)])
def test_killed_and_resumed_on_other_ranks(place, train, name, steps):
    """Each start has the bits of the checkpoint, weights and optimiser, whoever wrote it; the end is that of one rank."""
    folder = place / f"killed-{name}"
    folder.mkdir()
    average = (EMA,) if name == "planned" else ()  # of float32 for DDP, where the network is not of float64 by itself
    starts = [(3, DDP), (4, sharded(tensor_parallel=2)), (3, sharded(tensor_parallel=3)), (2, sharded(tensor_parallel=1))]
    before = None
    for (ranks, strategy), step in zip(starts, (*steps, None), strict=True):
        fault = json.loads(faults(*([{"rank": ranks - 1, "step": step}] if step else [])).partition("=")[2])
        plugged = callbacks(*average, *fault)
        done = forked(folder, *RUNS[name], strategy, "--checkpoints.every_n_steps=1", plugged, ranks=ranks)
        assert (done.code == 0) == (step is None), done.output
        if before is not None:
            began = torch.load(folder / "start.pt", weights_only=True)
            assert before["position"]["global_step"] > 0
            assert same(began["module"], dict(before.get("current_model_state", before["state_dict"])))
            for state, expected in zip(began["optimizers"], before["optimizer_states"], strict=True):
                assert same(state["state"], expected["state"])
        before = SafeCheckpointIO().load_checkpoint(checkpoint(folder))
    assert_close(weights(train(name, plugged=average)), weights(folder))
    assert_same_curves(train(name, plugged=average), folder)


@pytest.mark.faults
def test_copies_on_two_hosts(tmp_path):
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8", "-m", "tests.train.hosts_of_layers")
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


REFUSED = {
    "takes so many ranks of a host for each micro-batch, and 3 are no": lambda: refuse_settings(2, 3, 3, False),
    "takes so many ranks for each micro-batch, and there is one": lambda: refuse_single_rank(2, 1),
    "tensor_parallel=0. HINT": lambda: refuse_settings(0, 2, 2, False),
    "trainer.exact can't be kept: with tensor_parallel=2": lambda: refuse_settings(2, 2, 2, True),
    "needs a plan, and Regression has none": lambda: plan_of(Regression()),
    "there is no module network.nought": lambda: plan_of(planned({"network.nought": ColwiseParallel()})),
    "network.0 has 'columns', which is no style": lambda: plan_of(planned({"network.0": "columns"})),
    "the plan cuts network.0, and other has the same weight": lambda: plan_of(Tied()),
}


def planned(plan):
    module = Planned()
    module.tensor_parallel_plan = lambda: plan
    return module


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_together_is_refused(message):
    with pytest.raises(UserError, match=re.escape(message)):
        REFUSED[message]()


@pytest.mark.parametrize(
    ("ranks", "words", "message"),
    [
        (5, (), "12 of what is cut, and 5 ranks can't have"),
        (2, ("--data=tests.train.shared.Streamed",), "needs 2 ranks to see the same micro-batches, and the train loader"),
    ],
)
def test_refused_in_one_line(tmp_path, ranks, words, message):
    batch = f"--trainer.global_batch_size={2 * ranks}"
    done = forked(tmp_path, *RUNS["planned"], sharded(tensor_parallel=ranks), *words, batch, ranks=ranks)
    assert done.code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output
    assert "HINT" in done.output


def test_data_ranks_have_neighbouring_ranks():
    assert DataRanks(1, 2, shared_by=3).replica_groups() == [[0, 3], [1, 4], [2, 5]]
