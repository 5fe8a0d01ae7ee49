"""trainer.strategy=sharded: the same run, of which each rank holds a part."""

import json
import re
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from torch import nn

from project import Sharded
from project.errors import UserError
from project.sharded.blocks import blocks_of
from project.sharded.refusals import refuse_own_steps, refuse_pruning, refuse_unshardable, weight_averages
from project.sharded.replaced import Replaced, refuse_hooks
from tests.conftest import TINY, forked
from tests.own import Duel, write_texts
from tests.survive.test_resume import curves, same

GATHER = {"class_path": "tests.train.gather.Gather"}
COUNT = {"class_path": "tests.train.gather.CountCollectives"}
EMA = {"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging", "init_args": {"decay": 0.9}}
ALL = (
    *("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.log_every_n_steps=1", "--run=it"),
    "--trainer.num_sanity_val_steps=0",
)
RUNS = {
    # Batch norm, channels_last, augmentation, clipping, a kept tail; 5 steps in an epoch
    "minires": (
        *("fit", "--config=configs/ddp.yaml", *TINY, *ALL, "--data.source.init_args.train_size=220"),
        *("--data.batch_size=4", "--data.global_batch_size=48", "--data.crop_padding=2", "--trainer.max_epochs=2"),
        *("--trainer.gradient_clip_val=0.5", "--trainer.val_check_interval=2"),
    ),
    # AdamW, tied weights, dropout, clipping, bf16
    "gpt": (
        *("fit", "--config=configs/gpt.yaml", *ALL, "--trainer.precision=bf16-mixed", "--trainer.global_batch_size=24"),
        *("--trainer.max_steps=9", "--trainer.val_check_interval=3", "--trainer.gradient_clip_val=0.1"),
        "--trainer.limit_val_batches=5",
        *("--data.init_args.text=../texts", "--data.init_args.held_out=0.2", "--data.init_args.context=16"),
        *("--data.init_args.batch_size=2", "--model.init_args.context=16", "--model.init_args.layers=3"),
        *("--model.init_args.heads=2", "--model.init_args.width=32", "--model.init_args.dropout=0.2"),
        *("--model.init_args.vocabulary=257", "--model.init_args.warmup_steps=3"),
    ),
    # Of somebody who knows nothing of this, in float64; what is drawn in a hook; a kept tail
    "regression": (
        *("fit", "--data=tests.own.PointsData", "--model=tests.own.Shaken", "--trainer.max_epochs=2", *ALL),
        *("--trainer.global_batch_size=24", "--data.init_args.size=140", "--trainer.gradient_clip_val=0.5"),
    ),
}
EXACT = "--trainer.exact=true"


def sharded(**settings) -> str:
    return "--trainer.strategy=" + json.dumps({"class_path": "project.Sharded", "init_args": settings})


def callbacks(*entries) -> str:
    return "--trainer.callbacks=" + json.dumps([GATHER, *entries])


def training(place, runs):
    """Trains one of the runs in a folder of its own; each but once."""
    made = {}

    def train(name, *words, ranks=1, plugged=()):
        key = (name, words, ranks, str(plugged))
        if key not in made:
            folder = place / f"{len(made)}-{name}"
            folder.mkdir()
            done = forked(folder, *runs[name], *words, callbacks(*plugged), ranks=ranks)
            assert done.code == 0, done.output
            made[key] = folder
        return made[key]

    return train


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("sharded")
    write_texts(place / "texts")
    return place


@pytest.fixture(scope="module")
def train(place):
    return training(place, RUNS)


def weights(folder):
    return torch.load(folder / "gathered.pt", weights_only=True)


def far(value, reference):
    """The largest difference."""
    if isinstance(value, dict):
        assert value.keys() == reference.keys()
        return max([0.0, *(far(value[key], reference[key]) for key in value)])
    if isinstance(value, (list, tuple)):
        return max([0.0, *(far(*pair) for pair in zip(value, reference, strict=True))])
    return (
        (value.double() - reference.double()).abs().max().item() if isinstance(value, torch.Tensor) and value.numel() else 0.0
    )


def losses(folder):
    return [value for tag, points in curves(folder).items() if "loss" in tag for _, value in points]


def furthest(state, reference):
    """The largest difference of two states, relative to 1."""
    pairs = [(value, reference[name]) for name, value in state.items() if isinstance(value, torch.Tensor)]
    return max((before.double() - after.double()).abs().max().item() for before, after in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [
        ("gpt", 3, {}),
        ("regression", 2, {"shard": "node"}),
        pytest.param("minires", 3, {}, marks=pytest.mark.slow),
        pytest.param("gpt", 2, {"shard": "gradients", "checkpoint_activations": True}, marks=pytest.mark.slow),
        pytest.param("minires", 2, {"checkpoint_activations": True, "blocks": ["BasicBlock"]}, marks=pytest.mark.faults),
        pytest.param("regression", 3, {"shard": "gradients"}, marks=pytest.mark.faults),
    ],
)
def test_exact_runs_have_the_bits_of_one_rank(train, name, ranks, settings):
    alone = train(name, EXACT, plugged=(EMA,))
    folder = train(name, EXACT, sharded(**settings), ranks=ranks, plugged=(EMA,))
    expected, state = weights(alone), weights(folder)
    assert state.pop("spread")
    assert not expected.pop("spread")
    assert same(expected, state)
    assert expected["average"]
    assert curves(alone) == curves(folder)


@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [
        ("gpt", 3, {}),
        pytest.param("regression", 3, {"shard": "gradients"}, marks=pytest.mark.faults),
        pytest.param("gpt", 2, {"shard": "gradients"}, marks=pytest.mark.faults),
        pytest.param("regression", 2, {"shard": "node"}, marks=pytest.mark.faults),
    ],
)
def test_in_float64_they_are_the_run_of_one_rank(train, name, ranks, settings):
    words = ("--trainer.precision=64-true",)
    alone, folder = train(name, *words), train(name, *words, sharded(**settings), ranks=ranks)
    expected, state = weights(alone), weights(folder)
    assert far(expected["module"], state["module"]) < 1e-12
    losses = [[value for tag, points in curves(run).items() if "loss" in tag for _, value in points] for run in (alone, folder)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)  # written as float32
    assert state["spread"]


def test_buffers_are_those_of_rank_0_as_with_ddp(train):
    """4 micro-batches a rank in each step, and validations between two."""
    words = ("--model=tests.train.gather.Averaged", "--trainer.precision=64-true", "--trainer.val_check_interval=2")
    expected, state = (weights(train("regression", *words, *more, ranks=2)) for more in ((), (sharded(),)))
    assert far(expected["module"], state["module"]) < 1e-12
    assert expected["module"]["average"].std() == 0 != expected["module"]["coarse"]


def test_attributes_of_parameters_and_types_of_modules_are_as_with_ddp(train):
    words = ("--model=tests.train.gather.Grouped", "--trainer.precision=64-true")
    expected, state = (weights(train("regression", *words, *more, ranks=2)) for more in ((), (sharded(),)))
    assert state["spread"]
    assert far(expected["module"], state["module"]) < 1e-12
    groups = [[len(group["params"]) for group in run["optimizers"][0]["param_groups"]] for run in (expected, state)]
    assert groups == [[6, 8], [6, 8]]


@pytest.mark.faults
def test_what_is_computed_and_what_is_sent_may_have_a_type_of_its_own(train):
    words = ("--trainer.precision=32-true",)
    ways = {"none": {}, "computed": {"param_dtype": "bf16", "reduce_dtype": "fp32"}, "sent": {"reduce_dtype": "bf16"}}
    expected = weights(train("gpt", *words))["module"]
    states = {way: weights(train("gpt", *words, sharded(**settings), ranks=2)) for way, settings in ways.items()}
    away = {way: far(expected, state["module"]) for way, state in states.items()}
    assert away["none"] < 1e-5 < away["sent"] < 0.05
    assert 1e-5 < away["computed"] < 0.05
    assert far(states["computed"]["module"], states["sent"]["module"]) > 1e-5
    for state in states.values():  # what is kept is as it was
        assert {value.dtype for value in state["module"].values() if isinstance(value, torch.Tensor)} == {torch.float32}


@pytest.mark.slow
def test_what_is_sent(train):
    """4 micro-batches a rank in each of 9 steps; 3 blocks and the root. Gradients are added up once a step. Parameters are
    gathered once for a forward pass and once for a backward pass, and the root's once for both."""
    folder = train("gpt", sharded(param_dtype="bf16", reduce_dtype="fp32"), ranks=3, plugged=(COUNT,))
    calls = json.loads((folder / "collectives.json").read_text())
    assert calls == {"steps": 9, "reductions": 9 * 4, "gathers": 9 * 4 * (2 * 3 + 1)}


@pytest.mark.parametrize("where", [pytest.param("loss", marks=pytest.mark.faults), "gradient"])
def test_a_step_that_is_not_finite_is_left_out_on_all_ranks(train, where):
    """A rank sees its part of the gradient only, and all of them must know."""
    words = ("--trainer.precision=64-true", "--trainer.nonfinite=skip")
    words += ("--model=tests.train.gather.Poisoned",) if where == "loss" else ()
    plugged = ({"class_path": "tests.train.gather.Poison"},) if where == "gradient" else ()
    folder = train("regression", *words, sharded(), ranks=3, plugged=plugged)
    state = weights(folder)
    assert all(torch.isfinite(value).all() for value in state["module"].values() if value.is_floating_point())
    assert "The step is skipped (1 so far)" in (folder / "output.txt").read_text()
    alone = train("regression", *words, plugged=plugged)
    assert far(weights(alone)["module"], state["module"]) < 1e-12


def test_ranks_may_call_other_blocks_if_all_of_them_do(train):
    words = ("--trainer.precision=64-true", "--model=tests.train.gather.Saving")
    alone, several = (train("regression", *words, sharded(), ranks=ranks) for ranks in (1, 2))
    assert far(weights(alone)["module"], weights(several)["module"]) < 1e-12


def of_two_types():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


def exact(**settings):
    strategy = Sharded(**settings)
    strategy.exact = True
    return strategy


def of_a_frozen_number():
    return nn.ParameterDict({"frozen": nn.Parameter(torch.tensor(1.0), requires_grad=False)})


def hooked(way, name="weight"):
    network = nn.Sequential(nn.Linear(2, 2))
    network[0].weight.register_hook(print).remove()
    network[0].weight.kept = OrderedDict(a=1)
    getattr(getattr(network[0], name), way)(print)
    return network


class Held(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 2))
        self.those = {"a": (self[0].weight,)}


def after_sharding(make):
    """Puts other parameters in the places of a network's, as fully_shard does."""
    network = make()
    replaced, optimizer = Replaced(network), torch.optim.SGD([network[0].bias])
    for name, parameter in list(network[0].named_parameters()):
        setattr(network[0], name, nn.Parameter(parameter.detach().clone()))
    replaced.refuse_optimizers([torch.optim.SGD(network.parameters())])
    if isinstance(network, Held):
        replaced.refuse_holders(SimpleNamespace(callbacks=[], lightning_module=network))
    replaced.refuse_optimizers([optimizer])


def trainer(callback):
    return SimpleNamespace(callbacks=[callback])


REFUSED = {
    "trainer.gradient_compression=bf16 is for Dist": lambda: Sharded().refuse_other_settings("bf16", on_cpu=False),
    "trainer.exact can't be kept: param_dtype": lambda: exact(param_dtype="bf16").refuse_other_settings("none", on_cpu=True),
    "there is none. HINT: leave it out": lambda: Sharded(cpu_offload=True).refuse_other_settings("none", on_cpu=True),
    "the network has no such module": lambda: blocks_of(of_two_types(), ["Blok"]),
    "is one number without a dimension": lambda: refuse_unshardable("", nn.ParameterList([torch.tensor(1.0)])),
    "frozen is one number without a dimension": lambda: refuse_unshardable("", of_a_frozen_number()),
    "are torch.float32 and torch.float64": lambda: refuse_unshardable("", of_two_types()),
    "Duel steps its optimisers by itself": lambda: refuse_own_steps(Duel()),
    "StochasticWeightAveraging keeps a whole network": lambda: weight_averages(trainer(StochasticWeightAveraging(0.1))),
    "0.weight has a hook for its gradient": lambda: refuse_hooks(hooked("register_hook")),
    "0.bias has a hook for its gradient": lambda: refuse_hooks(hooked("register_post_accumulate_grad_hook", "bias")),
    "SGD has 0.bias, which is not in the network": lambda: after_sharding(lambda: nn.Sequential(nn.Linear(2, 2))),
    "Held.those.a.0 holds 0.weight, which is not": lambda: after_sharding(Held),
    "ModelPruning looks for the smallest weights": lambda: refuse_pruning(trainer(ModelPruning("l1_unstructured"))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_can_not_be_sharded_is_refused(message):
    with pytest.raises(UserError, match=re.escape(message)):
        REFUSED[message]()


def test_a_rank_that_calls_other_blocks_alone_is_named(tmp_path):
    """It has nobody to compare with, and the watchdog ends the run."""
    words = ("--model=tests.train.gather.Stray", sharded(checkpoint_activations=True), "--watchdog.at_least=5")
    done = forked(tmp_path, *RUNS["regression"], *words, "--watchdog.factor=2", ranks=2)
    assert done.code == 75, done.output
    assert "rank 0 gathers blocks.1, where until now it gathers blocks.2, and waits for all ranks to do so" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((EXACT, "--model=tests.train.gather.Stale"), "SGD has network.0.weight, which is not in the network any more"),
        ((EXACT, "--model=tests.train.gather.LateHook"), "network.0.weight has a hook for its gradient"),
        ((EXACT, "--model=tests.train.gather.Normed"), "'norm', which is logged, follows from parameters"),
        (("--model=tests.train.gather.OtherOrder",), "gathers blocks.1, where rank 1 gathers blocks.2"),
        (("--model=tests.train.gather.Heads",), "has no gradient of blocks.1.weight"),
        (("--model=tests.train.gather.Unit",), "training_step writes into network.0.weight, which is gathered"),
    ],
)
def test_refused_in_one_line(tmp_path, words, message):
    done = forked(tmp_path, *RUNS["regression"], sharded(), *words, ranks=2)
    assert done.code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output


def test_an_optimiser_steps_on_shards_as_on_dtensors(tmp_path):
    done = forked(tmp_path, ranks=3, program="tests.train.local_steps:main")
    assert done.code == 0, done.output
