"""A run's identity: what may change while it goes on, what takes a word, and what makes it another run."""

import errno
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml

from project.errors import UserError
from project.runs import KINDS, Run, differences, kind_of, weights
from tests.conftest import ROOT, TINY
from tests.survive.test_resume import faults

DDP = "--config=configs/ddp.yaml"
FIT = ("fit", DDP, *TINY, "--trainer.max_epochs=4", "--run=it", "--checkpoints.every_n_steps=1")
STOP = faults({"step": 4, "number": int(signal.SIGTERM)})


def saved(folder: Path, name: str = "it") -> dict:
    return yaml.safe_load((folder / f"lightning_logs/{name}/config.yaml").read_text())


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.EROFS, "mount a folder"), (errno.ENOSPC, "make room"), (errno.EACCES, "user")]
)
def test_a_folder_that_can_not_be_made_has_the_hint_of_its_cause(tmp_path, monkeypatch, number, hint):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=f"can't be made: .*{os.strerror(number)}.* HINT: {hint}"):
        Run(tmp_path / "it")


def test_a_run_whose_checkpoints_are_gone_says_so(tmp_path, caplog):
    """One that has taken no step says nothing; of damaged ones, another line tells."""
    run, missing = Run(tmp_path / "it"), "The run it has taken 25 steps, and there is no checkpoint in"
    (run.folder / "life.jsonl").write_text('{"event": "start", "time": 1, "step": 0, "ranks": 1}\n')
    assert run.begin({}, "auto", None, None) is None
    assert not caplog.text
    with (run.folder / "life.jsonl").open("a") as life:
        life.write('{"event": "stop", "time": 9, "step": 25, "state": "stopped", "why": "SIGTERM"}\n')
    assert run.begin({}, "auto", None, None) is None
    assert caplog.text.count(f"{missing} {run.folder}/checkpoints: it begins at its beginning. HINT:") == 1
    caplog.clear()
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints/step-000000024.ckpt").touch()
    assert run.begin({}, "auto", None, None) is None
    assert "No checkpoint is left" in caplog.text
    assert missing not in caplog.text


def test_every_key_stands_in_the_table(quick):
    config = yaml.safe_load(quick("fit", "--config=configs/ddp.yaml", "--print_config").output)
    keys = set()
    for name, part in config.items():
        keys |= {f"{name}.{key}" for key in part} if name in ("trainer", "model", "data") else {name}
    known = {key for key in KINDS if key.count(".") < 2}
    own = {f"{name}.{part}" for name in ("model", "data") for part in ("class_path", "init_args")}
    assert keys | {"run", "data.seed"} | own == known


def test_the_page_about_keys_has_the_same_table():
    rows = re.findall(
        r"^\| (freely|freely, with a line|with `--change KEY`|never) \|(.*?)\|(.*)\|$",
        (ROOT / "docs/keys.md").read_text(),
        re.MULTILINE,
    )
    documented = {}
    for kind, _, keys in rows:
        for key in re.findall(r"`([^`]+)`", keys):
            head, brace, inner = key.partition("{")
            for tail in inner.rstrip("}").split(", ") if brace else [""]:
                documented[head + tail] = {"freely": "free", "freely, with a line": "said", "never": "never"}.get(kind, "word")
    assert documented == KINDS


def test_a_key_is_matched_whole():
    assert kind_of("trainer.enable_progress_bar") == "free"
    assert kind_of("model.optimizer.init_args.lr") == "word"
    assert kind_of("model.optimizer.class_path") == "never"
    assert kind_of("trainer.strategy_of_another_version") == "word"
    assert kind_of("data.source.init_args.root_of_all") == "never"
    old = {"trainer": {"max_epochs": 1}, "data": {"source": {"class_path": "A", "init_args": {"x": 1}}}}
    new = {
        "trainer": {"max_epochs": 2, "new_in_this_version": 3},
        "data": {"source": {"class_path": "B", "init_args": {"y": 1}}},
    }
    assert differences(old, new) == {"data.source.class_path": ("A", "B")}


@pytest.mark.slow
def test_another_learning_rate_takes_a_word_and_then_takes_effect(quick, tmp_path):
    lr = "--model.optimizer.init_args.lr=0.5"
    assert quick(*FIT, STOP).code == 143
    begun = saved(tmp_path)
    for words in ((lr,), ("--model.optimizer=AdamW", "--change=model.optimizer"), ("--data.batch_size=32",)):
        refused = quick(*FIT, STOP, *words)
        assert refused.code == 2, refused.output
        assert "Traceback" not in refused.output
    assert "data.batch_size: 16 -> 32. That makes it another run" in refused.output
    assert "--change model.optimizer.init_args.lr" in quick(*FIT, STOP, lr).output
    assert "no such key" in quick(*FIT, STOP, lr, "--change=lr").output
    assert saved(tmp_path) == begun  # what was refused was not trained

    # Killed before the first checkpoint with it: it has not been trained with, and is not forgotten either.
    kill = STOP[:-1] + ', {"class_path": "tests.probes.Fault", "init_args": {"step": 4}}]'
    callbacks = "--change=model.optimizer"
    killed = quick(*FIT, kill, lr, callbacks)
    assert killed.code == -signal.SIGKILL, killed.output
    assert "HINT: if it is to go on so" in quick(*FIT, STOP, lr).output

    resumed = quick(*FIT, STOP, lr, "--change=model.optimizer.init_args.lr")
    assert resumed.code == 0, resumed.output
    assert "Detected call" not in resumed.output
    assert saved(tmp_path)["model"]["optimizer"]["init_args"]["lr"] == 0.5
    kept = yaml.safe_load((tmp_path / "lightning_logs/it/config-until-step-000000004.yaml").read_text())
    assert kept["model"]["optimizer"]["init_args"]["lr"] == 0.01
    rates = resumed.curve("train/lr")

    (tmp_path / "lightning_logs/it").rename(tmp_path / "done")
    whole = quick(*FIT, faults(), lr).curve("train/lr")
    assert {step: rates[step] for step in range(5, 9)} == pytest.approx({step: whole[step] for step in range(5, 9)})
    assert rates[4] == pytest.approx(whole[4] * 0.01 / 0.5)
    checkpoint = torch.load(tmp_path / "done/checkpoints/step-000000008.ckpt", weights_only=True)
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["initial_lr"] == 1.0  # scaled by the batch
    assert checkpoint["optimizer_states"][0]["state"][0]["momentum_buffer"] is not None


@pytest.mark.parametrize(
    ("scheduler", "decay"),
    [
        ("StepLR", ["--model.lr_scheduler.step_size=3"]),
        ("lightning.pytorch.cli.ReduceLROnPlateau", ["--model.lr_scheduler.monitor=val/loss", "--model.lr_interval=epoch"]),
    ],
)
def test_another_schedule_goes_on_where_it_would_be(quick, scheduler, decay):
    assert quick(*FIT, STOP).code == 143
    words = (f"--model.lr_scheduler={scheduler}", *decay, "--change=model.lr_scheduler,model.lr_interval")
    resumed = quick(*FIT, STOP, *words)
    assert resumed.code == 0, resumed.output
    rates = resumed.curve("train/lr")
    expected = {5: 0.002, 6: 0.0002, 7: 0.0002, 8: 0.0002} if scheduler == "StepLR" else dict.fromkeys(range(5, 9), 0.02)
    assert {step: rates[step] for step in range(5, 9)} == pytest.approx(expected, rel=1e-3)


def test_what_the_optimiser_has_not_gathered_is_refused(quick):
    adam = (*FIT, STOP, "--model.optimizer=AdamW")
    assert quick(*adam).code == 143
    refused = quick(*adam, "--model.optimizer.amsgrad=true", "--change=model.optimizer")
    assert refused.code == 2
    assert "The optimiser's new settings need max_exp_avg_sq" in refused.output
    assert "Traceback" not in refused.output


def test_other_hosts_may_not_change_the_global_batch(quick):
    words = (*FIT, STOP, "--data.global_batch_size=null")
    assert quick(*words).code == 143
    refused = quick(*words, "--trainer.accumulate_grad_batches=2")
    assert refused.code == 2
    assert "HINT: set data.global_batch_size=16" in refused.output


def test_it_starts_from_a_checkpoint_of_another_run_only_if_that_was_trained_so(quick, tmp_path):
    assert quick(*FIT, STOP).code == 143
    path = tmp_path / "lightning_logs/it/checkpoints/step-000000004.ckpt"
    configuration = json.loads(path.with_suffix(".json").read_text())["configuration"]
    assert configuration["model"]["optimizer"]["init_args"]["lr"] == 0.01
    for flag in ("--ckpt_path", "--resume"):
        words = (*FIT, STOP, f"{flag}={path}", f"--run=by{flag}")
        assert "--change model.label_smoothing" in quick(*words, "--model.label_smoothing=0.1").output
        assert quick(*words).code == 0
        assert saved(tmp_path, f"by{flag}")["ckpt_path"] == str(path)


def checkpoints(folder: Path, **metrics: float) -> Path:
    """Checkpoints of 'it' that are whole, in name."""
    from project.checkpoints.writing import write

    (folder / "checkpoints").mkdir(parents=True)
    for number, (name, value) in enumerate(metrics.items()):
        manifest = {"metrics": {"val/acc": value} if value >= 0 else {}, "position": {"global_step": number}}
        write(folder / f"checkpoints/step-{number:09d}.ckpt", {"name": name}, manifest)
    return folder


def test_the_best_else_the_newest_that_is_whole(tmp_path):
    folder = checkpoints(tmp_path / "it", a=0.1, b=0.9, c=0.5, d=-1)
    paths = sorted((folder / "checkpoints").glob("*.ckpt"))
    assert weights(folder, None, "val/acc", "max") == paths[1]
    assert weights(folder, "best", "val/acc", "min") == paths[0]
    assert weights(folder, "last", "val/acc", "max") == paths[3]
    assert weights(folder, None, "val/nothing", "max") == paths[3]
    with pytest.raises(ValueError, match="there are: val/acc"):
        weights(folder, "best", "val_acc", "max")
    before = {path: path.read_bytes() for path in (folder / "checkpoints").iterdir()}
    paths[1].write_bytes(b"damaged")
    assert weights(folder, "best", "val/acc", "max") == paths[2]
    assert set(before) == set((folder / "checkpoints").iterdir())  # nothing was set aside
    for path in paths:
        path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="has no good checkpoint"):
        weights(folder, None, "val/acc", "max")


def test_a_run_that_was_moved_goes_on_where_it_is(quick, tmp_path):
    assert quick(*FIT, STOP).code == 143
    shutil.move(tmp_path / "lightning_logs/it", tmp_path / "elsewhere")
    done = quick("fit", f"--run={tmp_path}/elsewhere")
    assert done.code == 0, done.output
    assert f"Resumes from {tmp_path}/elsewhere/checkpoints/step-000000004.ckpt" in done.output
    assert not (tmp_path / "lightning_logs").exists() or not [*(tmp_path / "lightning_logs").iterdir()]
    assert "There is no run in" in quick("fit", DDP, "--run=./nowhere").output
