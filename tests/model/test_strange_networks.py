"""Networks, optimisers and schedules that were not written for this project: they work, or one line says what to do."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from project.data import ImageData, Synthetic
from project.errors import UserError
from project.model import ImageClassifier
from project.model.start import start_from
from project.trainer import Trainer
from tests.model.strange_networks import Half, Plain

pytestmark = pytest.mark.slow

RUN = (
    *("fit", "--config=configs/ddp.yaml", "--trainer.precision=32-true", "--trainer.max_steps=3", "--data.num_workers=0"),
    *("--data.source.init_args.image_size=8", "--data.source.init_args.train_size=96", "--data.source.init_args.val_size=16"),
    *("--data.batch_size=8", "--data.global_batch_size=24", "--trainer.log_every_n_steps=1"),
)


def given(key, name, /, **init_args):
    return f"--{key}={json.dumps({'class_path': f'tests.model.strange_networks.{name}', 'init_args': init_args})}"


def assert_one_line(run, *parts, ranks=1):
    assert run.code in (1, 2), run.output
    assert "Traceback" not in run.output, run.output
    assert run.output.count("ERROR") == ranks, run.output  # plain Python ends the others before they repeat it; nobody here
    for part in parts:
        assert part in run.output, run.output


WRONG = {
    "TwoHeads": (1, "The network's output is a tuple of 2 (a tensor (8, 10), a tensor (8, 10)), and not one tensor of logits"),
    "Map": (1, "The network's output has shape (8, 10, 1, 1), and the data has 10 classes. HINT: return logits"),
    "Frozen": (3, "The network can't learn: all its parameters are frozen. HINT"),
    "Nothing": (1, "The network can't learn: it has no parameters. HINT"),
    "Unused": (3, "2 parameters of the network have no part in the loss: network.forgotten.weight, network.forgotten.bias."),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_network_that_can_not_be_trained_is_one_line_before_its_first_step(quick, name):
    ranks, text = WRONG[name]
    run = quick(*RUN, given("model.network", name), ranks=ranks)
    assert_one_line(run, text, ranks=ranks)
    assert not list(run.folder.glob("lightning_logs/*/checkpoints/*.ckpt"))


def test_parameters_that_are_not_used_train_on_one_rank_and_with_the_strategy_that_looks_for_them(quick):
    unused = given("model.network", "Unused")
    for words, ranks in (((), 1), (("--trainer.strategy=ddp_find_unused_parameters_true",), 3)):
        run = quick(*RUN, unused, *words, ranks=ranks)
        assert run.code == 0, run.output


@pytest.mark.parametrize("outputs", [5, 12])
def test_a_number_of_classes_that_is_stated_twice_and_differs_is_said_at_once(quick, outputs):
    run = quick(*RUN, given("model.network", "Plain", num_classes=outputs))
    if outputs < 10:
        assert_one_line(run, "has shape (8, 5), and the data has 10 classes. HINT: set model.network.init_args.num_classes=10.")
    else:
        assert run.code == 0, run.output
        assert run.output.count("The network has 12 outputs, and the data has 10 classes.") == 1


def test_lbfgs_and_pruning_find_weights_in_one_row(tmp_path):
    """Without checkpoints: a run could not resume from one, as the network is another after pruning."""
    lbfgs = partial(torch.optim.LBFGS, lr=0.1, max_iter=3)
    for callbacks, settings in (([Half()], {}), ([], {"optimizer": lbfgs})):
        network = Plain()
        trainer = Trainer(
            max_epochs=2, callbacks=callbacks, enable_checkpointing=False, logger=False, default_root_dir=tmp_path,
            accelerator="cpu",
        )  # fmt: skip
        data = ImageData(Synthetic(train_size=32, val_size=8, image_size=8), batch_size=8)
        trainer.fit(ImageClassifier(network, **settings), datamodule=data)
        assert not callbacks or (network.body[0].weight == 0).float().mean() > 0.45


# Where weights come from ---------------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path):
    """Weights of a network with seven classes, in the shape that another project might have left them in."""
    state = {f"module.{name}": torch.full_like(value, 0.25) for name, value in Plain(7).state_dict().items()}
    torch.save({"epoch": 3, "model": {**state, "criterion.weight": torch.ones(7)}}, tmp_path / "theirs.pt")
    return tmp_path / "theirs.pt"


def first_weights(folder: Path, run: str = "it") -> torch.Tensor:
    path = folder / f"lightning_logs/{run}/checkpoints/step-000000001.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]["network.body.0.weight"]


STILL = ("--model.optimizer.init_args.lr=0", "--trainer.max_steps=1", "--run=it")


def test_a_network_begins_with_the_weights_of_another_project(quick, weights):
    words = (given("model.network", "Plain"), f"--model.init_from={weights}")
    run = quick(*RUN, *words, "--model.init_prefix=module.", *STILL, ranks=3)
    assert run.code == 0, run.output
    assert "9 of the network's 11 tensors begin as in " in run.output
    assert "Of another shape: head.weight ((7, 32) there, (10, 32) here), head.bias ((7,) there, (10,) here)" in run.output
    assert "not in the network: criterion.weight" in run.output
    assert run.output.count("What did not fit") == 1
    assert torch.equal(first_weights(run.folder), torch.full((8, 3, 3, 3), 0.25))

    # What was begun resumes from its own checkpoint, and needs the file no more.
    weights.unlink()
    resumed = quick(*RUN, *words, "--model.init_prefix=module.", *STILL, "--trainer.max_steps=2", ranks=3)
    assert resumed.code == 0, resumed.output
    assert "begin as in" not in resumed.output


def test_a_network_begins_with_the_weights_of_a_run_before(quick):
    first = quick(*RUN, given("model.network", "Plain"), *STILL)
    path = first.folder / "lightning_logs/it/checkpoints/step-000000001.ckpt"
    second = quick(
        *RUN, given("model.network", "Plain"), *STILL, "--run=second", "--seed_everything=7", f"--model.init_from={path}",
        "--model.init_prefix=network.",
    )  # fmt: skip
    assert second.code == 0, second.output
    assert "11 of the network's 11 tensors" in second.output
    assert "did not fit" not in second.output
    assert torch.equal(first_weights(first.folder), first_weights(first.folder, "second"))


NO_START = {
    "Nothing in {} fits the network: its first name is 'module.body.0.weight', the network's is 'body.0.weight'. HINT: with "
    "model.init_prefix='module.' 9 of 11 would fit.": lambda path: None,
    "There is no file {}. HINT: model.init_from is the path of a state_dict or a checkpoint.": Path.unlink,
    "{} can't be read: it is not a file of torch.save, or it holds more than weights and plain values": (
        lambda path: torch.save({"model": Plain()}, path)
    ),
    "There are no weights in {}, but the keys epoch. HINT": lambda path: torch.save({"epoch": 3}, path),
    "{} can't be read: it is not a file of torch.save": lambda path: path.write_text("weights"),
}


@pytest.mark.parametrize("text", NO_START)
def test_a_start_that_is_none_is_one_line(weights, text):
    NO_START[text](weights)
    with pytest.raises(UserError) as raised:
        start_from(Plain(), weights)
    assert str(raised.value).startswith(text.format(weights))
    assert "HINT" in str(raised.value)


# Whatever their signatures say ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["unannotated", "create", "create_anything", "Forwarding"])
def test_a_function_is_a_network_whatever_its_signature_says(quick, tmp_path, name):
    """From a YAML with other arguments that the command line overrides; and the run's own config runs again."""
    init_args = {"num_classes": 11, **({"name": "Plain"} if name.startswith("create") else {})}
    network = {"class_path": f"tests.model.strange_networks.{name}", "init_args": init_args}
    schedule = {"class_path": "tests.model.strange_networks.halving", "init_args": {"gamma": 0.25}}
    (tmp_path / "guest.yaml").write_text(yaml.safe_dump({"model": {"network": network, "lr_scheduler": schedule}}))
    words = ("--trainer.limit_val_batches=0", "--model.lr_scaling=none")
    run = quick(*RUN, "--config=guest.yaml", "--model.network.init_args.num_classes=10", *words, "--run=it")
    assert run.code == 0, run.output
    assert "outputs" not in run.output  # as many as classes
    assert [value for _, value in run.events("train/lr")] == pytest.approx([0.01 / 4, 0.01 / 16, 0.01 / 64])
    if name in ("unannotated", "create_anything"):  # those of which a config can say least
        rerun = quick("fit", f"--config={run.folder}/lightning_logs/it/config.yaml", "--run=again")
        assert rerun.code == 0, rerun.output
        assert "outputs" not in rerun.output


def test_a_function_is_a_schedule_or_an_optimiser_by_its_name_alone(quick):
    names = {"lr_scheduler": "halving", "optimizer": "descent"}
    words = (f"--model.{key}=tests.model.strange_networks.{name}" for key, name in names.items())
    run = quick(*RUN, *words, "--model.lr_scaling=none")
    assert run.code == 0, run.output
    assert [value for _, value in run.events("train/lr")] == pytest.approx([0.1 / 2, 0.1 / 4, 0.1 / 8])


def test_a_function_is_a_dataset(quick):
    made = {"class_path": "tests.data.strange.make", "init_args": {"how": "dict", "size": 96}}
    source = {"class_path": "project.data.Datasets", "init_args": {"num_classes": 10, "train": made}}
    words = [argument for argument in RUN if "source" not in argument]
    run = quick(*words, f"--data.source={json.dumps(source)}", "--run=it", "--checkpoints.every_n_steps=2", ranks=3)
    assert run.code == 0, run.output
    # There is no validation set, which is said once, and the run goes on without.
    assert run.output.count("There is no validation set, and so no validation.") == 1
    assert "val/" not in run.output
    assert (run.folder / "lightning_logs/it/checkpoints/step-000000003.ckpt").exists()
    resumed = quick(*words, f"--data.source={json.dumps(source)}", "--run=it", "--trainer.max_steps=7", ranks=3)
    assert resumed.code == 0, resumed.output
    assert "Resumes from" in resumed.output or "Takes up" in resumed.output
    assert (run.folder / "lightning_logs/it/checkpoints/step-000000007.ckpt").exists()
    validated = quick(
        "validate",
        *words[1:4],
        f"--data.source={json.dumps(source)}",
        "--ckpt_path=" + str(run.folder / "lightning_logs/it/checkpoints/step-000000007.ckpt"),
    )
    assert_one_line(validated, "There is no val set. HINT: set data.source.init_args.val.")


def test_what_a_function_returns_is_looked_at(quick):
    assert_one_line(quick(*RUN, given("model.network", "no_network")), "model.network made a str, and not a torch.nn.Module.")
    run = quick(*RUN, "--model.lr_scheduler=tests.model.strange_networks.no_schedule")
    assert_one_line(run, "model.lr_scheduler made a NoneType, and not a torch.optim.lr_scheduler.LRScheduler.")


def test_a_typo_is_still_one_where_the_arguments_are_known(quick):
    run = quick(*RUN, '--model.network={"class_path": "torchvision.models.resnet18", "init_args": {"num_clases": 10}}')
    assert_one_line(run, "num_clases")
    assert_one_line(quick(*RUN, given("model.network", "unannotated", num_clases=10)), "num_clases")
    assert_one_line(
        quick(*RUN, given("model.network", "create_anything", **{"name": "Plain", "num_clases": 10})),
        "num_clases",
        "can't be called so",
    )
