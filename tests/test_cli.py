"""The front door: configs, flags, folders; and what a user gets wrong is one line."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonargparse import Namespace

from project.cli import runs as listing
from project.cli.config import Parser
from project.cli.keys import help_page
from project.cli.verbs import sentence
from project.config_files import TRAINING, expand
from project.errors import UserError
from project.launch.launcher import Launch
from project.runs import open_run
from project.watch.history import lives_of
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

    # Nothing overwrites it, nothing is left to do, and what was saved is a config that runs.
    refused = quick("fit", DDP, *TINY, "--run=first", "--resume=never")
    assert refused.code == 2
    assert "choose another --run" in refused.output
    finished = quick("fit", "--run=first")
    assert "after 2 steps: nothing was left to do" in finished.output
    longer = quick("fit", "--run=first", "--trainer.max_epochs=2")
    assert longer.code == 0
    assert "nothing" not in longer.output
    saved = quick("fit", f"--config={folder}/config.yaml", "--trainer.max_steps=1")
    assert saved.code == 0, saved.output
    assert len(saved.runs) == 2
    assert saved.runs[1].name.startswith("first-")
    named = quick("fit", "--run=other", "--trainer.max_steps=1", f"--config={folder}/config.yaml")
    assert [path.name for path in named.runs if not path.name.startswith("first")] == ["other"], named.output
    assert list(named.runs[-1].glob("checkpoints/step-000000001*.ckpt"))
    dry = quick("fit", "--dry_run", f"--config={folder}/config.yaml")
    assert dry.code == 0, dry.output
    assert dry.runs == named.runs


@pytest.mark.slow
def test_validate_test_and_predict_take_the_weights_of_a_run(quick, cli):
    fitted = quick("fit", DDP, *TINY, "--trainer.max_epochs=2", "--run=it", "--checkpoints.every_n_steps=1")
    (folder,) = fitted.runs
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    best = max(json.loads(path.read_text())["metrics"].get("val/acc", 0) for path in (folder / "checkpoints").glob("*.json"))
    checkpoint = max((folder / "checkpoints").glob("*.ckpt"))

    validated = quick("validate", "--run=it")
    assert f"val/acc {best:.4f}" in validated.output  # of the best, and neither of the last nor of none
    assert "the newest" in quick("test", "--run=it", "--ckpt_path=last").output
    assert f"val/acc {best:.4f}" in quick("validate", DDP, *TINY, "--run=it", "--ckpt_path=best").output
    predicted = cli("predict", "--run=it", "--trainer.devices=2")
    assert predicted.code == 0, predicted.output
    lines = next(folder.glob("predict-*/predictions.csv")).read_text().splitlines()
    assert lines[0] == "sample,label,confidence"
    assert [int(line.split(",")[0]) for line in lines[1:]] == list(range(101))
    assert all(path.read_bytes() == content for path, content in before.items())  # the run is as it was
    assert not [path for path in folder.rglob("events.*") if path not in before]  # nor is the dashboard littered
    figures = json.loads(next(folder.glob("validate-*/validate.json")).read_text())
    assert figures["metrics"]["val/acc"] == pytest.approx(best)
    assert Path(figures["checkpoint"]).parent == folder / "checkpoints"

    # By its path, a checkpoint is nobody's run.
    assert "test/acc" in quick("test", DDP, *TINY, f"--ckpt_path={checkpoint}", "--run=apart").output
    figures = json.loads((folder.parent / "apart/test.json").read_text())["metrics"]
    assert {name.partition("/")[0] for name in figures} == {"test"}  # and not what the checkpoint's training measured
    # Each limit is of one verb.
    quick("test", DDP, *TINY, f"--ckpt_path={checkpoint}", "--run=apart", "--trainer.limit_predict_batches=1")
    repeated = [json.loads(path.read_text())["metrics"] for path in (folder.parent / "apart").glob("test-*/test.json")]
    assert repeated == [figures]
    limits = ("--trainer.limit_test_batches=1", "--trainer.limit_predict_batches=2", "--data.batch_size=16")
    quick("predict", DDP, *TINY, f"--ckpt_path={checkpoint}", "--run=few", *limits)
    assert len((folder.parent / "few/predictions.csv").read_text().splitlines()) == 1 + 2 * 16
    for words, cause in (
        ((), "test needs weights. HINT: --run NAME"),
        (("--ckpt_path=best",), "test needs weights"),
        (("--run=nope",), "The run nope has no good checkpoint"),
        (("--run=it", "--checkpoints.monitor=val_acc", "--ckpt_path=best"), "has the metric 'val_acc' (there are: "),
    ):
        refused = quick("test", DDP, *TINY, *words)
        assert refused.code == 2
        assert cause in refused.output
    assert not [path for path in folder.parent.iterdir() if path.name not in ("it", "apart", "few")]


def test_a_run_that_only_tries_the_code_leaves_nothing_to_go_on_from(quick):
    tried = quick("fit", DDP, *TINY, "--trainer.fast_dev_run=2", "--run=it")
    assert tried.code == 0, tried.output
    (folder,) = tried.runs
    assert not [*folder.glob("checkpoints/*"), *folder.glob("config.yaml")]
    fitted = quick("fit", DDP, *TINY, "--trainer.max_epochs=1", "--run=it")
    assert "Goes on" not in fitted.output
    assert fitted.code == 0, fitted.output


MISTAKES = {
    "no words at all": ([], 'expected "subcommand" to be one of {fit,validate,'),
    "a config that is not there": (["fit", "--config=nope.yaml"], "no config 'nope.yaml'"),
    "a typo in a flag": (["fit", DDP, "--trainer.max_epoch=3"], "no key trainer.max_epoch. Did you mean trainer.max_epochs?"),
    "a typo in YAML": (["fit", "--config=typo.yaml"], "typo.yaml, line 2: There is no key trainer.max_epoch. Did you mean"),
    "a typo in a class": (["fit", DDP, "--data.source.trainsize=9"], "Did you mean data.source.init_args.train_size?"),
    "a typo in a verb": (["fitt", DDP], "There is no verb 'fitt'. Did you mean fit?"),
    "no config": (["fit", "--run=x"], "Nothing says how long to train. HINT: --config configs/ddp.yaml"),
    "a run without its config": (["fit", "--run=./kept"], "kept/config.yaml, by which it would continue. HINT: put it back"),
    "a logger not installed": (["fit", DDP, "--trainer.logger=CometLogger"], "CometLogger can't be made: Requirement"),
    "a metric that nobody logs": (["fit", DDP, "--checkpoints.monitor=val_acc"], "no such metric. Did you mean val/acc?"),
    "a negative batch": (["fit", DDP, "--data.global_batch_size=-64"], "data.global_batch_size is a number of samples"),
    "a negative margin": (["fit", DDP, "--data.crop_padding=-1"], "data.crop_padding is a number of pixels"),
    "a negative rate": (["fit", DDP, "--model.optimizer.lr=-1"], "model.optimizer can't be made: Invalid learning rate"),
    "an optimiser for other gradients": (
        ["fit", DDP, "--model.optimizer=torch.optim.SparseAdam"],
        "model.optimizer can't be made: SparseAdam does not support dense gradients",
    ),
    "a network for larger images": (
        ["fit", DDP, "--model.network=torchvision.models.alexnet", "--trainer.num_sanity_val_steps=0"],
        "HINT: model.network has to fit the images of data.source",
    ),
    "a negative limit": (["fit", DDP, "--trainer.limit_train_batches=-3"], "limit_train_batches is 0 at least"),
    "more epochs at least than at most": (
        ["fit", DDP, "--trainer.min_epochs=5", "--trainer.max_epochs=3"],
        "--trainer.min_epochs: trainer.min_epochs=5 is more than trainer.max_epochs=3",
    ),
    "more steps at least than at most": (
        ["fit", DDP, "--trainer.min_steps=5", "--trainer.max_steps=3"],
        "--trainer.min_steps: trainer.min_steps=5 is more than trainer.max_steps=3",
    ),
    "a share of 5": (["fit", DDP, "--trainer.limit_val_batches=5.0"], "HINT: write 5"),
    "an interval of nothing": (["fit", DDP, "--trainer.val_check_interval=0"], "a number of steps (10) or a share"),
    "an interval beyond the epoch": (["fit", DDP, "--trainer.val_check_interval=99"], "more than the 2 steps of an epoch"),
    "an interval of no epochs": (["fit", DDP, "--trainer.check_val_every_n_epoch=0"], "check_val_every_n_epoch is 1 at least"),
    "no time": (["fit", DDP, "--checkpoints.every_n_minutes=0"], "every_n_minutes is more than 0"),
    "no epochs": (["fit", DDP, "--trainer.max_epochs=0"], "Not one step was trained"),
    "a negative seed": (["fit", DDP, "--seed_everything=-1"], "seed_everything is a number from 0"),
    "labels all smoothed": (["fit", DDP, "--model.label_smoothing=1"], "label_smoothing is a share"),
    "broken YAML": (["fit", "--config=broken.yaml"], "broken.yaml, line 2, column 1: this is not YAML"),
    "a key that is there twice": (
        ["fit", "--config=twice.yaml"],
        "twice.yaml, line 3, column 3: this is not YAML: the key max_epochs",
    ),
    "an empty config": (["fit", "--config=empty.yaml"], "Nothing says how long to train. HINT: --config"),
    "configs in a circle": (["fit", "--config=circle.yaml"], "stand on each other"),
    "a class that is not there": (["fit", DDP, "--data.source=project.data.Nope"], "Nope"),
    "nodes that nobody launched": (["fit", DDP, "--trainer.num_nodes=2"], "launch.sh"),
    "a checkpoint that is cut short": (["fit", DDP, "--ckpt_path=short.ckpt"], "can't be read as a checkpoint"),
    "a folder that is not there": (["fit", "--config=configs/imagefolder.yaml"], "No folder datasets/images/train"),
    "too few classes": (["fit", DDP, "--model.network.num_classes=5", "--trainer.num_sanity_val_steps=0"], "num_classes=10"),
    "data smaller than a batch": (["fit", DDP, "--data.source.init_args.train_size=9"], "too few for a global batch"),
    "a class that refuses a number": (
        ["fit", DDP, "--model.network.num_classes=-1"],
        "--model.network.init_args.num_classes: project.model.MiniResNet can't be made of num_classes=-1",
    ),
    "a callback that refuses a number": (
        [
            "fit",
            DDP,
            '--trainer.callbacks={"class_path": "project.watch.throughput.Throughput", "init_args": {"every_n_steps": 0}}',
        ],
        "every_n_steps is a number of steps, not 0",
    ),
    "a checkpoint of another kind": (["fit", DDP, "--ckpt_path=text.ckpt"], "can't be read as a checkpoint: KeyError"),
    "a schedule that divides by 0": (
        ["fit", DDP, "--model.lr_scheduler=StepLR", "--model.lr_scheduler.step_size=0"],
        "model.lr_scheduler can't be made: integer modulo by zero",
    ),
    "images of no pixel": (["fit", DDP, "--data.source.init_args.image_size=0"], "image_size is 1 at least"),
    "stages without blocks": (["fit", DDP, "--model.network.init_args.blocks=0"], "blocks is 1 at least"),
    "a strategy that there is not": (["fit", DDP, "--trainer.strategy=ddpp"], "--trainer.strategy: "),
    "a time in no unit": (["fit", DDP, "--trainer.max_time={hourz: 1}"], "--trainer.max_time: "),
    "a global batch of nothing": (["fit", DDP, "--trainer.global_batch_size=0"], "--trainer.global_batch_size: "),
    "fewer sanity steps than all": (["fit", DDP, "--trainer.num_sanity_val_steps=-2"], "--trainer.num_sanity_val_steps: "),
    "a name too long for a folder": (["fit", DDP, f"--run={'a' * 300}"], "A run's name has 200 characters at most"),
    "a global batch above the data's": (
        [
            *("fit", "--model=tests.own.Regression", "--data=tests.own.PointsData", "--trainer.max_epochs=1"),
            "--trainer.global_batch_size=128",
        ],
        "50 training sample(s) are too few for a global batch of 128",
    ),
    "two global batches": (["fit", DDP, "--trainer.global_batch_size=64"], "HINT: set data.global_batch_size, and leave out"),
    "a run that ends before it begins": (["fit", DDP, "--model.lr_scheduler.total_steps=-1"], "total_steps is 1 at least"),
    "a folder in a file": (
        ["fit", DDP, "--trainer.default_root_dir=empty.yaml"],
        "--trainer.default_root_dir: The run's folder",
    ),
    "a precision that there is not": (["fit", DDP, "--trainer.precision=17"], "precision"),
    "a strategy of Lightning's": (
        ["fit", DDP, "--trainer.strategy=ModelParallelStrategy"],
        "--trainer.strategy: The trainer's settings don't work here: trainer.strategy=ModelParallelStrategy: You selected",
    ),
    "a global batch that does not fit": (["fit", DDP, "--data.batch_size=48"], "can't make a global batch of 128"),
    "overfit_batches": (["fit", DDP, "--trainer.overfit_batches=2"], "configs/debug.yaml"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_no_traceback(quick, tmp_path, mistake):
    (tmp_path / "typo.yaml").write_text("trainer:\n  max_epoch: 1\n")
    (tmp_path / "broken.yaml").write_text("trainer: {max_epochs: 1\n")
    (tmp_path / "twice.yaml").write_text("trainer:\n  max_epochs: 1\n  max_epochs: 2\n")
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    (tmp_path / "circle.yaml").write_text("base: circle.yaml\n")
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "short.ckpt").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "kept").mkdir()
    words, cause = MISTAKES[mistake]
    small = TINY if words[:2] == ["fit", DDP] else []
    run = quick(*words[:2], *small, *words[2:])
    assert run.code == 2, run.output
    assert cause in run.output
    assert "Traceback" not in run.output
    assert run.output.count("ERROR") == 1
    assert not list(tmp_path.glob("lightning_logs/*"))  # a fit that is refused leaves no run


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_run_that_crashes_before_it_trains_is_named_and_listed(quick, ranks):
    own = ("--model=tests.survive.broken.Unprepared", "--data=tests.own.PointsData", "--trainer.accelerator=cpu")
    run = quick("fit", *own, "--trainer.max_epochs=1", "--run=it", ranks=ranks)
    assert run.code == 1, run.output
    (folder,) = run.runs
    assert run.output.count(f"Run: {folder}\n") == 1
    (listed,) = listing.listed(folder.parent)
    assert (listed.state, listed.step, listed.ranks, listed.disposable) == ("failed", 0, ranks, True)
    (life,) = lives_of(folder / "life.jsonl")
    assert life.why.endswith("RuntimeError: a bug of the user's")
    assert re.search(r"broken\.py, line \d+, in setup$", life.where)


@pytest.mark.parametrize(
    "flags", [["--data.listed=true"], ["--data.listed=false"], ["--data.listed=false", "--data.num_workers=1"]]
)
def test_a_path_of_the_users_data_that_is_not_there_is_a_wrong_setting(quick, flags):
    """Where the user's own code opens it: in setup, in the first step, in a loader process."""
    own = ("--model=tests.own.Regression", "--data=tests.survive.broken.Filed", "--trainer.accelerator=cpu")
    run = quick("fit", *own, "--data.root=nowhere", *flags, "--trainer.max_epochs=1", "--run=it", ranks=3)
    assert run.code == 2, run.output
    assert "data.init_args.root=nowhere: FileNotFoundError: [Errno 2] No such file or directory: 'nowhere/" in run.output
    assert re.search(r"broken\.py\", line \d+, in (setup|__getitem__)\n", run.output), run.output
    assert not list(run.folder.glob("lightning_logs/*"))


def test_a_path_that_was_there_when_the_run_began_is_no_wrong_setting(quick, tmp_path):
    """A disk that is not mounted after a restart, say: the same command may work the next time."""
    (points := tmp_path / "points").mkdir()
    for name in ("train.csv", *(f"{number}.bin" for number in range(50))):
        (points / name).touch()
    own = ("--model=tests.own.Regression", "--data=tests.survive.broken.Filed", "--trainer.accelerator=cpu")
    words = ("fit", *own, "--data.root=points/", "--data.listed=true", "--run=it")
    assert (first := quick(*words, "--trainer.max_epochs=1")).code == 0, first.output
    (points / "train.csv").unlink()
    run = quick(*words, "--trainer.max_epochs=2")
    assert run.code == 1, run.output
    assert "FileNotFoundError" in run.output
    assert "data.init_args.root=" not in run.output
    new = quick(*words[:-1], "--trainer.max_epochs=2", "--run=new")
    assert (new.code, "data.init_args.root=points: FileNotFoundError" in new.output) == (2, True), new.output


def test_a_checkpoint_does_not_override_the_command_line(quick):
    first = quick("fit", DDP, *TINY, "--trainer.max_epochs=1", "--run=first", "--model.label_smoothing=0.2")
    checkpoint = first.folder / "lightning_logs/first/checkpoints/step-000000002.ckpt"
    change = "--change=model.label_smoothing"
    second = quick("fit", DDP, *TINY, "--trainer.max_epochs=2", "--run=second", f"--ckpt_path={checkpoint}", change)
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


def test_help_is_a_page_and_the_rest_on_request(quick):
    run = quick("fit", "--help")
    assert run.code == 0
    for key in ("--data.global_batch_size", "--model.lr_scaling", "--trainer.accumulate_grad_batches", "--run", "--help_all"):
        assert key in run.output
    assert "samples behind one optimiser step" in run.output
    every = quick("fit", "--help_all")
    assert every.code == 0
    for key in ("--trainer.barebones", "--watchdog.factor", "--data.resident"):
        assert key in every.output
        assert key not in run.output


@pytest.mark.parametrize("setting", ["--trainer.enable_checkpointing=false", "--trainer.barebones=true"])
def test_a_run_without_checkpoints_trains_and_leaves_none(quick, tmp_path, setting):
    words = [argument for argument in TINY if "log_every" not in argument]
    run = quick(
        "fit",
        DDP,
        *words,
        "--run=it",
        "--trainer.max_steps=2",
        "--trainer.max_epochs=-1",
        "--trainer.log_every_n_steps=0",
        setting,
    )
    assert run.code == 0, run.output
    assert not (tmp_path / "lightning_logs/it/checkpoints").exists()


@pytest.mark.parametrize("verb", TRAINING)
def test_the_help_of_a_verb_begins_with_whole_sentences(verb, capsys):
    about = help_page(verb).split("\n\n")[1].splitlines()[0]
    assert (
        about == f"{sentence(verb)} The most important keys follow, with their defaults; a config may hold them, too. See also"
    )


def test_what_was_asked_for_is_shown(quick, tmp_path):
    stop = {"monitor": "val/acc", "patience": 1, "stopping_threshold": 0.0, "mode": "max"}
    words = (
        *("fit", DDP, *TINY, "--trainer.max_epochs=3", "--trainer.profiler=simple", "--trainer.detect_anomaly=true"),
        *("--trainer.logger=CSVLogger", "--trainer.logger.save_dir=csv", "--model.lr_scheduler=null"),
        f"--trainer.callbacks={json.dumps([{'class_path': 'EarlyStopping', 'init_args': stop}])}",
        "--trainer.val_check_interval=0.5",
    )
    run = quick(*words)
    assert run.code == 0, run.output
    assert "FIT Profiler Report" in run.output
    assert "Error detected" not in run.output
    assert "early stop  Stopping threshold reached" in run.output
    assert re.search(r"step 1 .*val/acc", run.output)  # half an epoch is a step, and not a part of one
    assert "lr 0.02, 2 steps an epoch" in run.output
    assert list((tmp_path / "csv").rglob("metrics.csv"))
    assert (run.runs[0] / "config.yaml").exists()
    again = quick(*words, f"--run={run.runs[0].name}")
    assert again.code == 0, again.output
    assert "The run stopped early, by EarlyStopping, after step 1: nothing is left to do" in again.output
    assert "nothing was left" not in again.output


def test_a_metric_that_nobody_logs_costs_nothing_that_was_trained(quick, tmp_path):
    run = quick(
        "fit", DDP, *TINY, "--trainer.max_epochs=2", "--checkpoints.monitor=val_acc", "--trainer.num_sanity_val_steps=0"
    )
    assert run.code == 1
    assert "Did you mean val/acc?" in run.output
    assert list(run.runs[0].glob("checkpoints/step-000000002*.ckpt"))
    resumed = quick("fit", DDP, *TINY, "--trainer.max_epochs=2", f"--run={run.runs[0].name}")
    assert resumed.code == 0, resumed.output


def test_bases_come_first_and_are_found_beside_the_config(tmp_path: Path):
    (tmp_path / "low.yaml").write_text("base: ddp.yaml\n")
    (tmp_path / "high.yaml").write_text("base: low.yaml\n")
    words = expand(["fit", "-c", str(tmp_path / "high.yaml"), "--x=1"])
    names = [Path(argument).name for argument in words[2::2]]
    assert names == ["ddp.yaml", "low.yaml", "high.yaml"]
    assert words[0] == "fit"
    assert words[-1] == "--x=1"


def test_the_command_line_counts_over_files_wherever_they_stand_in_it(tmp_path: Path):
    for name in ("low.yaml", "high.yaml"):
        (tmp_path / name).write_text("trainer: {max_epochs: 1}\n")
    low, high = str(tmp_path / "low.yaml"), str(tmp_path / "high.yaml")
    files = ["--config", low, "--config", high]

    def check(given: list[str], expected: list[str]) -> None:
        assert expand(given) == expected

    check(["fit", "--dry_run", "-c", low, "--run", "fit", f"--config={high}"], ["fit", *files, "--dry_run", "--run", "fit"])
    check(["doctor", "--x=1", f"-c{low}", f"-c={high}", "--x", "-1"], ["doctor", *files, "--x=1", "--x", "-1"])
    # A section's file is one, too; its name, or a structure, is not.
    words = ["--trainer", "{max_epochs: 2}", "--trainer.max_epochs", "3", "--model", "mine.Net", "--data.config", low]
    sections = [f"--trainer={low}", "--trainer", high]
    check(["test", *words, *sections], ["test", *sections, *words])
    # The program's own configs stay before the verb.
    check(["--config", low, "fit", "--run=x", "-c", high], ["--config", low, "fit", "--config", high, "--run=x"])
    check(["fit", "--run", "data", "--config", low], ["fit", "--config", low, "--run", "data"])
    check(["fit", "--x=1", "--trainer"], ["fit", "--x=1", "--trainer"])


def test_two_runs_in_the_same_second_have_two_folders(tmp_path):
    assert len({open_run(tmp_path, None, "x", Launch()).folder for _ in range(3)}) == 3


@pytest.mark.parametrize(
    "words", ["--version", "same --help", "report --help", "watch --help", "profile --help", "sweep --help"]
)
def test_verbs_that_read_runs_answer_without_loading_torch(words):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "project", *words.split()],
        env=environment(), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0
    assert not re.search(r"\| +(torch|lightning|numpy|tensorboard)$", done.stderr, re.MULTILINE)


def test_a_rank_of_another_launcher_is_refused_before_it_begins(quick):
    run = quick("fit", DDP, *TINY, "--run=x", LOCAL_RANK="0", NODE_RANK="0", WORLD_SIZE="1")
    assert run.code == 0, run.output
    refused = quick("fit", DDP, *TINY, "--run=x", LOCAL_RANK="1", NODE_RANK="-1", WORLD_SIZE="1")
    assert refused.code == 2
    assert "LOCAL_RANK=1 is set in the environment, and trainer.devices makes 1 process(es)" in refused.output


def test_nan_is_refused_but_in_the_arguments_of_a_users_own_class():
    def config(class_path):
        return Namespace(model=Namespace(class_path=class_path, init_args=Namespace(missing=math.nan, lr=math.inf)))

    Parser().refuse_odd_floats(config("mine.Net"))
    with pytest.raises(UserError, match=r"model\.init_args\.missing=nan"):
        Parser().refuse_odd_floats(config("torch.optim.SGD"))
