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
from contextlib import contextmanager
from html import unescape
from statistics import median
from urllib.request import urlopen

import pytest

from project.watch.charts import Chart, Line, Mark
from project.watch.dashboard import _LAYOUT
from project.watch.history import PHASES, read_history
from project.watch.report import _PAGES, compared, differences, page, scaling
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
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


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
    said = unescape(re.sub("<[^>]*>", "", text))
    for what in (
        "Run it",
        "killed",
        "stopped, SIGTERM",
        "finished",
        "3 ranks",
        "train/loss",
        "--run it",
        "global_batch_size: 48",
    ):
        assert what in said, what
    assert text.count("<title>") - 1 >= 2  # each start but the first is marked on the curves
    assert "started again at step" in said


# Faults that are seen -------------------------------------------------------------------------------------------------

STRUCK = 3  # the step that sample 77 comes up in, of global batches of 32
TROUBLED = (
    *(word for word in words("--trainer.devices=1", "--trainer.log_every_n_steps=2") if "Dropped" not in word),
    "--data.source.init_args.train=" + json.dumps({"class_path": "tests.watch.slow.Troubled", "init_args": {"at": 77}}),
    '--trainer.callbacks={"class_path":"project.watch.throughput.Throughput","init_args":{"every_n_steps":2}}',
    "--model.network=tests.probes.Dropped",
)


def red_lines(folder):
    text = (folder / "lightning_logs/it/report.html").read_text()
    return {unescape(one) for one in re.findall(r'<line class="fault"[^>]*><title>(.*?)</title>', text)}


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
    assert history.last("run/memory_gb") > 0.1
    assert history.last("run/cpu_cores") > 0
    assert history.last("run/checkpoint_mb") > 0
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


def test_a_run_that_goes_on_is_not_called_killed(place):
    folder = place / "lightning_logs/it"
    life = (folder / "life.jsonl").read_text()
    try:
        (folder / "life.jsonl").write_text("".join(line + "\n" for line in life.splitlines()[:-1]))
        with (folder / ".lock").open("a+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            assert "going on" in report(place, "it").stdout
        assert "killed" in report(place, "it").stdout
    finally:
        (folder / "life.jsonl").write_text(life)


@contextmanager
def reads(folder, verb, *words):
    with subprocess.Popen(
        [sys.executable, "-m", "project", verb, *words],
        cwd=folder, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
            assert process.wait(30) is not None
        finally:
            process.kill()


def test_a_run_is_watched_from_its_files(place, tmp_path):
    runs = tmp_path / "lightning_logs"
    shutil.copytree(place / "lightning_logs", runs)
    life = runs / "it/life.jsonl"
    *lines, last = life.read_text().splitlines(keepends=True)
    life.write_text("".join(lines))
    with (runs / "it/.lock").open("a+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        with reads(tmp_path, "watch", "it", "--every", "0.1") as watch:
            said = watch.stdout.readline()
            assert re.search(r"step (\d+)/\1 .*train/loss [\d.]+ .*3 ranks on 1 host.* going on, last sign of life", said)
            with life.open("a") as file:
                file.write(last)
            assert "finished" in watch.stdout.readline()
        assert watch.returncode == 0


def test_a_look_at_a_dead_run_fails(place, tmp_path):
    folder = tmp_path / "lightning_logs/it"
    shutil.copytree(place / "lightning_logs/it", folder)
    life = (folder / "life.jsonl").read_text().splitlines(keepends=True)
    (folder / "life.jsonl").write_text("".join(life[:-1]))
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    with reads(tmp_path, "watch", "it", "--once") as watch:
        assert "killed, last sign of life" in watch.stdout.read()
    assert watch.returncode == 1
    with reads(tmp_path, "watch", "it", "--every", "0") as watch:
        pass
    assert watch.returncode == 2


def test_who_is_not_read_any_more_stops_looking(place, tmp_path):
    folder = tmp_path / "lightning_logs/it"
    shutil.copytree(place / "lightning_logs/it", folder)
    life = (folder / "life.jsonl").read_text().splitlines(keepends=True)
    (folder / "life.jsonl").write_text("".join(life[:2]))
    with reads(tmp_path, "watch", "it", "--every", "0.1") as watch:
        assert "killed: rank 0" in watch.stdout.readline()
        watch.stdout.close()
        (folder / "life.jsonl").write_text("".join(life[:4]))  # it was stopped, and may go on
    assert watch.returncode == 0


def test_a_login_node_does_not_wait_for_torch():
    heavy = "{'torch', 'lightning', 'tensorboard'}"
    code = f"import sys, project.cli.report, project.cli.watching; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_charts_of_what_is_odd():
    drawn = _PAGES.get_template("page.html").module.chart
    odd = drawn(
        Chart("<loss>", [Line("a & b", [(1, 2.0), (2, float("nan")), (3, float("inf")), (4, 2.0)])], "steps", [Mark(2, "x")])
    )
    assert "&lt;loss&gt;" in odd
    assert odd.count("&times;") == 2
    assert "nan " not in odd.split("data-chart")[1].split(">", 1)[1].replace("<title>nan", "")
    many = drawn(Chart("many", [Line("line", [(at, float(at % 7)) for at in range(100_000)])]))
    assert len(many) < 60_000


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


def until(browser, what, seconds=60):
    """What a script gives, once it gives something."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, seconds).until(lambda driver: driver.execute_script(what))


DEEP = """
const inside = node => [...(node.shadowRoot ? node.shadowRoot.childNodes : []), ...node.childNodes];
const elements = (node, name) => inside(node).flatMap(
    one => [...(one.localName === name ? [one] : []), ...elements(one, name)]);
const text = node => node.nodeType === 3 ? node.data.trim() + ' '
    : ['style', 'script', 'dom-module', 'template'].includes(node.localName) ? '' : inside(node).map(text).join('');
"""
"""Looks into web components, too."""


def complaints(browser):
    return [one["message"] for one in browser.get_log("browser") if one["level"] == "SEVERE"]


@pytest.mark.slow
def test_the_report_in_a_browser(place, browser):
    from selenium.webdriver import ActionChains

    browser.get((place / "lightning_logs/it/report.html").as_uri())
    drawn = browser.execute_script("""
        return [...document.querySelectorAll('figure')].map(one => [
            one.querySelector('figcaption').textContent,
            [...one.querySelectorAll('path')].every(path => path.getTotalLength() > 0 || one.querySelector('circle')),
            one.querySelectorAll('line.mark').length])""")
    titles = [title for title, _, _ in drawn]
    for title in ("loss", "acc", "grad_norm", "samples/s", "shares of a step", "memory of the largest rank, GB"):
        assert title in titles
    assert "ms a step that a rank computes" in titles
    assert all(has_lines for _, has_lines, _ in drawn), drawn
    assert {title: marks for title, _, marks in drawn}["loss"] == 2  # it was started three times
    figure = browser.find_element("css selector", "figure")
    ActionChains(browser).move_to_element(figure.find_element("css selector", "svg")).perform()
    assert re.search(r"train/loss: [\d.]+ at \d+", figure.find_element("css selector", ".reading").text)
    browser.get((place / "lightning_logs/it/report.html").as_uri() + "#")
    assert complaints(browser) == []


INJECTED = "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'><iframe srcdoc='<b>x</b>'></iframe>"


@pytest.mark.slow
def test_a_script_that_gets_into_a_report_does_not_run(place, browser, tmp_path):
    from selenium.webdriver import ActionChains

    text = (place / "lightning_logs/it/report.html").read_text().replace("</h1>", f"</h1>{INJECTED}", 1)
    (tmp_path / "report.html").write_text(text)
    (tmp_path / "without.html").write_text(re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text))
    browser.get((tmp_path / "without.html").as_uri())
    until(browser, "return window.ran === 2")
    complaints(browser)
    browser.get((tmp_path / "report.html").as_uri())
    assert browser.execute_script("return window.ran") is None
    assert any("Content Security Policy" in one for one in complaints(browser))
    figure = browser.find_element("css selector", "figure")
    ActionChains(browser).move_to_element(figure.find_element("css selector", "svg")).perform()
    assert re.search(r"train/loss: [\d.]+ at \d+", figure.find_element("css selector", ".reading").text)


def has_read(address, *runs):
    """Whether TensorBoard, which reads in the background, has come to the end of these runs."""
    with urlopen(f"{address}/data/plugin/scalars/tags", timeout=30) as answer:
        found = json.load(answer)
    return all("run/checkpoint_mb" in found.get(run, ()) for run in runs)


@pytest.mark.slow
def test_tensorboard_in_a_browser(place, browser):
    from selenium.webdriver.support.wait import WebDriverWait

    words = [sys.executable, "-m", "tensorboard.main", "--logdir", "lightning_logs", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(words, cwd=place, stderr=subprocess.PIPE, text=True) as board:
        try:
            address = next(found[0] for line in board.stderr if (found := re.search(r"http://127.0.0.1:\d+", line)))
            WebDriverWait(browser, 60).until(lambda _: has_read(address, "it", "other"))
            browser.get(f"{address}/#custom_scalars")
            cards = until(
                browser,
                DEEP
                + """
                const cards = elements(document, 'tf-custom-scalar-multi-line-chart-card').map(text);
                const drawn = one => /Matches \\([1-9]/.test(one) || /steps left out.*Matches/.test(one)
                return cards.length && cards.every(drawn) && cards""",
            )
            assert sorted(re.match(r"\s*(.*?)\s{5}", card)[1] for card in cards) == sorted(
                title for category in _LAYOUT.values() for title in category
            )
            browser.get(f"{address}/#timeseries")
            until(browser, DEEP + "return elements(document, 'scalar-card').length > 5")
            browser.get(f"{address}/#hparams")
            said = DEEP + "const said = text(document.documentElement); return said.includes('{}') && said"
            assert "data.global_batch_size" in until(browser, said.format("model.optimizer.init_args.lr"))
            browser.get(f"{address}/#text")
            until(browser, said.format("seed_everything"))
            browser.get(f"{address}/#images")
            shown = until(browser, said.format("val/confusion"))
            assert "val/mistakes" in shown
            assert "train/inputs" in shown
            until(browser, DEEP + "return elements(document, 'img').filter(one => one.naturalWidth > 60).length >= 3")
            assert complaints(browser) == []
        finally:
            board.kill()  # asked to end while it answers, it may forget that
