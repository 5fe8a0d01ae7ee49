"""What is logged is what TensorBoard shows."""

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
