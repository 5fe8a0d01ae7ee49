"""What is logged is what TensorBoard shows."""

import resource
import threading

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project.watch.curves import Curves
from project.watch.events import Events
from tests.conftest import ROOT


def shown(folder, *tags):
    """Returns what TensorBoard shows, and the report: the same."""
    accumulator = EventAccumulator(str(folder)).Reload()
    points = {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}
    assert {tag: [point[:2] for point in curve] for tag, curve in Curves(folder).read().items()} == points
    return [points[tag] for tag in tags]


def test_values_come_back_under_their_names_and_steps(tmp_path):
    events = Events(str(tmp_path))
    events.log_metrics({"train/loss": 1.5, "train/acc": 0.25}, step=3)
    events.log_metrics({"train/loss": 1.25, "several": {"one": 1.0}}, step=4)
    events.finalize("success")
    assert shown(tmp_path, "train/loss", "train/acc") == [[(3, 1.5), (4, 1.25)], [(3, 0.25)]]
    assert shown(tmp_path / "several_one", "several") == [[(4, 1.0)]]


def test_a_run_that_goes_on_has_each_point_once(tmp_path):
    """Ours log step 3 as 3; Lightning's log it as 2, and some of them at the start of the step, before it is saved."""
    killed = Events(str(tmp_path))
    killed.log_metrics({"train/loss": 1.0}, step=3)
    killed.log_metrics({"lr": 0.25}, step=3)
    saved = killed.logged_since(3)
    for tag, step in (("lr", 3), ("it/loss", 3), ("train/loss", 4), ("it/loss", 4)):
        killed.log_metrics({tag: 7.0}, step=step)
    killed.flush()
    resumed = Events(str(tmp_path))
    resumed.resume_at(3, saved)
    for tag, step in (("lr", 3), ("lr", 3), ("it/loss", 3), ("train/loss", 4)):
        resumed.log_metrics({tag: 0.5}, step=step)
    resumed.finalize("success")
    curves = shown(tmp_path, "train/loss", "lr", "it/loss")
    assert curves == [[(3, 1.0), (4, 0.5)], [(3, 0.25), (3, 0.5)], [(3, 0.5)]]


def test_what_each_micro_batch_logs_of_its_step_is_one_point(tmp_path):
    """As LearningRateMonitor does: a curve does not tell how many micro-batches a rank had."""
    events = Events(str(tmp_path))
    for step, value in ((0, 0.5), (0, 0.5), (0, 0.25), (1, 0.25), (1, 0.25)):
        events.log_metrics({"lr-SGD": value}, step=step)
    saved = events.logged_since(1)
    events.finalize("success")
    resumed = Events(str(tmp_path))
    resumed.resume_at(1, saved)
    for _ in range(3):
        resumed.log_metrics({"lr-SGD": 0.25}, step=1)
    resumed.finalize("success")
    assert shown(tmp_path, "lr-SGD") == [[(0, 0.5), (0, 0.25), (1, 0.25)]]


def test_a_clock_that_was_set_back_shows_no_point_twice(tmp_path):
    """Two starts lie an hour in the future, then the clock is right again."""
    for start in (0, 1):
        ahead = Events(str(tmp_path))
        if start:
            ahead.resume_at(3, [])
        for step in range(start * 3, start * 3 + 5):
            ahead.log_metrics({"train/loss": float(start)}, step=step)
        ahead.finalize("success")
        (file,) = (path for path in tmp_path.glob("events.*") if not path.name.endswith("ahead"))
        stamp = int(file.name.split(".")[3]) + 3600 + start
        file.rename(tmp_path / f"events.out.tfevents.{stamp}.host.1.{start}.ahead")
    back = Events(str(tmp_path))
    back.resume_at(6, [])
    for step in (6, 7):
        back.log_metrics({"train/loss": 2.0}, step=step)
    back.finalize("success")
    values = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert shown(tmp_path, "train/loss") == [list(enumerate(values))]


def test_the_errors_of_other_threads_are_still_said(tmp_path, monkeypatch):
    """Only TensorBoard's writing thread leaves its own to the next call."""
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    Events(str(tmp_path)), Events(str(tmp_path))

    def fails():
        raise OSError("the disk of somebody else")

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    assert [str(error.exc_value) for error in errors] == ["the disk of somebody else"]


def test_a_full_disk_leaves_no_empty_files_and_hides_what_is_repeated(tmp_path):
    before = Events(str(tmp_path))
    for step in range(8):
        before.log_metrics({"train/loss": 0.0}, step=step)
    before.finalize("success")
    back = Events(str(tmp_path))
    back.resume_at(5, [])
    files, limits = {*tmp_path.iterdir()}, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        for step in (5, 5, 5):
            back.log_metrics({"train/loss": 1.0}, step=step)
            back.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {*tmp_path.iterdir()} == files
    back.log_metrics({"train/loss": 2.0}, step=6)
    back.finalize("success")
    assert shown(tmp_path, "train/loss") == [[*((step, 0.0) for step in range(5)), (6, 2.0)]]


def test_events_are_written_by_what_survives_a_full_disk():
    """`board.experiment` tries each of its methods; what lies behind it would raise the error of a full disk."""
    behind = [file.name for file in (ROOT / "project").rglob("*.py") if "experiment.file_writer" in file.read_text()]
    assert behind == []
