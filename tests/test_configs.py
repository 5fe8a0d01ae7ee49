"""Every config runs as it is, and learns; with --faults the two that promise an accuracy reach it."""

import re
from functools import partial

import pytest
from PIL import Image

from tests.conftest import ROOT

SHORT = ("--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--data.num_workers=0")
SMALL = (*SHORT, "--model.network.init_args.widths=[8,16]", "--model.network.init_args.blocks=1")
CONFIGS = {
    "full": SMALL,
    "ddp_cluster": SMALL,
    "vit": SHORT,
    "debug": (),
    "profile": (),
    "imagefolder": (
        *(*SHORT, "--data.source.root=images", "--model.network.init_args.num_classes=2"),
        *("--data.batch_size=2", "--data.global_batch_size=4"),
    ),
    "bench": SMALL,
    "csv": SMALL,
    "wandb": SMALL,
    "mlflow": SMALL,
    "gpt": ("--trainer.max_steps=2", "--trainer.limit_val_batches=1"),
    "gpt_cluster": (  # 1024 windows a step
        *("--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--model.init_args.layers=1", "--model.init_args.width=32"),
        *("--data.init_args.context=16", "--model.init_args.context=16"),
    ),
    "gpt_sharded": ("--trainer.max_steps=2", "--trainer.limit_val_batches=1"),
    "cifar10": (*SHORT, "--data.source=project.data.Synthetic"),  # its source, which downloads, has tests of its own
}
LONGEST = {"cifar10", "profile"}
"""Left to --faults: a network as in the others, and tests/watch/test_profile.py has what the other sets."""


def test_all_configs_are_tested():
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == CONFIGS.keys() | {"ddp", "digits"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.faults) if name in LONGEST else name for name in CONFIGS]
)
def test_it_runs(quick, tmp_path, name):
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / "images" / split / label).mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (70, 80), (number * 40, 0, 0)).save(tmp_path / "images" / split / label / f"{number}.png")
    quick = partial(quick, ranks=2) if name == "gpt_sharded" else quick
    run = quick("fit", f"--config=configs/{name}.yaml", *CONFIGS[name], "--run=it")
    assert run.code == 0, run.output
    assert "WARNING" not in run.output
    if name == "debug":  # it knows its few images by heart, and that is what it ends on
        assert "train/acc 1.0000" in run.output.split("last epoch")[1].splitlines()[0]
        assert "val/acc" not in run.output
    if name == "profile":
        assert {path.suffix for path in (tmp_path / "lightning_logs/it/profiles").iterdir()} == {".txt", ".gz"}

    # What it saved runs again as it is, and saves the same.
    saved = tmp_path / "lightning_logs/it/config.yaml"
    shorter = {"debug": ("max_epochs", 20), "profile": ("max_steps", 6)}.get(name)
    rerun = quick("fit", f"--config={saved}", *([f"--trainer.{shorter[0]}=1"] if shorter else []))
    assert rerun.code == 0, rerun.output
    (second,) = (tmp_path / "lightning_logs").glob("it-*/config.yaml")
    expected = saved.read_text()
    assert second.read_text() == (expected.replace("{}: {}".format(*shorter), f"{shorter[0]}: 1") if shorter else expected)


def accuracy(output: str, tag: str) -> float:
    return float(re.findall(rf"{tag} ([\d.]+)", output)[-1])


@pytest.mark.slow
def test_a_few_epochs_learn_real_digits(quick):
    """A network of a few thousand parameters reaches 94 % in five epochs; without learning it is 10 %."""
    small = ("--model.network.init_args.widths=[16,32]", "--model.network.init_args.blocks=1", "--trainer.precision=32-true")
    often = ("--trainer.max_epochs=5", "--model.optimizer.init_args.lr=0.1", "--data.num_workers=0")
    run = quick("fit", "--config=configs/digits.yaml", *small, *often)
    assert run.code == 0, run.output
    assert accuracy(run.output, "val/acc") > 0.85


@pytest.mark.timed  # it has both cores for itself, and is over in a quarter of the time
@pytest.mark.faults
def test_the_main_config_reaches_the_accuracy_that_its_difficulty_allows(cli):
    run = cli("fit", "--config=configs/ddp.yaml", "--trainer.devices=2")
    assert run.code == 0, run.output
    assert accuracy(run.output, "val/acc") == pytest.approx(1 - 0.1 * (1 - 1 / 10), abs=0.02)


@pytest.mark.slow
@pytest.mark.faults
def test_digits_reach_98_percent(quick, tmp_path):
    fitted = quick("fit", "--config=configs/digits.yaml", "--run=digits")
    checkpoint = max((tmp_path / "lightning_logs/digits/checkpoints").glob("*.ckpt"))
    tested = quick("test", "--config=configs/digits.yaml", f"--ckpt_path={checkpoint}")
    assert accuracy(tested.output, "test/acc") >= 0.98, fitted.output + tested.output
