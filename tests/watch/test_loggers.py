"""Other loggers by YAML: a run that was killed goes on in the same file and in the same runs of W&B and MLflow."""

import csv
import json
import os
import re
import shutil
import signal
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

import project
from project.checkpoints.callback import Checkpoints
from project.errors import FaultError, UserError
from project.watch import steady
from project.watch.history import OURS
from project.watch.loggers import Named, by_name, made
from project.watch.steady import CsvFile, Sender
from tests.conftest import TINY, forked
from tests.own import PointsData, Regression
from tests.survive.test_resume import curves, faults

ALL = [
    {"class_path": "WandbLogger", "init_args": {"offline": True}},
    {"class_path": "lightning.pytorch.loggers.MLFlowLogger"},
    {"class_path": "lightning.pytorch.loggers.CSVLogger"},
]
FIT = (
    *("fit", "--config=configs/ddp.yaml", *TINY, "--run=it", "--data.source.init_args.train_size=240", "--data.batch_size=8"),
    *("--data.global_batch_size=48", "--trainer.max_epochs=2", "--checkpoints.every_n_steps=3"),
)
EXACT = (*FIT, "--trainer.exact=true", f"--trainer.logger={json.dumps(ALL)}")
STEPS = 10

Curves = dict[str, list[tuple[int, float]]]


def wandb_records(file: Path) -> list[Any]:
    """What lies in a .wandb file: records of protobuf in a log as LevelDB has it, blocks of 32 KiB with parts of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, records = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of it, or its last part
            records.append(Record.FromString(whole))
            whole = b""
    return records


def of_wandb(run: Path) -> tuple[set[str], Curves, dict[str, Any]]:
    """The ids, the curves and the configuration, over all starts."""
    ids: set[str] = set()
    curves: Curves = {}
    config: dict[str, Any] = {}
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        ids.add(file.stem.removeprefix("run-"))
        for record in wandb_records(file):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            for update in (*record.run.config.update, *record.config.update):
                config[update.key or update.nested_key[0]] = json.loads(update.value_json)
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if not name.startswith("_") and name != "trainer/global_step":
                    curves.setdefault(name, []).append((row["trainer/global_step"], value))
    return ids, curves, config


def of_mlflow(run: Path) -> tuple[set[str], Curves, dict[str, str]]:
    folders = list(run.glob("mlruns/*/*/metrics"))
    curves: Curves = {}
    for file in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        rows = [line.split() for line in file.read_text().splitlines()]
        curves[str(file.relative_to(folders[0]))] = [(int(row[2]), float(row[1])) for row in rows]
    params = {file.name: file.read_text() for folder in folders for file in (folder.parent / "params").iterdir()}
    return {folder.parent.name for folder in folders}, curves, params


def of_csv(run: Path) -> Curves:
    curves: Curves = {}
    with (run / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name != "step":
                    curves.setdefault(name, []).append((int(row["step"]), float(value)))
    return curves


def learned(curves: Curves) -> dict[str, dict[int, float]]:
    """What was measured last for each step, but for how fast it went."""
    return {name: dict(points) for name, points in curves.items() if not name.startswith(OURS)}


class Ends(Callback):
    """Ends training by an error, some steps after a checkpoint."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.at:
            raise ArithmeticError


def script() -> None:
    """A Python script that is started again: after its first checkpoint, before it, and with a checkpoint of Lightning's."""
    settings: Any = {
        "devices": int(os.environ.get("WORLD_SIZE", 1)),
        "accelerator": "cpu",
        "global_batch_size": 8,
        "max_steps": 12,
    }
    settings |= {"log_every_n_steps": 1, "num_sanity_val_steps": 0, "enable_progress_bar": False, "logger": "csv"}
    for name, steps in (("whole", [99]), ("again", [7, 99]), ("early", [2, 99]), ("lightning", [7, 99])):
        for at in steps:
            of_lightning = ModelCheckpoint(dirpath=name, every_n_train_steps=4, save_last=True)
            kept: Any = of_lightning if name == "lightning" else Checkpoints(every_n_steps=3)
            seed_everything(0)
            trainer = project.Trainer(default_root_dir=f"{name}/lightning_logs/it", callbacks=[kept, Ends(at)], **settings)
            with suppress(ArithmeticError):
                trainer.fit(Regression(), PointsData(), ckpt_path="last")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_python_script_that_resumes_repeats_no_step_in_its_curves(tmp_path, ranks):
    run = forked(tmp_path, ranks=ranks, program=f"{__name__}:script")
    assert run.code == 0, run.output
    rows, shown = of_csv(tmp_path / "whole/lightning_logs/it"), curves(tmp_path / "whole")
    assert [step for step, _ in rows["loss_step"]] == [*range(1, 13)]
    for name in ("again", "early", "lightning"):
        repeated, shown_again = of_csv(tmp_path / name / "lightning_logs/it"), curves(tmp_path / name)
        for tag in ("loss_step", "val_loss/dataloader_idx_0"):
            for expected, points in ((rows, repeated), (shown, shown_again)):
                assert [number for point in points[tag] for number in point] == pytest.approx(
                    [number for point in expected[tag] for number in point]
                ), (name, tag)


@pytest.mark.slow
def test_killed_on_two_ranks_and_on_three_it_is_one_run_everywhere(quick, tmp_path):
    places = ({"rank": 0, "where": "step", "step": 5}, {"rank": 2, "where": "saved", "step": 6})
    words = (*EXACT, faults(*places))
    first = quick(*words, ranks=2)
    assert first.code == -signal.SIGKILL, first.output
    second = quick(*words, ranks=3)
    assert second.code, second.output
    last = quick(*words, "--trainer.log_every_n_steps=1", "--watchdog.factor=11")  # a key that may change freely
    assert last.code == 0, last.output
    for run in (first, second, last):
        lines = [line for line in run.output.splitlines() if "set of strings" not in line and "Record." not in line]
        assert not re.search("wandb|W&B|mlflow|WARNING|Traceback", "\n".join(lines), re.IGNORECASE), run.output

    run = last.runs[0]
    ids = json.loads((run / "loggers.json").read_text())
    assert sorted(ids) == ["MLflow mlruns", "W&B"]
    shutil.move(tmp_path / "lightning_logs", tmp_path / "killed")
    whole = quick(*EXACT)
    assert whole.code == 0, whole.output
    run, reference = tmp_path / "killed/it", whole.runs[0]

    wandb_ids, curves, config = of_wandb(run)
    assert len(list(run.glob("wandb/offline-run-*"))) == 3
    assert wandb_ids == {ids["W&B"]}
    assert {"train/loss", "train/grad_norm", "val/acc"} <= learned(curves).keys()
    assert learned(curves) == learned(of_wandb(reference)[1])
    assert (config["seed_everything"], config["watchdog"]["factor"]) == (0, 11)
    assert "logger" not in config["trainer"]

    mlflow_ids, curves, params = of_mlflow(run)
    assert {"train/loss", "train/grad_norm", "val/acc"} <= learned(curves).keys()
    assert mlflow_ids == {ids["MLflow mlruns"]}
    assert learned(curves) == learned(of_mlflow(reference)[1])
    # The steps that were taken twice, and they alone, are there twice.
    twice = {step for step, times in Counter(step for step, _ in curves["train/loss"]).items() if times > 1}
    assert twice
    assert 9 not in twice
    assert params["watchdog.factor"] == "10.0"  # MLflow keeps the first value
    assert not [name for name in params if "logger" in name]

    curves = of_csv(run)
    assert learned(curves) == learned(of_csv(reference))
    assert all(len(points) == len(dict(points)) for name, points in curves.items() if not name.startswith(OURS))
    assert [step for step, _ in curves["train/loss"]] == list(range(1, STEPS + 1))
    assert {"train/grad_norm", "speed/samples_per_s"} <= curves.keys()


class Breaks(Callback):
    """In the third step the store of MLflow is gone, metrics.csv is a folder, and W&B's process is dead."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        run = Path(trainer.default_root_dir)
        if trainer.global_step == 2 and not (run / "metrics.csv").is_dir():
            steady._LAST_SECONDS = 1.0  # that its end waits for a server
            shutil.rmtree(run / "mlruns")
            (run / "mlruns").touch()
            (run / "metrics.csv").unlink(missing_ok=True)
            (run / "metrics.csv").mkdir()
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):  # it has ended meanwhile
                    words = (process / "cmdline").read_bytes().split(b"\0")
                    if b"wandb-core" in words[0] and str(os.getpid()).encode() in words:
                        os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.slow
def test_what_fails_in_the_middle_is_said_once_and_training_goes_on(quick):
    run = quick(*EXACT, "--trainer.callbacks=tests.watch.test_loggers.Breaks")
    assert run.code == 0, run.output
    for name in ("CSV", "MLflow", "W&B"):
        assert run.output.count(f"can't be written for {name}: ") == 1, run.output
    assert list(run.curve("train/loss")) == list(range(1, STEPS + 1))
    assert "Traceback" not in run.output

    (run.runs[0] / "mlruns").unlink()
    lost = json.loads((run.runs[0] / "loggers.json").read_text())["MLflow mlruns"]
    resumed = quick(*EXACT, f"--trainer.logger={json.dumps(ALL[1])}", "--trainer.max_epochs=3")
    assert resumed.code == 0, resumed.output
    assert f"MLflow has no run {lost} any more: a new one begins." in resumed.output


@pytest.mark.parametrize(
    ("named", "cause"),
    [
        ({"class_path": "MLFlowLogger", "init_args": {"tracking_uri": "http://me:secret@127.0.0.1:9"}}, "MLflow can't begin: "),
        (["wandb"], "W&B can't begin: No API key configured"),
        ([ALL[2], ALL[2]], "CSVLogger is there twice"),
    ],
    ids=["mlflow", "wandb", "twice"],
)
def test_what_is_wrong_at_the_start_ends_the_run_with_a_line(quick, named, cause):
    begun = time.monotonic()
    run = quick(*FIT, f"--trainer.logger={json.dumps(named)}")
    assert run.code == (1 if "MLflow" in cause else 2), run.output  # a server may be there the next time
    assert cause in run.output, run.output
    assert run.output.count("ERROR") == 1
    assert "Traceback" not in run.output
    assert time.monotonic() - begun < 60


@pytest.mark.faults
def test_it_may_be_told_by_the_environment_and_no_password_is_written_down(cli, tmp_path):
    words = (*FIT, "--trainer.max_steps=2", f"--trainer.logger={json.dumps(ALL)}")
    refused = cli(*words, "--run=refused", MLFLOW_TRACKING_URI="http://me:secret@127.0.0.1:9", WANDB_MODE="disabled")
    assert refused.code == 1
    assert not list(tmp_path.rglob("*.wandb"))
    assert "MLflow can't begin: " in refused.output
    run = cli(*words, MLFLOW_TRACKING_URI=f"file:{tmp_path}/shared", WANDB_DIR=str(tmp_path / "elsewhere"))
    assert run.code == 0, run.output
    assert "wandb" not in run.output.replace(str(tmp_path), "")  # nor at its end
    assert list(tmp_path.glob("shared/*/*/metrics"))
    assert len(list(tmp_path.glob("elsewhere/wandb/offline-run-*"))) == 1
    assert not [*tmp_path.glob("lightning_logs/it/mlruns"), *tmp_path.glob("lightning_logs/it/wandb")]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


@pytest.mark.faults
def test_tensorboard_stays_unless_there_is_to_be_none(quick, tmp_path):
    """Without its events there is no report; and another logger may come later, or go."""
    first = quick(*FIT, "--trainer.max_steps=4", "--trainer.logger=CSVLogger")
    assert first.code == 0, first.output
    (tmp_path / "lightning_logs/it/loggers.json").write_text("{ damaged")
    later = quick(*FIT, "--trainer.max_steps=6", f"--trainer.logger={json.dumps(ALL[1])}")
    assert later.code == 0, later.output
    assert later.output.count("loggers.json can't be read") == 1
    run = later.runs[0]
    ids = json.loads((run / "loggers.json").read_text())
    assert [step for step, _ in of_mlflow(run)[1]["train/loss"]] == [5, 6]
    assert list(later.curve("train/loss")) == list(range(1, 7))
    assert [step for step, _ in of_csv(run)["train/loss"]] == [1, 2, 3, 4]
    assert "train/loss" in (run / "report.html").read_text()

    # An evaluation is a run of its own in them, in its own folder.
    validated = quick("validate", "--run=it")
    assert validated.code == 0, validated.output
    (folder,) = run.glob("validate-*")
    assert "val/acc" in of_mlflow(folder)[1]
    assert not of_mlflow(folder)[0] & {ids["MLflow mlruns"]}
    (name,) = folder.glob("mlruns/*/*/tags/mlflow.runName")
    assert name.read_text() == f"it/{folder.name}"

    none = quick(*FIT, "--run=none", "--trainer.max_steps=2", "--trainer.logger=false")
    assert none.code == 0, none.output
    assert not list(tmp_path.glob("lightning_logs/none/events.*"))


def test_a_logger_has_a_short_name(quick, tmp_path):
    """On the command line, in a list, and in Python; it is the same as with a class_path."""
    run = quick(*FIT, "--trainer.logger=[csv, tensorboard]", "--trainer.max_steps=2")
    assert run.code == 0, run.output
    folder = tmp_path / "lightning_logs/it"
    assert [*folder.glob("events.*")]
    assert (folder / "metrics.csv").is_file()
    resumed = quick("fit", "--run=it", "--trainer.max_steps=3")
    assert resumed.code == 0, resumed.output
    rows = (folder / "metrics.csv").read_text().splitlines()[1:]
    assert {row.partition(",")[0] for row in rows} == {"1", "2", "3"}  # all in one file
    wrong = quick(*FIT, "--trainer.logger=wand", "--run=wrong")
    assert wrong.code != 0
    assert "trainer.logger" in wrong.output
    from_python = by_name("csv", folder, 0)
    assert [type(logger).__name__ for logger in from_python] == ["Events", "Csv"]
    assert from_python[1].log_dir.rstrip("/") == str(folder)
    with pytest.raises(UserError, match="there is no logger 'wand'"):
        by_name(["wand"], folder, 0)


def test_a_place_that_the_user_names_is_kept(tmp_path):
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger

    folder = tmp_path / "lightning_logs/it"
    (given,) = made(Named(CSVLogger, save_dir=str(tmp_path / "csv"), name="all", version=None), folder, "it", 0)
    assert given.log_dir == str(tmp_path / "csv/all/it")
    words = {"save_dir": str(tmp_path / "ml"), "tracking_uri": None, "run_name": "mine", "run_id": None}
    (given,) = made(Named(MLFlowLogger, **words), folder, "it", 0)
    assert given.save_dir == str(tmp_path / "ml")
    with pytest.raises(UserError, match="can't be made"):
        made(Named(CSVLogger, save_dir=".", nope=1, version=None), folder, "it", 0)


def test_an_argument_that_tensorboard_refuses_is_refused_before_training_begins(tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger

    made(Named(TensorBoardLogger, save_dir=str(tmp_path), max_queue=3), tmp_path, "it", 0)
    for argument in ("nope", "log_dir"):
        with pytest.raises(UserError, match=f"can't be made: .*'{argument}'.* HINT: --trainer.logger.help TensorBoardLogger"):
            made(Named(TensorBoardLogger, save_dir=str(tmp_path), **{argument: 1}), tmp_path, "it", 0)
    assert not [*tmp_path.iterdir()]


def test_a_server_that_is_down_is_no_wrong_configuration(tmp_path):
    """A launcher starts a run again after it, and not after an argument that a logger refuses."""

    def down(*args):
        raise RuntimeError("no answer")

    with pytest.raises(FaultError, match=r"can't be made: .*no answer"):
        made(Named(down), tmp_path, "it", 0)


def test_a_file_that_was_cut_short_is_gone_on_with(tmp_path):
    path = tmp_path / "metrics.csv"
    killed = CsvFile(path)
    for step in (1, 2, 3):
        killed.log_metrics({"loss": 1 / step}, step)
    killed.save()
    killed.log_metrics({"acc": 0.5, "loss": 0.1}, 4)
    killed.save()
    with path.open("a") as file:
        file.write("5,0.")
    resumed = CsvFile(path, until=3)
    resumed.log_metrics({"loss": 7.0}, 3)
    resumed.save()
    assert path.read_text().split() == ["step,acc,loss", "1,,1.0", "2,,0.5", "3,,7.0"]


def test_what_a_server_that_was_away_did_not_take_is_sent_later_and_in_order():
    taken: list[int] = []
    reachable = threading.Event()
    sender = Sender(lambda entry: reachable.is_set() and not taken.append(entry))
    for entry in range(3):
        sender.put(entry)
    assert sender.left(1) == 3
    reachable.set()
    assert sender.left(10, hurry=True) == 0
    assert taken == [0, 1, 2]
