"""The front door: configs, flags, folders; and what a user gets wrong is one line."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from project.cli import expand
from project.cluster.launcher import Launch
from project.run import open_run
from tests.conftest import ROOT, TINY, environment

DDP = "--config=configs/ddp.yaml"


def test_a_run_has_a_folder_with_all_that_belongs_to_it(quick):
    run = quick("fit", DDP, *TINY, "--trainer.max_epochs=1", "--run=first")
    assert run.code == 0, run.output
    (folder,) = run.runs
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "log.txt", "checkpoints"} <= names
    assert any(name.startswith("events.out") for name in names)
    assert folder.name == "first"
    for wanted in ("global batch 128", "val/acc", "samples/s", str(folder / "checkpoints"), "tensorboard --logdir"):
        assert wanted in run.output, wanted
    assert "val/acc" in (folder / "log.txt").read_text()
    for unwanted in ("Tip", "litlogger", "Warning", "WARNING", "deprecat", "rank_zero"):
        assert unwanted not in run.output, unwanted
    assert list(run.curve("train/loss")) == [1, 2]
    assert list(run.curve("val/acc")) == [2]

    # Nothing overwrites it, and what was saved is a config that runs.
    for verb, resume in (("fit", "--resume=never"), ("validate", "--resume=auto")):
        again = quick(verb, DDP, *TINY, "--run=first", resume)
        assert again.code == 1
        assert "choose another --run" in again.output
    saved = quick("fit", f"--config={folder}/config.yaml", "--trainer.max_steps=1", "--run=second")
    assert saved.code == 0, saved.output
    assert len(saved.runs) == 2


def test_validate_test_and_predict_from_a_checkpoint(quick, cli):
    fitted = quick("fit", DDP, *TINY, "--trainer.max_epochs=1", "--run=fitted")
    checkpoint = f"--ckpt_path={fitted.folder}/lightning_logs/fitted/checkpoints/step-000000002.ckpt"
    assert "test/acc" in quick("test", DDP, *TINY, checkpoint).output
    assert "val/acc" in quick("validate", DDP, *TINY, checkpoint).output
    predicted = cli("predict", DDP, *TINY, checkpoint, "--trainer.devices=2", "--run=predicted")
    assert predicted.code == 0, predicted.output
    lines = (predicted.folder / "lightning_logs/predicted/predictions.csv").read_text().splitlines()
    assert lines[0] == "sample,label,confidence"
    assert [int(line.split(",")[0]) for line in lines[1:]] == list(range(101))


MISTAKES = {
    "a config that is not there": (["fit", "--config=nope.yaml"], "no config 'nope.yaml'"),
    "a typo in a flag": (["fit", DDP, "--trainer.max_epoch=3"], "unrecognized arguments: --trainer.max_epoch"),
    "a typo in YAML": (["fit", "--config=typo.yaml"], "trainer.max_epoch"),
    "broken YAML": (["fit", "--config=broken.yaml"], "broken.yaml, line 2, column 1: this is not YAML"),
    "configs in a circle": (["fit", "--config=circle.yaml"], "stand on each other"),
    "a scheduler without its optimiser": (["fit", DDP, "--lr_scheduler=StepLR"], "unrecognized arguments"),
    "a device that is none": (["fit", DDP, "--trainer.devices=x"], "The trainer's settings don't work here"),
    "a class that is not there": (["fit", DDP, "--data.source=project.data.Nope"], "Nope"),
    "a world size that does not fit": (["fit", DDP, "--trainer.devices=3"], "ranks that fit: 1, 2, 4, 8"),
    "nodes that nobody launched": (["fit", DDP, "--trainer.num_nodes=2"], "launch.sh"),
    "a checkpoint that is not there": (["fit", DDP, "--ckpt_path=nope.ckpt"], "no checkpoint nope.ckpt"),
    "a checkpoint that is cut short": (["fit", DDP, "--ckpt_path=short.ckpt"], "can't be read as a checkpoint"),
    "a folder that is not there": (["fit", "--config=configs/imagefolder.yaml"], "No folder datasets/images/train"),
    "too few classes": (["fit", DDP, "--model.network.init_args.num_classes=5"], "num_classes=10"),
    "data smaller than a batch": (["fit", DDP, "--data.source.init_args.train_size=9"], "too few for a global batch"),
    "overfit_batches": (["fit", DDP, "--trainer.overfit_batches=2"], "configs/debug.yaml"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_no_traceback(quick, tmp_path, mistake):
    (tmp_path / "typo.yaml").write_text("trainer:\n  max_epoch: 1\n")
    (tmp_path / "broken.yaml").write_text("trainer: {max_epochs: 1\n")
    (tmp_path / "circle.yaml").write_text("base: circle.yaml\n")
    (tmp_path / "short.ckpt").write_bytes(b"PK\x03\x04 and no more")
    words, cause = MISTAKES[mistake]
    verb, config, *wrong = words
    run = quick(verb, config, *(TINY if config == DDP else []), "--trainer.num_sanity_val_steps=0", *wrong)
    assert run.code in (1, 2), run.output
    assert cause in run.output
    assert "Traceback" not in run.output
    assert run.output.count("ERROR") == 1


def test_a_checkpoint_does_not_override_the_command_line(quick):
    first = quick("fit", DDP, *TINY, "--trainer.max_epochs=1", "--run=first", "--model.label_smoothing=0.2")
    checkpoint = first.folder / "lightning_logs/first/checkpoints/step-000000002.ckpt"
    second = quick("fit", DDP, *TINY, "--trainer.max_epochs=2", "--run=second", f"--ckpt_path={checkpoint}")
    assert second.code == 0, second.output
    saved = yaml.safe_load((first.folder / "lightning_logs/second/config.yaml").read_text())
    assert saved["model"]["label_smoothing"] == 0.0


def test_print_config_is_complete_and_stands_alone(quick):
    run = quick("fit", "--config=configs/vit.yaml", "--print_config")
    config = yaml.safe_load(run.output)
    assert config["base"] is None
    assert config["trainer"]["strategy"] == "ddp"  # from the base
    assert config["model"]["network"]["class_path"] == "torchvision.models.VisionTransformer"
    assert config["data"]["source"]["init_args"]["num_classes"] == 10  # a default


def test_help_has_a_line_for_every_key(quick):
    run = quick("fit", "--help")
    assert run.code == 0
    for key in ("--data.global_batch_size", "--model.lr_scaling", "--trainer.accumulate_grad_batches", "--run"):
        assert key in run.output
    assert "samples behind one optimiser step" in run.output


def test_bases_come_first_and_are_found_beside_the_config(tmp_path: Path):
    (tmp_path / "low.yaml").write_text("base: ddp.yaml\n")
    (tmp_path / "high.yaml").write_text("base: low.yaml\n")
    words = expand(["fit", "-c", str(tmp_path / "high.yaml"), "--x=1"])
    found = [Path(word).name for word in words[2::2]]
    assert found == ["ddp.yaml", "low.yaml", "high.yaml"]
    assert words[0] == "fit"
    assert words[-1] == "--x=1"


def test_two_runs_in_the_same_second_have_two_folders(tmp_path):
    assert len({open_run(tmp_path, None, "x", Launch("python")).folder for _ in range(5)}) == 5


def test_version_answers_without_loading_torch():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "project", "--version"],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("project ")
    assert "torch" not in done.stderr


@pytest.mark.timed
def test_help_is_not_much_slower_than_the_import_of_lightnings_cli():
    """The bound is one second; in turns, the best of three each, and the noise of a busy machine on top."""

    def best(*words: str) -> float:
        def once() -> float:
            start = time.monotonic()
            subprocess.run([sys.executable, *words], env=environment(), cwd=ROOT, check=True, capture_output=True)
            return time.monotonic() - start

        return min(once() for _ in range(3))

    assert best("-m", "project", "--help") - best("-c", "import lightning.pytorch.cli") < 2
