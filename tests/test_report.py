"""What runs did, on a page: lives, curves, warnings; of a run that was killed, stopped and moved, and of several."""

import fcntl
import getpass
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from html import unescape
from itertools import pairwise
from pathlib import Path
from statistics import median
from urllib.parse import unquote

import pytest
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_experiment_plugin_data
from torch.utils.data import DataLoader

from project import Trainer
from project.watch.charts import COLOURS, Chart, Line
from project.watch.curves import Point
from project.watch.dashboard import _LAYOUT
from project.watch.figures import Axis, axis, did_not_learn, metrics, scaling, sweep, used_rates
from project.watch.goodput import Goodput, goodput
from project.watch.history import PHASES, History, Life, lives_of, newest_run, read_history
from project.watch.report import facts, page, shares_of_a_step
from project.watch.side_by_side import compared, differences
from tests.conftest import ROOT, TINY, forked
from tests.own import Points, Regression
from tests.survive.test_nonfinite import words
from tests.survive.test_resume import faults

FIT = (
    *("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_epochs=2"),
    *("--checkpoints.every_n_steps=2", "--data.batch_size=8", "--data.global_batch_size=48", "--run=it"),
)


def report(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "project", "report", *words],
        cwd=folder, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run that was killed on one rank, stopped on two, and finished on three; and another one."""
    place = tmp_path_factory.mktemp("report")
    killed = forked(place, *FIT, faults({"where": "saved", "step": 2}))
    assert killed.code == -signal.SIGKILL
    stopped = forked(place, *FIT, faults({"step": 6, "number": int(signal.SIGTERM)}), ranks=2)
    assert stopped.code == 143, stopped.output
    assert "report" in stopped.output
    done = forked(place, *FIT, faults(), ranks=3)
    assert done.code == 0, done.output
    second = forked(place, *FIT, "--run=other", "--model.optimizer.lr=0.5")
    assert second.code == 0, second.output
    return place


def test_a_run_leaves_its_life(place):
    history = read_history(place / "lightning_logs/it", "it")
    assert [(life.ranks, life.state, life.why) for life in history.lives] == [
        (1, "killed", f"rank 0 on {socket.gethostname()} was killed by signal 9."),
        (2, "stopped", "SIGTERM"),
        (3, "finished", None),
    ]
    first, second, third = history.lives
    assert first.step == 0
    assert first.end_step >= second.step > 0
    assert second.end_step == third.step
    assert third.known["hosts"] == {next(iter(third.known["hosts"])): 3}
    summary = json.loads((place / "lightning_logs/it/summary.json").read_text())
    assert summary["state"] == "finished"
    assert summary["starts"] == 3
    assert summary["step"] == history.step == third.end_step
    assert summary["samples"] == 2 * 256 < 48 * history.step, "the last step of an epoch is short"
    assert (place / "lightning_logs/it" / summary["checkpoint"]).exists()
    assert {"train/loss", "val/loss", "train/grad_norm"} <= summary["metrics"].keys()
    assert sum(summary["goodput"].values()) == pytest.approx(1)
    assert min(summary["goodput"][part] for part in ("training", "starting", "recovering", "not running")) > 0


def test_the_page_needs_nothing_else_and_shows_it_all(place):
    folder = place / "lightning_logs/it"
    text = (folder / "report.html").read_text()
    links = re.findall(r"""(src|href)\s*=\s*["']?([^"' >]*)""", re.sub("(?s)<script>.*</script>", "", text))
    assert all(link.startswith("data:image/png;base64,") for kind, link in links if kind == "src")
    files = [unquote(link) for kind, link in links if kind == "href" and not link.startswith("#")]
    assert all(f'id="{link[1:]}"' in text for kind, link in links if link.startswith("#"))
    assert {"log.txt", "config.yaml"} < {*files}
    assert all((folder / link).exists() for link in files), files
    assert not re.findall("url\\(|@import", text)
    visible = unescape(re.sub("<(?!figure)[^>]*>", "", text))
    shown = ("Run it", "killed", "stopped, SIGTERM", "finished", "3 ranks", "train/loss", "--run it", "global_batch_size: 48")
    for what in (*shown, getpass.getuser(), socket.gethostname(), "val/confusion, step"):
        assert what in visible, what
    assert '<span class="badge finished">finished</span>' in text
    assert f'<i style="background:{COLOURS[0]}"></i>' in text  # of a legend
    marks = page_of(text)["marks"]  # each start but the first, and the kill
    assert [("started again at step" in text, kind) for _, text, kind in marks] == [(True, "mark")] * 2 + [(False, "fault")]
    chosen = read_history(folder, "it").chosen
    assert {"data.batch_size": 8, "trainer.max_epochs": 2}.items() <= chosen.items()
    assert "trainer.gradient_clip_val" not in chosen


def test_tensorboard_has_pages_that_show_what_was_logged(place):
    """Each chart of the ordered page has a curve; the settings, texts and pictures are there under their plugins."""
    events = EventAccumulator(str(place / "lightning_logs/it"), size_guidance={"tensors": 0}).Reload()
    tags = events.Tags()
    none = {"steps left out", "TFLOP/s of a rank", "share of the peak (MFU)", "share of time in which GPUs compute"}
    for title, patterns in (chart for charts in _LAYOUT.values() for chart in charts.items()):
        assert any(re.match(pattern, tag) for pattern in patterns for tag in tags["scalars"]) or title in none, title
    assert {"configuration/text_summary", "run/text_summary"} <= {*tags["tensors"]}
    assert {"train/inputs", "val/confusion", "val/mistakes"} <= {*tags["images"]}
    settings = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"model.optimizer.lr" in settings
    assert b"data.global_batch_size" in settings
    declared = parse_experiment_plugin_data(events.summary_metadata["_hparams_/experiment"].plugin_data.content)
    assert [metric.name.tag for metric in declared.metric_infos] == ["val/acc", "val/acc5", "val/loss", "watch/run/outcome"]
    first = {setting.name for setting in declared.hparam_infos if setting.differs}
    assert {"data.batch_size", "trainer.devices"} <= first, "the command line's come first"
    assert "data.flip" in {setting.name for setting in declared.hparam_infos} - first
    groups = {tag.partition("/")[0] for tag in tags["scalars"]}
    assert sorted(groups)[-3:] == ["train", "val", "watch"], "what is learned stands before what is measured beside it"
    assert [point.value for point in events.Scalars("watch/run/outcome")][-1] == 1


def test_goodput_is_what_is_left_of_the_time_since_the_first_start():
    lives = [
        Life(time=110.0, step=0, ranks=2, known={"began": 100.0}, end=210.0, end_step=100),
        # The steps from 90 on come again; a spare process is older than the loss that it was kept for.
        Life(time=213.0, step=90, ranks=2, known={"began": 150.0}, end=303.0, end_step=180),
        Life(time=325.0, step=180, ranks=2, known={"began": 323.0}, end=330.0, end_step=185),
    ]
    result = goodput(lives)
    assert result == Goodput(training=185.0, starting=10.0, recovering=5.0, repeated=10.0, not_running=20.0)
    assert f"{result}" == "80.4% training (4.3% starting, 2.2% recovering, 4.3% repeated, 8.7% not running)"
    assert f"{goodput([])}" == ""


# Faults that are seen -------------------------------------------------------------------------------------------------

STRUCK = 3  # the step that sample 77 comes up in, of global batches of 32
TROUBLED = (
    *(argument for argument in words("--trainer.devices=1", "--trainer.log_every_n_steps=2") if "Dropped" not in argument),
    "--data.source.init_args.train=" + json.dumps({"class_path": "tests.watch.plugged.Troubled", "init_args": {"at": 77}}),
    '--trainer.callbacks={"class_path":"project.watch.throughput.Throughput","init_args":{"every_n_steps":2}}',
    "--model.network=tests.probes.Dropped",
)


def page_of(text):
    """Returns what all charts of a page have in common."""
    return json.loads(unescape(re.search('data-page="(.*?)"', text)[1]))


def red_lines(folder):
    marks = page_of((folder / "lightning_logs/it/report.html").read_text())["marks"]
    return {text for _, text, kind in marks if kind == "fault"}


def test_a_slow_loader_is_seen_on_its_rank_and_a_hot_loss_as_a_red_line(tmp_path):
    done = forked(tmp_path, *TROUBLED, "--trainer.nonfinite=skip", "--data.global_batch_size=24", ranks=3)
    assert done.code == 0, done.output
    history = read_history(tmp_path / "lightning_logs/it", "it")
    name = socket.gethostname()
    waits = [median(point.value for point in history.curves[f"ranks/data_ms/{rank}.{name}"]) for rank in (0, 1, 2)]
    assert waits[1] > 5 * max(waits[0], waits[2])
    assert history.recent_median("speed/worst_data") > 1.3
    for at in range(len(history.curves["speed/rest"])):  # of each window
        assert sum(history.curves[f"speed/{phase}"][at].value for phase in PHASES) == pytest.approx(1, abs=1e-3)
    assert min(point.value for phase in PHASES for point in history.curves[f"speed/{phase}"]) >= 0
    assert history.curves["run/memory_gb"][-1].value > 0.1
    assert 0 < history.curves["run/lr"][0].value < 2 * history.curves["train/lr"][0].value
    assert history.curves["run/cpu_cores"][-1].value > 0
    assert history.curves["run/checkpoint_mb"][-1].value > 0
    assert min(point.value for point in history.curves["train/grad_norm"]) > 0
    logged = [point.step for point in history.curves["train/loss"]]
    (struck,) = history.curves["train/skipped_steps"]
    assert [point.step for point in history.curves["train/grad_norm"]] == [step for step in logged if step != struck.step]
    (red,) = red_lines(tmp_path)
    assert f"step {struck.step} was left out, it was not finite" in red
    text = unescape((tmp_path / "lightning_logs/it/report.html").read_text())
    for what in (f"rank 1, {name}", "waiting for data", "ms a step that a rank waits for its data", "steps left out"):
        assert what in text, what


def test_a_run_that_ends_in_a_hot_loss_says_so(tmp_path):
    done = forked(tmp_path, *TROUBLED)
    assert done.code == 1
    (life,) = read_history(tmp_path / "lightning_logs/it", "it").lives
    assert life.state == "failed"
    assert life.why.startswith(f"The loss of step {STRUCK} (epoch 1) is not finite: nan on rank 0")
    (red,) = red_lines(tmp_path)
    assert f"failed after step {STRUCK - 1}: The loss of step {STRUCK}" in red
    text = (tmp_path / "lightning_logs/it/report.html").read_text()
    assert '<span class="badge failed">failed</span>' in text
    why = unescape(text[text.index("Why it ended") : text.index('<table class="facts">')])
    assert why.count(f"The loss of step {STRUCK} (epoch 1) is not finite") == 2, "as the cause, and in the end of the log"
    events = EventAccumulator(str(tmp_path / "lightning_logs/it")).Reload()
    assert [point.value for point in events.Scalars("watch/run/outcome")] == [0, -1]


def test_several_runs_side_by_side(place):
    (place / "lightning_logs/compared.html").touch()  # an earlier one, as lightning_logs/* names it
    done = report(place, "it", "other", "lightning_logs/compared.html")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == "Side by side: lightning_logs/compared.html"
    matches = [re.fullmatch(r"(it|other) +finished  step \d+  best val/acc +([\d.]+) at step \d+", line) for line in lines]
    assert len(matches) == 2, lines
    assert all(matches), lines
    assert float(matches[0][2]) >= float(matches[1][2]), "the best comes first"
    text = unescape((place / "lightning_logs/compared.html").read_text().replace("<wbr>", ""))
    assert "1, then 2, then 3" in text
    best = re.search(r"The best by val/acc \(higher is better\): (\w+), [\d.]+ at step \d+\.", text)
    assert [best[1], matches[0][1]] == [matches[0][1], re.search(r'data-run="0"><th scope="row" data-value="(\w+)"', text)[1]]
    assert re.search(r"<p>steps: .*global batch: 48; seed: 0; ranks: not the same \(", text), text[
        text.index("Side by side") :
    ][:600]
    assert '<th scope="col" title="model.optimizer.init_args.lr">optimizer.lr</th>' in text
    assert 'href="other/report.html"' in text
    assert "model.optimizer.init_args.lr" in text[text.index("What differs") :]
    histories = [read_history(place / "lightning_logs" / name, name) for name in ("it", "other")]
    assert "model.optimizer.init_args.lr" in differences(histories)
    assert "model.network.class_path" not in differences(histories)
    first, second = scaling(histories)  # on 3 ranks, and on 1, of the same model and global batch
    assert second == 1
    assert first > 0
    third = read_history(place / "lightning_logs/other", "third")
    third.curves["speed/samples_per_s"] = [
        point._replace(value=3 * point.value) for point in third.curves["speed/samples_per_s"]
    ]
    assert scaling([*histories, third])[1:] == pytest.approx([0.5, 1.5]), "by the median of those with the fewest ranks"
    histories[1].config["model"]["network"]["init_args"]["num_classes"] = 11
    assert scaling(histories) == [None, None], "what another model takes says nothing"
    for history in histories:
        history.curves.clear()
    assert scaling(histories) == [None, None]
    assert "2 runs" in compared(histories, place)  # with nothing to draw


def test_runs_of_a_sweep_have_every_metric_and_a_line_on_parallel_axes(place):
    """Twelve of them, with what only one has logged, a text among the settings, and no number where one has none."""
    histories = []
    for number in range(12):
        history = read_history(place / "lightning_logs/other", f"a-run-with-a-long-name-as-sweeps-make-them-{number}")
        history.config["model"]["optimizer"]["init_args"]["lr"] = 10.0**-number
        history.config["data"]["flip"] = "<b>" if number % 2 else None
        history.config["trainer"]["callbacks"] = [{"class_path": "own.Callback", "init_args": {"steps": number % 3}}]
        histories.append(history)
    histories[3].curves["val/f1"] = [point._replace(value=0.25) for point in histories[3].curves["val/acc"]]
    text = compared(histories, place)
    assert "<b>" not in text.replace('<b class="odd">', "")
    assert text.count("val/<wbr>f1, last") == 1
    assert len(re.findall(r'<path data-run="\d+" stroke="(#\w+)"', text)) == len({*COLOURS[:12]}) == 12
    ticks = re.findall(r'<text class="tick"[^>]*>(.*?)</text>', text)
    assert {"1e-11", "1", "&lt;b&gt;", "null"} <= {*ticks}
    assert not any("init_args" in tick or "steps" in tick for tick in ticks), "what has no name that is short has no axis"


def learned(values, tag="train/loss", **extra):
    curves = {tag: [Point(step, value, 1e9 + step) for step, value in enumerate(values, 1)], **extra}
    return History("it", Path(), [Life(1e9, 0, 1, {}, 2e9, len(values), state="finished")], curves, {}, "", None)


def test_runs_that_differ_in_their_callbacks_alone_have_columns_for_them():
    runs, average = [learned([2.0, 1.5 + at], "val/loss") for at in range(3)], "EMAWeightAveraging"
    for run, decay in zip(runs, (None, 0.9, 0.99), strict=True):
        averages = [{"class_path": f"lightning.pytorch.callbacks.{average}", "init_args": {"decay": decay}}]
        run.config["trainer"] = {"callbacks": [{"class_path": "own.Counter"}, *(averages if decay else [])]}
    text = compared(runs, Path())
    assert f'title="trainer.callbacks.{average}.decay"' in text
    assert 'title="trainer.callbacks.Counter' not in text
    assert "<h2>The sweep</h2>" in text
    runs[0].config["trainer"] = {}
    assert 'title="trainer.callbacks.Counter"' in compared(runs, Path())


def test_a_run_that_learns_nothing_is_told_so():
    chance = random.Random(0)
    noise = [chance.gauss(0, 0.1) for _ in range(200)]
    flat, leap = [2.303 + 0.001 * value for value in noise], [2.3, *(0.1 + 0.01 * value for value in noise)]
    assert did_not_learn(learned([2.3] * 50)) == "did not learn: train/loss 2.3 \u2192 2.3"
    assert did_not_learn(learned(flat)).startswith("did not learn: train/loss 2.303 \u2192 2.303")
    assert did_not_learn(learned([2.3 + value for value in noise]))
    assert did_not_learn(learned([2.3 + step for step in range(20)])) == "did not learn: train/loss 2.3 \u2192 21.3"
    assert did_not_learn(learned([2.3, 2.4] * 5 + [math.nan])).endswith("\u2192 nan")
    assert not did_not_learn(learned(leap)), "at once"
    assert not did_not_learn(learned([2.3 + value - step / 200 for step, value in enumerate(noise)])), "slowly"
    noisy = [3.8, 3.6, 5.4, 2.4, 3.0, 0.8, 4.1, 0.6, 2.0, 0.9]
    assert not did_not_learn(learned(noisy)), "it may have"
    assert not did_not_learn(learned([2.3] * 7)), "too little is known"
    assert not did_not_learn(learned([2.3] * 50, **{"val/acc": learned(range(50)).curves["train/loss"]}))
    assert "It did not learn: train/loss 2.3" in page(learned([2.3] * 50))
    assert compared([learned([2.3] * 50), learned(leap)], Path()).count("did not learn") == 1


def test_the_learning_rates_that_were_used_are_a_column_where_they_differ():
    def run(*rates, tag="run/lr"):
        return learned([2.3] * 9, **{tag: learned(rates).curves["train/loss"]})

    warm = run(0.01, 0.1, 0.001)
    assert f"{used_rates(warm)}" == "0.01 \u2192 0.1 \u2192 0.001"
    assert f"{used_rates(run(0.1, 0.1))}" == "0.1"
    for tag in ("train/lr", "lr-SGD", "learning_rate"):
        assert used_rates(run(0.5, tag=tag)).peak == 0.5
    assert used_rates(run(0.5, tag="lr-SGD-momentum")) is None
    assert "0.01 \u2192 0.1 \u2192 0.001</td>" in compared([warm, run(0.1, 0.1)], Path())
    assert "learning rate</th>" not in compared([warm, warm], Path())
    assert "as logged, after a step and so for the next one" in compared([warm, run(0.1, 0.1)], Path())
    assert "as the schedule set it" in page(warm)
    assert "as the schedule set it" not in page(run(0.5, tag="train/lr"))


def ended(folder, state, **extra):
    """Returns the page of a run in another folder, which has ended so."""
    *lines, last = [json.loads(line) for line in (folder / "life.jsonl").read_text().splitlines()]
    lines.append({**last, "state": state, **extra})
    (folder / "life.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return unescape(page(read_history(folder, folder.name)))


def test_a_killed_run_whose_step_nobody_noted_has_come_to_its_newest_checkpoint(place, tmp_path):
    """In a copy, whose files are younger than the run."""
    folder = tmp_path / "other"
    shutil.copytree(place / "lightning_logs/other", folder, copy_function=shutil.copyfile)
    for events in folder.glob("events*"):
        events.unlink()
    start = json.loads((folder / "life.jsonl").read_text().splitlines()[0])
    stop = {
        "event": "stop",
        "time": start["time"] + 1,
        "step": None,
        "state": "killed",
        "why": "rank 0 was killed by signal 9.",
    }
    (folder / "life.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(stop)}\n")
    history = read_history(folder, "other")
    assert history.step == int(history.checkpoint.stem.removeprefix("step-")) > 0
    assert history.lives[-1].end == stop["time"]


def test_a_run_elsewhere_goes_on_by_its_path_and_a_failed_one_after_its_cause_is_mended(place, tmp_path, monkeypatch):
    root = tmp_path / "with a space"
    folder = root / "lightning_logs/it"
    shutil.copytree(place / "lightning_logs/it", folder)
    text = ended(folder, "finished")
    assert f"--config '{folder}/config.yaml' --run '{folder}'\n" in text
    assert f'torch.load("{folder}/checkpoints/step-' in text
    assert "<h2>Resume it</h2>" in text
    monkeypatch.chdir(root)
    assert "--config lightning_logs/it/config.yaml --run it\n" in ended(folder, "finished")
    text = ended(folder, "failed", why="out of luck")
    assert "<h2>When the cause is fixed, resume it</h2>" in text
    next_step = (
        f"this resumes from there, on any number of ranks: <code>cd {shlex.quote(str(root))} && "
        "python -m project fit --config lightning_logs/it/config.yaml"
    )
    assert next_step in unescape(text[: text.index('<table class="facts">')])
    diverged = read_history(folder, "it")
    diverged.lives[-1].state = "finished"
    diverged.curves["train/loss"][-1] = diverged.curves["train/loss"][-1]._replace(value=float("nan"))
    assert "<h2>When the cause is fixed, resume it</h2>" in page(diverged)


def test_what_mends_the_cause_stands_below_it(copied):
    folder, _ = copied
    (folder / "log.txt").write_text(
        "2999-01-01 10:00:00,123 ERROR   The disk is full. HINT: make room.\n"
        "2999-01-01 10:00:01,123 ERROR   [rank 0, h1] The run hangs: rank 1.\nstacks\nAll end. HINT: see what it reads.\n"
        "2999-01-01 10:00:02,123 WARNING The run hangs: rank 1. HINT: buy another one.\n"
    )
    for name in ("hang-rank1.txt", "hang-rank0.txt", "hang-rank<b>.txt"):
        (folder / name).touch()
    for checkpoint in folder.glob("checkpoints/*"):
        checkpoint.unlink()
    text = ended(folder, "failed", why="The run hangs: rank 1.")
    box = text[text.index("Why it ended") : text.index("The end of its log")]
    assert '<strong>The run hangs: rank 1.</strong></p>\n<p class="hint">HINT: see what it reads.</p>' in box
    assert re.search(r"<p>\d+ steps were done; there is no checkpoint\.</p>", box)
    assert re.findall('href="(.*?)"', box) == ["hang-rank0.txt", "hang-rank1.txt"]
    assert '<p class="hint">HINT: sleep.</p>' in ended(folder, "failed", why="Too tired. HINT: sleep.")
    assert "HINT: the micro-batch does not fit." in ended(folder, "failed", why="rank 1 has failed: OutOfMemoryError: CUDA")
    assert "for want of memory has killed it" in ended(folder, "failed", why="rank 1 on h1 was killed by signal 9.")
    text = ended(folder, "failed", why="out of luck")
    assert 'class="hint"' not in text
    box, facts = text.split('<table class="facts">')[0:2]
    assert f"this begins anew: <code>python -m project fit --config {folder}/config.yaml --run {folder}</code>" in box
    assert "out of luck" not in facts.partition("<h2>")[0], "said once"
    assert "errors in its log" not in text
    assert re.search("At least [0-9,]+ steps were done", ended(folder, "failed", step=None, why="lost"))
    assert '<p class="errors"><a href="#warnings">2 errors in its log</a></p>' in ended(folder, "finished", why=None)


def test_the_shares_of_a_step_add_up_to_one(place):
    history = read_history(place / "lightning_logs/it", "it")
    measured = {**dict.fromkeys(PHASES, 0.0), "forward": 0.4, "backward": 0.3, "rest": 0.01}
    for name, value in measured.items():
        history.curves[f"speed/{name}"] = [point._replace(value=value) for point in history.curves["speed/rest"]]
    parts = shares_of_a_step(history)
    assert sum(parts.values()) == pytest.approx(1)
    assert parts["forward"] == 0.4
    assert parts["rest"] == pytest.approx(0.3)
    history.curves["speed/backward"] = [point._replace(value=0.9) for point in history.curves["speed/rest"]]
    assert sum(shares_of_a_step(history).values()) == pytest.approx(1)
    for tag in PHASES:
        history.curves.pop(f"speed/{tag}", None)
    assert shares_of_a_step(history) == {}


def test_axes_of_a_sweep_are_sorted_spread_and_labelled_so_that_they_can_be_read():
    lists = axis("widths", [[16, 32], [8, 16], None, [32, 64]])
    assert [text for _, text in lists.ticks] == ["[8, 16]", "[16, 32]", "[32, 64]", "null"]
    classes = axis("network", ["torchvision.models.resnet18", "torchvision.models.resnet50", "mine.resnet152"])
    assert [text for _, text in classes.ticks] == ["resnet152", "resnet18", "resnet50"]
    assert [text for _, text in axis("same", ["a.Net", "b.Net"]).ticks] == ["a.Net", "b.Net"]
    spread = axis("decay", [0, 1e-4, 1e-3, 1e-2])
    gaps = [after - before for before, after in pairwise(spread.places)]
    assert spread.places[0] == 0
    assert gaps[1] == pytest.approx(gaps[2])
    assert 0 < gaps[0] < gaps[1]
    assert axis("near", [1, 2, 30]).places[1] == pytest.approx(1 / 29), "not logarithmic"
    assert axis("far", [1, 10, 100]).places[1] == pytest.approx(0.5)
    assert axis("signed", [-1, 0, 100]).places == pytest.approx([0, 1 / 101, 1])
    ticks = axis("close", [1, 1.001, 1.5, 1.501, 1.999, 2]).ticks
    assert [text for _, text in ticks] == ["1", "1.5", "2"]


def test_the_metric_by_which_runs_are_judged_comes_first(place):
    histories = [read_history(place / "lightning_logs/other", f"run-{number}") for number in range(3)]
    for number, history in enumerate(histories):
        history.config["model"]["optimizer"]["init_args"]["lr"] = 10.0**-number
    assert metrics(histories)[0] == histories[0].monitored[0] == "val/acc"
    assert sweep(histories, differences(histories))[-1]._replace(places=[], ticks=[]) == Axis(
        "best val/acc", [], [], "higher is better"
    )
    for history in histories:
        history.lives[-1].known.update(monitor="val/loss", mode="min")
        history.__dict__.pop("monitored", None)
    assert metrics(histories)[0] == "val/loss"
    assert sweep(histories, differences(histories))[-1].note == "lower is better"


def contrast(colour, background):
    def light(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05

    return max(light(colour), light(background)) / min(light(colour), light(background))


def test_twenty_colours_are_told_from_the_page_by_day_and_by_night():
    assert len({*COLOURS}) == 20
    assert all(contrast(colour, page) >= 3 for colour in COLOURS for page in ("#ffffff", "#15181c"))


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_can_be_read_by_day_and_by_night():
    """WCAG's AA: a contrast of 4.5, of each colour of text, on the page and in its boxes."""
    style = (ROOT / "project/watch/pages/page.css").read_text()
    light, dark = (
        dict(re.findall(r"--(\w+):(#\w+)", rules)) for rules in re.findall(r":root[^{]*\{([^}]*--back[^}]*)\}", style)
    )
    used = {*re.findall(r"[{;](?:color|fill):var\(--(\w+)\)", style)} - {"back"}  # behind labels
    assert used == {"text", "soft", "fault", "good", "odd"}
    for colours in (light, {**light, **dark}):
        for name in used:
            for ground in ("back", "box"):
                darker, lighter = sorted((luminance(colours[name]), luminance(colours[ground])))
                assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (name, ground)
    assert 1.05 / (luminance("#4761dc") + 0.05) >= 4.5, "of a pressed button"


def test_what_is_damaged_is_left_out(place, tmp_path):
    folder = tmp_path / "half"
    folder.mkdir()
    whole = (place / "lightning_logs/it/life.jsonl").read_text()
    (folder / "life.jsonl").write_text(whole[:-30])
    (folder / "config.yaml").write_text("a: [")
    (folder / "log.txt").write_text("2026-01-01 10:00:00,123 WARNING [rank 1, there] <b>slow</b>\nTraceback\n")
    history = read_history(folder, "half")
    assert [life.state for life in history.lives] == ["killed", "stopped", "killed"]
    assert "&lt;b&gt;slow" in page(history)
    assert history.warnings == [("2026-01-01 10:00:00", "WARNING", "[rank 1, there] <b>slow</b>")]


def test_there_must_be_something_to_tell(place, tmp_path):
    (tmp_path / "empty").mkdir()
    for name, says in (("none", "There is no run none"), ("empty", "has neither curves nor a life.jsonl")):
        done = report(tmp_path, name)
        assert done.returncode == 2
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def watch(folder, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "project", "watch", "it", *words],
        cwd=folder, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture
def copied(place, tmp_path):
    """Returns the run's folder, copied, and the lines of its life."""
    folder = tmp_path / "lightning_logs/it"
    shutil.copytree(place / "lightning_logs/it", folder)
    return folder, (folder / "life.jsonl").read_text().splitlines(keepends=True)


def test_a_run_that_goes_on_is_watched_from_its_files_and_not_called_killed(copied, tmp_path):
    folder, life = copied
    (folder / "life.jsonl").write_text("".join(life[:-1]))
    with (folder / ".lock").open("a+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        assert "running, after step" in report(tmp_path, "it").stdout
        with watch(tmp_path, "--every", "0.1") as watching:
            line = watching.stdout.readline()
            assert re.search(r"step (\d+)/\1 .*train/loss [\d.]+ .*3 ranks on 1 host.* going on, last sign of life", line)
            with (folder / "life.jsonl").open("a") as file:
                file.write(life[-1])
            assert "finished" in watching.stdout.readline()
        assert watching.returncode == 0


def test_a_look_at_a_dead_run_fails(copied, tmp_path):
    folder, life = copied
    (folder / "life.jsonl").write_text("".join(life[:-1]))
    assert "lost, after step" in report(tmp_path, "it").stdout
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    with watch(tmp_path, "--once") as watching:
        assert "killed, last sign of life" in watching.stdout.read()
    assert watching.returncode == 1
    with watch(tmp_path, "--every", "0") as watching:
        pass
    assert watching.returncode == 2


def test_who_is_not_read_any_more_stops_looking(copied, tmp_path):
    folder, life = copied
    (folder / "life.jsonl").write_text("".join(life[:2]))
    with watch(tmp_path, "--every", "0.1") as watching:
        assert "killed: rank 0" in watching.stdout.readline()
        watching.stdout.close()
        (folder / "life.jsonl").write_text("".join(life[:4]))  # it was stopped, and may go on
    assert watching.returncode == 0


def test_a_login_node_does_not_wait_for_torch():
    heavy = "{'torch', 'lightning', 'tensorboard'}"
    code = f"import sys, project.cli.report, project.cli.watching; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_chart_that_one_value_would_flatten_begins_logarithmic_and_explains_its_crosses():
    def chart(*values):
        return Chart("loss", [Line("val/loss", [(at, value, at) for at, value in enumerate(values)])])

    assert chart(2.0, 1.9, 1.8, 1.7, 1e6, math.nan).log
    assert not chart(2.3, 1.0, 0.1, 0.01).log, "a loss that falls"
    assert not chart(0.0, 1.0, 1e6).log, "what is not positive has no place there"
    assert not chart(math.nan).log
    text = page(learned([2.0, 1.9, 1.8, 1.7, 1e6, math.nan], "val/loss"))
    assert 'aria-pressed="true"' in text
    assert "not finite</span>" in text
    assert "not finite</span>" not in page(learned([2.0, 1.9]))


def test_runs_that_python_puts_into_one_folder_are_told_apart(tmp_path):
    """A fit from step 0 is another run, but where a command line has written its configuration: there it begins anew."""
    lives = [Life(0.0, 0, 1, {}, 10.0, 5), Life(20.0, 5, 1, {}, 30.0, 9), Life(40.0, 0, 1, {}, 50.0, 3)]
    curves = {"loss": [Point(1, 3.0, 1.0), Point(9, 2.0, 29.0), Point(1, 4.0, 41.0)], "old": [Point(1, 1.0, 2.0)]}
    earlier, left, newest = newest_run(tmp_path, lives, curves)
    assert (earlier, left, newest) == (2, lives[2:], {"loss": curves["loss"][2:]})
    assert newest_run(tmp_path, lives[:2], curves) == (0, lives[:2], curves)
    history = learned([2.0, 1.9])
    history.earlier = 2
    assert "another run has written to this folder (2 starts)" in page(history)
    (tmp_path / "config.yaml").touch()
    assert newest_run(tmp_path, lives, curves) == (0, lives, curves)


def test_what_a_start_logs_again_is_no_sign_of_the_life_before(tmp_path):
    """A run that was killed, and resumed two hours later: its last validation is in the new events, too."""
    starts = [
        {"event": "start", "time": time, "began": time - 10, "step": step, "ranks": 1} for time, step in ((20, 0), (7300, 9))
    ]
    (tmp_path / "life.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    killed, _ = lives_of(tmp_path / "life.jsonl", [(40.0, 11), (7299.0, 9), (7310.0, 12)])
    assert (killed.end, killed.end_step) == (40.0, 11)
    killed, _ = lives_of(tmp_path / "life.jsonl", [(40.0, 8), (7299.0, 9)])
    assert (killed.end, killed.end_step) == (40.0, 9), "the next start has resumed from its checkpoint"


def test_a_spare_process_begins_where_the_start_before_it_has_ended(tmp_path):
    """Of a run with restarts: what its starts have lasted is no more than the run."""
    lines = [
        {"event": "start", "time": 20.0, "began": 10.0, "step": 0, "ranks": 1},
        {"event": "stop", "time": 80.0, "step": 57, "state": "killed", "why": "lost"},
        {"event": "start", "time": 81.0, "began": 23.0, "step": 40, "ranks": 1},
        {"event": "stop", "time": 121.0, "step": 80, "state": "finished", "why": None},
    ]
    (tmp_path / "life.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lives = lives_of(tmp_path / "life.jsonl")
    assert [(life.began, life.end) for life in lives] == [(10.0, 80.0), (80.0, 121.0)]
    assert goodput(lives).repeated == pytest.approx(60 * 17 / 57)


def test_a_run_without_curves_says_why(tmp_path, monkeypatch):
    """A script with a logger that is not TensorBoard's."""
    monkeypatch.chdir(tmp_path)
    logger = CSVLogger(tmp_path / "logs")
    Trainer(default_root_dir=tmp_path / "run", max_steps=3, logger=logger, accelerator="cpu", enable_progress_bar=False).fit(
        Regression(), DataLoader(Points(24), batch_size=4)
    )
    history = read_history(tmp_path / "run", "run")
    assert "another logger= takes their place" in page(history)
    assert "curves" in facts(history)
    history.curves["loss"] = [Point(1, 1.0, 1.0)]
    assert not facts(history)["curves"]


def test_a_time_begins_with_the_first_process_in_every_place():
    life = Life(110.0, 0, 1, {"began": 100.0}, 160.0, 5, state="finished")
    history = History("it", Path(), [life], {"train/loss": [Point(1, 2.0, 111.0)]}, {}, "", None)
    assert facts(history)["time"] == "0:01:00"
    assert facts(history)["goodput"].startswith("83.3% training")
    assert page_of(page(history))["axes"][1]["ends"] == [100.0, 160.0]


def test_charts_of_what_is_odd():
    line = Line("a & b", [(1, 2.0, 10), (2, float("nan"), 11), (3, float("inf"), 12), (4, 2.0, 13)])
    (drawn,) = json.loads(Chart("loss", [line]).data)["lines"]
    assert drawn["y"] == [2.0, "nan", "inf", 2.0]
    assert drawn["x"] == [[1, 2, 3, 4], [10, 11, 12, 13]]
    chart = Chart("many", [Line("line", [(at, float(at % 7), at) for at in range(100_000)])])
    assert len(chart.data) < 60_000


def test_the_words_of_somebody_else_are_text(place, tmp_path):
    """A folder that was made by others: markup in its name, its log, its profiles, its settings, and links out of it."""
    folder = tmp_path / "<b>it</b>"
    shutil.copytree(place / "lightning_logs/it", folder)
    start, *rest = [json.loads(line) for line in (folder / "life.jsonl").read_text().splitlines()][-2:]
    start |= {"command": "<b>command</b>", "user": "<b>user</b>", "changed": ["run", "<b>"]}
    failed = {**rest[0], "state": "failed", "why": "<b>cause</b>", "where": "<b>mine.py:3</b>"}
    failed["traceback"] = "<b>frame</b>" * 100_000
    (folder / "life.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (start, failed)))
    (folder / "log.txt").write_text("<b>log</b>\n" * 10_000 + "x" * 10_000)
    (folder / "profiles").mkdir()
    (folder / "profiles/step-000000001-rank0.txt").write_text("<b>profile</b>\n" * 100_000)
    (folder / "checkpoints/step-999999999.ckpt").symlink_to("/etc/passwd")
    (folder / "checkpoints/javascript:alert(1).ckpt").touch()
    text = page(read_history(folder, folder.name))
    assert "<b>" not in text.replace('<b class="odd">', "")
    assert all(f"&lt;b&gt;{what}" in text for what in ("cause", "mine.py:3", "frame", "command", "user", "profile"))
    assert len(text) < 3_000_000
    assert "step-999999999" not in text
    assert "javascript:" not in text
    assert text.count("&lt;b&gt;log") == 99


def test_a_report_that_cannot_be_written_does_not_change_how_a_run_ends(tmp_path):
    done = forked(tmp_path, *FIT, "--trainer.max_epochs=1")
    assert done.code == 0
    folder = tmp_path / "lightning_logs/it"
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    resumed = forked(tmp_path, *FIT)
    assert resumed.code == 0
    assert "The report can't be written" in resumed.output


# In a browser ---------------------------------------------------------------------------------------------------------

WORDS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--window-size=1400,1600"),
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    required = os.environ.get("BROWSER_TESTS") == "required"
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if not all(programs) and not required:
        pytest.skip("needs Chromium and ChromeDriver: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in (*WORDS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    try:
        yield driver
    finally:
        driver.quit()


INJECTED = "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'><iframe srcdoc='<b>x</b>'></iframe>"


def drawn(browser, file):
    """Opens a page, and waits for its charts."""
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get(file.as_uri())
    WebDriverWait(browser, 60).until(lambda driver: driver.execute_script("return charts.every(chart => chart.plot)"))


def shown(browser):
    """Returns what each chart shows of its x axis."""
    return {tuple(ends) for ends in browser.execute_script("return charts.map(({plot: {scales: {x}}}) => [x.min, x.max])")}


@pytest.mark.slow
def test_a_script_that_gets_into_a_report_does_not_run_and_its_own_does(place, browser, tmp_path):
    """The charts are drawn, their values are shown at the pointer, and of the page nothing else is run."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.support.wait import WebDriverWait

    whole = place / "lightning_logs/it/report.html"
    text = whole.read_text().replace("</h1>", f"</h1>{INJECTED}", 1)
    (tmp_path / "report.html").write_text(text)
    (tmp_path / "without.html").write_text(re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text))
    browser.get((tmp_path / "without.html").as_uri())
    WebDriverWait(browser, 60).until(lambda driver: driver.execute_script("return window.ran === 2"))
    for file in (whole, tmp_path / "report.html"):
        browser.get_log("browser")
        drawn(browser, file)
        assert browser.execute_script("return window.ran") is None
        complaints = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        assert any("Content Security Policy" in complaint for complaint in complaints) == (file != whole), complaints
        titles = browser.execute_script(
            "return charts.map(({figure}) => figure.querySelector('figcaption').firstChild.data.trim())"
        )
        assert {"loss", "acc", "grad_norm", "samples/s", "ms a step that a rank computes"} <= {*titles}
        assert len(shown(browser)) == 1, "one range in all charts"
        pictures = browser.execute_script("return [...document.images].map(image => image.naturalWidth)")
        assert len(pictures) >= 3
        assert file != whole or min(pictures) > 0
        figure = browser.find_element("css selector", "figure")
        ActionChains(browser).move_to_element(figure.find_element("css selector", ".u-over")).perform()
        assert re.search(r"train/loss: [\d.]+ at \d+", figure.find_element("css selector", ".reading").text)


PIXELS = """
    const colour = named(arguments[0]), probe = document.createElement('canvas').getContext('2d');
    probe.fillStyle = colour, probe.fillRect(0, 0, 1, 1);
    const wanted = probe.getImageData(0, 0, 1, 1).data;
    return charts.map(({plot: {ctx}}) => {
        const {data} = ctx.getImageData(0, 0, ctx.canvas.width, ctx.canvas.height);
        let count = 0;
        for (let at = 0; at < data.length; at += 4) count += [0, 1, 2].every(part => data[at + part] === wanted[part]);
        return count;
    })"""


@pytest.fixture
def failed(copied):
    """Returns the page of a run that has failed."""
    folder, life = copied
    ended = {**json.loads(life[-1]), "state": "failed", "why": "out of luck"}
    (folder / "life.jsonl").write_text("".join([*life[:-1], json.dumps(ended) + "\n"]))
    (folder / "report.html").write_text(page(read_history(folder, "it")))
    return folder / "report.html"


@pytest.mark.slow
def test_charts_are_zoomed_together_by_mouse_keys_and_fingers(failed, browser):
    from selenium.webdriver import ActionChains, Keys

    drawn(browser, failed)
    assert min(browser.execute_script(PIXELS, "--fault")) > 100, "the fault is a line in each chart"
    (whole,) = shown(browser)
    over = browser.find_element("css selector", ".u-over")
    wide = over.size["width"]
    ActionChains(browser).move_to_element_with_offset(over, -wide // 4, 0).click_and_hold().move_by_offset(
        wide // 2, 0
    ).release().perform()
    (zoomed,) = shown(browser)
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 2, rel=0.05)
    ActionChains(browser).double_click(over).perform()
    assert shown(browser) == {whole}

    plot = browser.find_element("css selector", ".plot")
    plot.send_keys("+")
    (zoomed,) = shown(browser)
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 2)
    steps = []
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT):
        plot.send_keys(key)
        reading = browser.find_element("css selector", ".reading").text
        steps.append(int(re.search(r"train/loss: [\d.]+ at (\d+)", reading)[1]))
    assert steps[0] == steps[2] < steps[1]
    plot.send_keys("0")
    assert shown(browser) == {whole}

    closer, wider, everything = browser.find_elements("css selector", "[data-zoom]")
    for button, share in ((closer, 0.5), (closer, 0.25), (wider, 0.5), (everything, 1)):
        button.click()
        ((low, high),) = shown(browser)
        assert high - low == pytest.approx(share * (whole[1] - whole[0]))
        assert everything.is_enabled() == (share < 1)

    box = browser.execute_script(
        "const over = document.querySelector('.u-over'); over.scrollIntoView({block: 'center'});"
        "return over.getBoundingClientRect().toJSON()"
    )
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})

    def touch(kind, *shares):
        points = [{"x": box["x"] + share * box["width"], "y": box["y"] + 50, "id": at} for at, share in enumerate(shares)]
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    for kind, *fingers in (("touchStart", 0.4, 0.6), ("touchMove", 0.3, 0.7), ("touchMove", 0.2, 0.8), ("touchEnd",)):
        touch(kind, *fingers)
    (zoomed,) = shown(browser)
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 3, rel=0.05)
    for kind, *fingers in (("touchStart", 0.5), ("touchMove", 0.3), ("touchMove", 0.25), ("touchEnd",)):
        touch(kind, *fingers)
    (moved,) = shown(browser)
    assert moved[0] - zoomed[0] == pytest.approx((zoomed[1] - zoomed[0]) / 4, rel=0.05)

    browser.find_element("css selector", "button.log").click()
    assert browser.execute_script("return charts.map(chart => chart.plot.scales.y.distr)")[:2] == [3, 1]
    browser.find_elements("css selector", "[name=axis]")[1].click()
    ((begin, _),) = shown(browser)
    assert begin > 1e9, "seconds since 1970"
    assert browser.execute_script("return charts.every(({plot}) => plot.data[0][0] > 1e9)"), "of the points, too"
    labels = browser.execute_script("return charts[0].plot.axes[0]._values")
    assert labels
    assert all(re.fullmatch(r"\d\d:\d\d(:\d\d)?", text) for text in labels), labels
    assert min(browser.execute_script(PIXELS, "--fault")) > 100


@pytest.mark.slow
def test_a_page_is_light_on_paper_and_fits_a_phone(failed, browser):
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    )
    try:
        drawn(browser, failed)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        assert browser.execute_script("return named('--back')") == "#15181c"
        assert browser.execute_script("return document.querySelector('.settings th').clientWidth") > 300, "above its value"
        ends = browser.execute_script(
            "const log = document.querySelector('pre.log'), text = document.createRange(); text.selectNodeContents(log);"
            "return [text, log].map(part => part.getBoundingClientRect().bottom)"
        )
        assert 0 <= ends[1] - ends[0] < 30, "it is the log's end that one sees"
        browser.execute_script("addEventListener('beforeprint', () => window.onPaper = [named('--back'), named('--fault')])")
        printed = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
        assert printed.startswith("JVBERi")  # %PDF
        assert browser.execute_script("return window.onPaper") == ["#fff", "#c8101e"]
        assert browser.execute_script("return named('--back')") == "#15181c", "and dark again"

        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": 718, "height": 1045, "deviceScaleFactor": 1, "mobile": False}
        )
        before, during, after, boxes = browser.execute_async_script(
            "const folds = () => [...document.querySelectorAll('details')].map(part => part.open), before = folds();"
            "const box = part => part.getBoundingClientRect().toJSON();"
            "dispatchEvent(new Event('beforeprint'));"
            "queueMicrotask(() => {"  # when the charts are drawn
            "const during = folds(), boxes = charts.map(({place, plot}) => [place, plot.ctx.canvas].map(box));"
            "dispatchEvent(new Event('afterprint'));"
            "arguments[0]([before, during, folds(), boxes])})"
        )
        assert before == after
        assert sum(before) < sum(during) < len(during), "the command is unfolded, all settings are not"
        assert len({plot["x"] for plot, _ in boxes}) == 2, "columns"
        assert all(plot["height"] - canvas["height"] < 8 for plot, canvas in boxes), "nothing is left empty below a chart"
        assert all(330 < canvas["width"] < 360 and 170 < canvas["height"] < 200 for _, canvas in boxes)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


@pytest.mark.slow
def test_runs_side_by_side_are_sorted_hidden_and_pointed_at(place, browser, tmp_path):
    from selenium.webdriver import ActionChains, Keys

    histories = []
    for number in range(12):
        history = read_history(place / "lightning_logs/other", f"a-run-with-a-long-name-as-sweeps-make-them-{number}")
        for tag, points in history.curves.items():  # what is equal in all has no column
            history.curves[tag] = [point._replace(value=point.value + number) for point in points]
        history.curves["val/acc"] = [point._replace(value=(number * 5 % 12) / 12) for point in history.curves["val/acc"]]
        history.config["model"]["optimizer"]["init_args"]["lr"] = 10.0**-number
        histories.append(history)
    file = tmp_path / "compared.html"
    file.write_text(compared(histories, place))
    drawn(browser, file)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 1400
    cut = "return [...document.querySelectorAll('.wide')].filter(box => box.scrollWidth > box.clientWidth).length"
    assert browser.execute_script(cut) == 0, "no column lies beyond the edge"

    opened = browser.execute_script(
        "const part = document.querySelector('.differences'), now = name => (dispatchEvent(new Event(name)), part.open);"
        "return [now('beforeprint'), now('afterprint')]"
    )
    assert opened == [True, False], "on paper nothing can be unfolded"

    def order():
        return [int(row.get_attribute("data-run")) for row in browser.find_elements("css selector", ".sortable tbody tr")]

    (heading,) = [button for button in browser.find_elements("css selector", "th button") if button.text == "val/acc, best"]
    heading.click()
    assert order() == sorted(range(12), key=lambda number: -(number * 5 % 12)), "the best first"
    heading.click()
    assert order() == sorted(range(12), key=lambda number: number * 5 % 12)
    (heading,) = [button for button in browser.find_elements("css selector", "th button") if button.text == "run"]
    heading.click()
    assert order() == [*range(12)]
    row = browser.find_elements("css selector", "tr[data-run]")[0]
    ActionChains(browser).move_to_element(row).perform()
    assert len(browser.find_elements("css selector", ".parallel path.focused")) == 1
    row.find_element("css selector", "input").click()
    assert len(browser.find_elements("css selector", ".parallel path.off")) == 1
    assert browser.execute_script("return charts.every(({plot}) => plot.series.filter(({show}) => !show).length === 1)")

    faded = "return charts.filter(({plot}) => plot.series.some(({alpha}) => alpha < 1)).length"
    assert browser.execute_script(faded) == 0, "for a hidden run nothing fades"
    assert len(browser.find_elements("css selector", ".runs-legend .off")) == 1
    assert len(browser.find_elements("css selector", ".parallel.some")) == 0
    row = browser.find_elements("css selector", "tr[data-run]")[1]
    ActionChains(browser).move_to_element(row).perform()
    assert browser.execute_script(faded) == len(browser.find_elements("css selector", "figure"))
    ActionChains(browser).move_to_element(browser.find_element("css selector", "h1")).perform()
    assert browser.execute_script(faded) == 0
    browser.find_element("css selector", ".plot").send_keys(Keys.ARROW_RIGHT)
    browser.execute_script("document.activeElement.blur()")
    assert browser.execute_script(faded) == 0

    browser.set_window_size(700, 500)
    try:
        legend, first = browser.execute_script(
            "document.querySelector('figure:last-of-type').scrollIntoView();"
            "return ['.runs-legend', 'figure'].map(name => document.querySelector(name).getBoundingClientRect().top)"
        )
        assert first < 0 <= legend < 200, "the legend stays while charts are scrolled"
        sides = browser.execute_script(
            "const box = document.querySelector('.wide'), [table] = box.children; box.scrollTo(300, 300);"
            "const head = table.tHead.rows[0].cells, row = table.tBodies[0].rows[8].cells, edge = box.getBoundingClientRect();"
            "const [left, top] = ['left', 'top'].map(side => cell => cell.getBoundingClientRect()[side] - edge[side]);"
            "return [box.scrollLeft, box.scrollTop, ...[head[0], row[0]].map(left), ...[head[0], head[3]].map(top)]"
        )
        assert min(sides[:2]) > 100, "scrolled both ways"
        assert sides[2:] == pytest.approx([0] * 4, abs=1), "and still there"
    finally:
        browser.set_window_size(1400, 1600)


@pytest.mark.slow
def test_the_labels_of_large_numbers_have_room(place, browser, tmp_path):
    history = read_history(place / "lightning_logs/it", "it")
    large = [point._replace(value=1e5 * point.step) for point in history.curves["train/loss"]]
    history.curves = {"train/loss": large, "close": [point._replace(value=-0.367 - 1e-7 * point.step) for point in large]}
    file = tmp_path / "report.html"
    file.write_text(page(history))
    drawn(browser, file)
    axes = browser.execute_script(
        "return charts.slice(0, 2).map(({plot}) => {"
        "const [, {_size, _values, ticks, gap, font}] = plot.axes; plot.ctx.font = font[0];"
        "const widths = _values.map(text => plot.ctx.measureText(text).width);"
        "return [_size, ticks.size + gap + Math.max(...widths) / devicePixelRatio, _values]})"
    )
    for size, needed, texts in axes:
        assert size >= needed > 56
        assert len({*texts}) == len(texts) > 2, "no two lines have one label"
