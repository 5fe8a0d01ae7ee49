"""What runs did, on a page: lives, curves, warnings; of a run that was killed, stopped and moved, and of several."""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from html import unescape
from statistics import median

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project.watch.charts import Chart, Line, Mark
from project.watch.dashboard import _LAYOUT
from project.watch.history import PHASES, read_history
from project.watch.report import _rendered, compared, differences, page, scaling
from tests.conftest import ROOT, TINY, forked
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
    other = forked(place, *FIT, "--run=other", "--model.optimizer.lr=0.5")
    assert other.code == 0, other.output
    return place


def test_a_run_leaves_its_life(place):
    history = read_history(place / "lightning_logs/it", "it")
    assert [(one.ranks, one.state, one.why) for one in history.lives] == [
        (1, "killed", f"rank 0 on {socket.gethostname()} was killed by signal 9."),
        (2, "stopped", "SIGTERM"),
        (3, "finished", None),
    ]
    first, second, third = history.lives
    assert first.step == 0
    assert first.end_step >= second.step > 0
    assert second.end_step == third.step
    assert third.known["hosts"] == {next(iter(third.known["hosts"])): 3}
    found = json.loads((place / "lightning_logs/it/summary.json").read_text())
    assert found["state"] == "finished"
    assert found["starts"] == 3
    assert found["step"] == history.step == third.end_step
    assert found["samples"] == 48 * history.step
    assert (place / "lightning_logs/it" / found["checkpoint"]).exists()
    assert {"train/loss", "val/loss", "train/grad_norm"} <= found["metrics"].keys()


def test_the_page_needs_nothing_else_and_shows_it_all(place):
    text = (place / "lightning_logs/it/report.html").read_text()
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org)""", text)
    said = unescape(re.sub("<(?!figure)[^>]*>", "", text))
    shown = ("Run it", "killed", "stopped, SIGTERM", "finished", "3 ranks", "train/loss", "--run it", "global_batch_size: 48")
    for what in shown:
        assert what in said, what
    marks = drawn(text)[0]["marks"]  # each start but the first
    assert len(marks) == 2
    assert all("started again at step" in text for _, text, _ in marks)


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
    assert b"model.optimizer.init_args.lr" in settings
    assert b"data.global_batch_size" in settings


# Faults that are seen -------------------------------------------------------------------------------------------------

STRUCK = 3  # the step that sample 77 comes up in, of global batches of 32
TROUBLED = (
    *(word for word in words("--trainer.devices=1", "--trainer.log_every_n_steps=2") if "Dropped" not in word),
    "--data.source.init_args.train=" + json.dumps({"class_path": "tests.watch.plugged.Troubled", "init_args": {"at": 77}}),
    '--trainer.callbacks={"class_path":"project.watch.throughput.Throughput","init_args":{"every_n_steps":2}}',
    "--model.network=tests.probes.Dropped",
)


def drawn(page):
    """Returns what the page's script draws."""
    return [json.loads(unescape(data)) for data in re.findall('data-chart="(.*?)"', page)]


def red_lines(folder):
    marks = [mark for chart in drawn((folder / "lightning_logs/it/report.html").read_text()) for mark in chart["marks"]]
    return {text for _, text, kind in marks if kind == "fault"}


def test_a_slow_loader_is_seen_on_its_rank_and_a_hot_loss_as_a_red_line(tmp_path):
    done = forked(tmp_path, *TROUBLED, "--trainer.nonfinite=skip", "--data.global_batch_size=24", ranks=3)
    assert done.code == 0, done.output
    history = read_history(tmp_path / "lightning_logs/it", "it")
    name = socket.gethostname()
    waits = [median(one.value for one in history.curves[f"ranks/data_ms/{rank}.{name}"]) for rank in (0, 1, 2)]
    assert waits[1] > 5 * max(waits[0], waits[2])
    assert history.recent_median("speed/worst_data") > 1.3
    for at in range(len(history.curves["speed/rest"])):  # of each window
        assert sum(history.curves[f"speed/{phase}"][at].value for phase in PHASES) == pytest.approx(1, abs=1e-3)
    assert min(one.value for phase in PHASES for one in history.curves[f"speed/{phase}"]) >= 0
    assert history.curves["run/memory_gb"][-1].value > 0.1
    assert history.curves["run/cpu_cores"][-1].value > 0
    assert history.curves["run/checkpoint_mb"][-1].value > 0
    assert min(one.value for one in history.curves["train/grad_norm"]) > 0
    logged = [one.step for one in history.curves["train/loss"]]
    (struck,) = history.curves["train/skipped_steps"]
    assert [one.step for one in history.curves["train/grad_norm"]] == [step for step in logged if step != struck.step]
    (red,) = red_lines(tmp_path)
    assert f"step {struck.step} was left out, it was not finite" in red
    said = unescape((tmp_path / "lightning_logs/it/report.html").read_text())
    for what in (f"rank 1, {name}", "waiting for data", "ms a step that a rank waits for its data", "steps left out"):
        assert what in said, what


def test_a_run_that_ends_in_a_hot_loss_says_so(tmp_path):
    done = forked(tmp_path, *TROUBLED)
    assert done.code == 1
    (life,) = read_history(tmp_path / "lightning_logs/it", "it").lives
    assert life.state == "failed"
    assert life.why.startswith(f"The loss of step {STRUCK} (epoch 0) is not finite: nan on rank 0")
    (red,) = red_lines(tmp_path)
    assert f"failed after step {STRUCK - 1}: The loss of step {STRUCK}" in red


def test_several_runs_side_by_side(place):
    done = report(place, "it", "other")
    assert done.returncode == 0, done.stderr
    assert "Side by side" in done.stdout
    text = unescape((place / "lightning_logs/compared.html").read_text())
    assert "1, then 2, then 3" in text
    assert "model.optimizer.init_args.lr" in text
    histories = [read_history(place / "lightning_logs" / name, name) for name in ("it", "other")]
    assert "model.optimizer.init_args.lr" in differences(histories)
    assert "model.network.class_path" not in differences(histories)
    for one in histories:
        one.curves.clear()
    assert scaling(histories) == [None, None]
    assert "2 runs" in compared(histories)  # with nothing to draw


def test_what_is_damaged_is_left_out(place, tmp_path):
    folder = tmp_path / "half"
    folder.mkdir()
    whole = (place / "lightning_logs/it/life.jsonl").read_text()
    (folder / "life.jsonl").write_text(whole[:-30])
    (folder / "config.yaml").write_text("a: [")
    (folder / "log.txt").write_text("2026-01-01 10:00:00,123 WARNING [rank 1, there] <b>slow</b>\nTraceback\n")
    history = read_history(folder, "half")
    assert [one.state for one in history.lives] == ["killed", "stopped", "killed"]
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
        assert "going on" in report(tmp_path, "it").stdout
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
    assert "killed" in report(tmp_path, "it").stdout
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


def test_charts_of_what_is_odd():
    line = Line("a & b", [(1, 2.0), (2, float("nan")), (3, float("inf")), (4, 2.0)])
    (chart,) = drawn(rendered := _rendered(over_steps=[Chart("<loss>", [line], marks=[Mark(2, "x")])]))
    assert "&lt;loss&gt;" in rendered
    assert chart["lines"][0]["points"] == [[1, 2.0], [2, "nan"], [3, "inf"], [4, 2.0]]
    many = Chart("many", [Line("line", [(at, float(at % 7)) for at in range(100_000)])])
    assert len(many.data) < 60_000


def test_a_report_that_cannot_be_written_does_not_change_how_a_run_ends(tmp_path):
    done = forked(tmp_path, *FIT, "--trainer.max_epochs=1")
    assert done.code == 0
    folder = tmp_path / "lightning_logs/it"
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    again = forked(tmp_path, *FIT)
    assert again.code == 0
    assert "The report can't be written" in again.output


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
    for word in (*WORDS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    try:
        yield driver
    finally:
        driver.quit()


INJECTED = "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'><iframe srcdoc='<b>x</b>'></iframe>"


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
        browser.get(file.as_uri())
        assert browser.execute_script("return window.ran") is None
        complaints = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        assert any("Content Security Policy" in complaint for complaint in complaints) == (file != whole), complaints
        figures = browser.execute_script("""
            return [...document.querySelectorAll('figure')].map(figure => [
                figure.querySelector('figcaption').textContent,
                [...figure.querySelectorAll('path')].every(path => path.getTotalLength() > 0 || figure.querySelector('circle')),
                figure.querySelectorAll('line.mark').length])""")
        marks = {title: marks for title, _, marks in figures}
        assert {"loss", "acc", "grad_norm", "samples/s", "ms a step that a rank computes"} <= marks.keys()
        assert marks["loss"] == 2  # it was started three times
        assert all(has_lines for _, has_lines, _ in figures), figures
        figure = browser.find_element("css selector", "figure")
        ActionChains(browser).move_to_element(figure.find_element("css selector", "svg")).perform()
        assert re.search(r"train/loss: [\d.]+ at \d+", figure.find_element("css selector", ".reading").text)
