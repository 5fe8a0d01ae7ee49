"""The verb `same`: which runs are meant, and what is said where they can't be compared."""

import json
import time
from dataclasses import replace

import pytest
import torch
import yaml

from project.cli import same
from project.cli.reading import ended
from project.cluster.settings import likeliest_first
from project.config_files import run_names
from project.watch.events import Events
from project.watch.fingerprint_file import FILE
from tests.conftest import Cli
from tests.watch.test_comparison import START, step


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run("a", 1, 2) makes a run with these steps."""
    monkeypatch.chdir(tmp_path)

    def make(name: str, *numbers: int, config=None, start=START) -> None:
        folder = tmp_path / "lightning_logs" / name
        folder.mkdir(parents=True)
        (folder / FILE).write_text(start.line() + "".join(step(number).line(4) for number in numbers))
        if config is not None:
            (folder / "config.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))

    return make


def refused(capsys, *words: str) -> str:
    assert ended(lambda: same.main(words)) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert out.err.startswith("ERROR ")
    assert out.err.count("\n") == 1
    return out.err


def test_by_name_and_by_folder(run, tmp_path, capsys):
    run("a", 1, 2)
    run("b", 1, 2)
    assert same.main(["a", "lightning_logs/b", str(tmp_path / "lightning_logs/a")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[1] == "  Compared: weights and losses of 2 steps; there are no checkpoints and logged values of both."
    (tmp_path / "a").mkdir()  # a folder of that name that is no run
    assert same.main(["a", "b"]) == 0
    assert same.main(["a"]) == 0


def test_by_a_pattern(run, tmp_path, capsys):
    for name in ("s-1", "s-10", "s-2"):
        run(name, 1, 2)
    (tmp_path / "lightning_logs/s-11").mkdir()  # has no steps
    assert same.main(["s-1*"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("s-1 and s-10 are the same")
    assert run_names(["s-?", "s-10", "s-1", "lightning_logs/s-1*"], FILE) == ["s-1", "s-2", "s-10", "lightning_logs/s-1*"]
    assert "No run in lightning_logs/ with a fingerprints.jsonl matches t*. HINT" in refused(capsys, "t*")


def test_what_can_not_be_compared(run, tmp_path, capsys):
    run("a", 1, 2)
    run("late", 8, 9, start=replace(START, step=7))
    assert "HINT: give its name in lightning_logs/, or its folder; there are: a, late" in refused(capsys, "a", "nothing")
    assert "a has 1 to 2, late has 8 to 9" in refused(capsys, "a", "late")
    assert "A run's name is made of" in refused(capsys, "a", "w+t")
    (tmp_path / "lightning_logs/old").mkdir()
    assert "or with a strategy that shards the network" in refused(capsys, "a", "old")
    run("damaged", 1, 2)
    path = tmp_path / "lightning_logs/damaged" / FILE
    path.write_text(path.read_text().replace('"epoch"', "epoch", 1))
    assert "line 2: this is no fingerprint" in refused(capsys, "damaged")


def test_settings_that_differ(run, capsys):
    trainer = {"devices": 1, "default_root_dir": "x", "max_epochs": 1, "exact": False}
    first = {"seed_everything": 0, "run": "a", "trainer": trainer}
    second = {"seed_everything": 1, "run": "b", "trainer": {"devices": 2, "default_root_dir": "y", "max_epochs": 1}}
    model = {"class_path": "SGD", "init_args": {"lr": 1, "momentum": 0}}
    run("a", 1, config={**first, "model": model})
    start = replace(START, weights="f" * 16)
    run("b", 1, config={**second, "model": {"class_path": "Adam", "init_args": {"lr": 2}}}, start=start)
    assert same.main(["a", "b"]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[lines.index("Settings that differ:") :] == [
        "Settings that differ:",
        "model.class_path: SGD, and Adam",
        "seed_everything: 0, and 1",
        "trainer.exact: False, and None",
        "Where they ran:",
        "trainer.devices: 1, and 2",
    ]
    run("c", 1, config="a: [", start=start)
    assert same.main(["a", "c"]) == 1
    assert "Their settings can't be compared" in capsys.readouterr().out
    run("d", 1, start=start)
    assert same.main(["a", "d"]) == 1
    assert "ettings" not in capsys.readouterr().out


def test_no_guess_beside_a_known_cause(run, tmp_path, capsys):
    threads = replace(START, weights="f" * 16, threads=4)
    run("a", 1, config={"data": {"num_workers": 0}})
    for name, data, text in (
        ("workers", {"num_workers": 2}, "threads: 1, and 4: an operation"),
        ("sampler", {"shuffle": 2}, "4."),
    ):
        run(name, 1, config={"data": data}, start=threads)
        assert same.main(["a", name]) == 1
        assert text in capsys.readouterr().out
    for name, commit in (("a", "abc"), ("sampler", "abd")):
        start = {"event": "start", "time": time.time(), "step": 0, "ranks": 1, "commit": commit}
        (tmp_path / "lightning_logs" / name / "life.jsonl").write_text(json.dumps(start) + "\n")
    assert same.main(["a", "sampler"]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "code: commit abc, and abd." in lines
    assert "threads: 1, and 4." in lines


MONITOR = "DeviceStatsMonitor.on_train_batch_end/cpu_percent"


def test_states_and_logged_values_are_compared(run, tmp_path, capsys):
    """Their steps are the same. What differs lies in the checkpoints, as an average of the weights does, or was logged only."""

    def kept(name: str, average: float = 1.0, seen: int = 3, validated: float = 0.5, **extra: object) -> None:
        run(name, 1, 2)
        folder = tmp_path / "lightning_logs" / name
        (folder / "checkpoints").mkdir()
        callbacks = {"Mine{}": {"seen": seen, "best": str(folder / "best.ckpt")}, "Other": {"nothing": float("nan")}}
        callbacks["Timer"] = {"time_elapsed": {"train": float(len(name))}}  # no two runs have the same
        checkpoint = {"state_dict": {"layer.weight": torch.full((2,), average)}, "callbacks": callbacks, "loops": name, **extra}
        torch.save(checkpoint, folder / "checkpoints/step-000000002.ckpt")
        events = Events(str(folder))
        events.log_metrics({"val_loss": validated, "speed/step_s": float(len(name)), MONITOR: float(len(name))}, 2)
        events.finalize("success")

    kept("one")
    kept("likewise")
    assert same.main(["one", "likewise"]) == 0
    compared = "weights and losses of 2 steps, 1 checkpoints, 1 weights, 3 other states, 1 logged values."
    assert f"Compared: {compared}" in capsys.readouterr().out
    for name, changed, line in (
        ("ema", {"average": 1.5}, "2, weights: layer.weight. They are not the ones that the steps moved"),
        ("callback", {"seen": 4}, "2, other states: seen of the callback Mine: 3, and 4. It is a state of"),
        ("module", {"mine": [1]}, "2, other states: mine.0: missing, and there."),
        ("validated", {"validated": 0.25}, "2, logged values: val_loss: 0.5, and 0.25. The same weights gave another"),
    ):
        kept(name, **changed)
        assert same.main(["one", name]) == 1
        text = capsys.readouterr().out
        assert "are not the same, though all weights and losses of their steps are" in text
        assert f"After step {line}" in text, text


def test_an_evaluation_after_the_fit_is_not_of_it(run, tmp_path, capsys):
    for name in ("fitted", "validated"):
        run(name, 1, 2)
        folder = tmp_path / "lightning_logs" / name
        events = Events(str(folder))
        events.log_metrics({"val_loss": 0.5}, 2)
        ended = time.time()
        lines = [{"event": "start", "time": ended - 9, "step": 0, "ranks": 1}]
        lines.append({"event": "stop", "time": round(ended, 3), "step": 2, "state": "finished", "why": None})
        (folder / "life.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        while time.time() < ended + 0.01:
            pass
        if name == "validated":
            events.log_metrics({"val_loss": 0.25}, 2)
        events.finalize("success")
    assert same.main(["fitted", "validated"]) == 0
    assert "1 logged values" in capsys.readouterr().out


def test_the_likeliest_cause_comes_first():
    keys = [
        "run",
        "trainer.logger",
        "watchdog.factor",
        "data.num_workers",
        "trainer.max_epochs",
        "model.schedule.init_args.gamma",
    ]
    assert [*likeliest_first(dict.fromkeys(keys))] == [*keys[4:], keys[3], *keys[:3]]


def test_errors_and_help_of_the_program(cli: Cli):
    refusal = cli("same", "nothing")
    assert (refusal.code, refusal.output.count("\n")) == (2, 1), refusal.output
    assert "There is no run nothing. HINT: " in refusal.output
    assert cli("same").code == 2
    assert "Exit code 0: the same, 1: not" in " ".join(cli("same", "--help").output.split())
