"""What is logged is what TensorBoard shows."""

import threading

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project.watch.events import Events


def test_values_come_back_under_their_names_and_steps(tmp_path):
    events = Events(str(tmp_path))
    events.log_metrics({"train/loss": 1.5, "train/acc": 0.25}, step=3)
    events.log_metrics({"train/loss": 1.25, "several": {"one": 1.0}}, step=4)
    events.finalize("success")
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(3, 1.5), (4, 1.25)]
    assert [(one.step, one.value) for one in found.Scalars("train/acc")] == [(3, 0.25)]
    several = EventAccumulator(str(tmp_path / "several_one")).Reload()
    assert [(one.step, one.value) for one in several.Scalars("several")] == [(4, 1.0)]


def test_a_run_that_goes_on_has_each_point_once(tmp_path):
    """Ours log step 3 as 3; Lightning's log it as 2, and some of them at the start of the step, before it is saved."""
    killed = Events(str(tmp_path))
    killed.log_metrics({"train/loss": 1.0}, step=3)
    killed.log_metrics({"lr": 0.1}, step=3)
    saved = killed.logged_since(3)
    for tag, step in (("lr", 3), ("it/loss", 3), ("train/loss", 4), ("it/loss", 4)):
        killed.log_metrics({tag: 7.0}, step=step)
    killed.flush()
    goes_on = Events(str(tmp_path))
    goes_on.resume_at(3, saved)
    for tag, step in (("lr", 3), ("lr", 3), ("it/loss", 3), ("train/loss", 4)):
        goes_on.log_metrics({tag: 0.5}, step=step)
    goes_on.finalize("success")
    found = EventAccumulator(str(tmp_path)).Reload()
    shown = {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in ("train/loss", "lr", "it/loss")}
    assert shown["train/loss"] == [(3, 1.0), (4, 0.5)]
    assert [(step, round(value, 3)) for step, value in shown["lr"]] == [(3, 0.1), (3, 0.5)]
    assert shown["it/loss"] == [(3, 0.5)]


def test_a_clock_that_was_set_back_shows_no_point_twice(tmp_path):
    """Two starts lie an hour in the future, then the clock is right again."""
    for start in (0, 1):
        ahead = Events(str(tmp_path))
        if start:
            ahead.resume_at(3, [])
        for step in range(start * 3, start * 3 + 5):
            ahead.log_metrics({"train/loss": float(start)}, step=step)
        ahead.finalize("success")
        (file,) = (one for one in tmp_path.glob("events.*") if not one.name.endswith("ahead"))
        stamp = int(file.name.split(".")[3]) + 3600 + start
        file.rename(tmp_path / f"events.out.tfevents.{stamp}.host.1.{start}.ahead")
    back = Events(str(tmp_path))
    back.resume_at(6, [])
    for step in (6, 7):
        back.log_metrics({"train/loss": 2.0}, step=step)
    back.finalize("success")
    shown = [(one.step, one.value) for one in EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")]
    assert shown == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0), (6, 2.0), (7, 2.0)]


def test_the_errors_of_other_threads_are_still_said(tmp_path, monkeypatch):
    """Only TensorBoard's writing thread leaves its own to the next call."""
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    Events(str(tmp_path)), Events(str(tmp_path))

    def fails():
        raise OSError("the disk of somebody else")

    other = threading.Thread(target=fails)
    other.start()
    other.join()
    assert [str(one.exc_value) for one in said] == ["the disk of somebody else"]
