"""State of every kind is there again when a run goes on, or what can't be is said before the run is lost."""

import json

import pytest
import torch

from project.model import ImageClassifier
from project.train.made_later import make_room
from tests.conftest import forked
from tests.probes import Dropped, Moody
from tests.survive.test_resume import FIT, assert_same_run, faults, final, same
from tests.train.test_epochs import callbacks, stop

pytestmark = pytest.mark.slow

WORDS = (*FIT, "--model.network=tests.probes.Moody")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.faults), 2])
def test_state_of_every_kind(quick, tmp_path, ranks):
    """Numpy's values, a dict of the network's own, a buffer that grows, a mean that it moves itself, a state of each rank."""
    whole = tmp_path / "whole"
    whole.mkdir()
    assert forked(whole, *WORDS, callbacks("tests.probes.States"), ranks=ranks).code == 0
    places = stop(7, 18)
    for code in (143, 143, 0):
        done = quick(*WORDS, callbacks("tests.probes.States", *places), ranks=ranks)
        assert done.code == code, done.output
    assert_same_run(tmp_path, whole)
    ours, theirs = final(tmp_path), final(whole)
    assert same({n: repr(s) for n, s in ours["callbacks"].items()}, {n: repr(s) for n, s in theirs["callbacks"].items()})
    if ranks == 2:
        assert ours["states_of_ranks"][1] is not None
        assert "network.mean" in done.output, "whose the buffer is that the network moves itself"
    state = ours["state_dict"]
    assert state["network.layers.1.num_batches_tracked"] == 24


def test_what_could_not_be_read_again_is_named_before_the_first_step(quick, tmp_path):
    refused = quick(*FIT, callbacks("tests.probes.Unreadable"))
    assert refused.code == 1
    assert "the state of the callback Unreadable" in refused.output
    assert "datetime" in refused.output
    assert "Traceback" not in refused.output
    assert not list(tmp_path.glob("lightning_logs/it/checkpoints/*.ckpt"))


def test_what_becomes_unreadable_costs_no_good_checkpoint(quick, tmp_path):
    done = quick(*FIT, callbacks({"class_path": "tests.probes.Unreadable", "init_args": {"after": 10}}))
    assert done.code == 1, done.output
    assert "could NOT be written" in done.output
    assert "the state of the callback Unreadable" in done.output
    newest = max(tmp_path.glob("lightning_logs/it/checkpoints/*.ckpt"))
    assert newest.name <= "step-000000009.ckpt"


def test_a_parameter_that_is_made_later_is_named_at_the_first_checkpoint(quick):
    refused = quick(*FIT, "--model.network=tests.probes.GrowsLater", "--trainer.num_sanity_val_steps=0")
    assert refused.code == 1
    assert "network.scale was made while the run was going on" in refused.output
    assert "Traceback" not in refused.output


def test_another_network_is_another_network():
    """A buffer may have grown; anything else that differs is named."""
    module, other = ImageClassifier(Moody()), ImageClassifier(Dropped())
    make_room(module, {**module.state_dict(), "network.queue": torch.ones(5)})
    assert module.network.queue.shape == (5,)
    with pytest.raises(ValueError, match=r"of another network: 6 .*network\.mean is not there and"):
        make_room(module, other.state_dict())


def test_nobody_sees_batch_norms_working_buffers(quick, tmp_path):
    """In every hook of a step, the layer's buffers are the running statistics: they move once a step, and stay finite."""
    done = quick(*FIT, callbacks("tests.probes.Watcher"), "--trainer.max_steps=6", ranks=2)
    assert done.code == 0, done.output
    first, second = (json.loads((tmp_path / f"watcher-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    moves = [first["on_train_batch_start"][0]]
    for at, after in enumerate(first["on_train_batch_end"]):
        for hook in ("on_train_batch_start", "on_before_backward", "on_after_backward"):
            assert first[hook][at] == moves[-1], hook
        if at % 2:  # the last of the two micro-batches that a rank has in a step
            assert after != moves[-1]
            moves.append(after)
        assert after == moves[-1]


def test_an_average_of_the_weights_has_the_running_statistics(quick, tmp_path):
    """With decay 0 the average is the network."""
    ema = {"class_path": "lightning.pytorch.callbacks.EMAWeightAveraging", "init_args": {"decay": 0.0}}
    assert quick(*FIT, callbacks(ema)).code == 0
    plain = tmp_path / "plain"
    plain.mkdir()
    assert forked(plain, *FIT, faults()).code == 0
    assert same(dict(final(tmp_path)["state_dict"]), dict(final(plain)["state_dict"]))


def test_a_second_fit_knows_nothing_of_one_that_failed(tmp_path, monkeypatch):
    """From Python: the same module, first in a fit that an exception ends within a step."""
    from lightning.pytorch import Callback

    from project.data import ImageData, Synthetic
    from project.trainer import Trainer

    class Fails(Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            if trainer.global_step == 2:
                raise KeyError("this callback is broken")

    def fit(model, *more):
        data = ImageData(Synthetic(train_size=64, val_size=16, image_size=8), batch_size=4, global_batch_size=8)
        settings = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
        trainer = Trainer(**settings, default_root_dir=tmp_path, enable_checkpointing=False, callbacks=list(more))
        trainer.fit(model, datamodule=data)

    torch.manual_seed(0)
    model = ImageClassifier(Dropped())
    clean = ImageClassifier(Dropped())
    clean.load_state_dict(before := {name: value.clone() for name, value in model.state_dict().items()})
    with pytest.raises(KeyError):
        fit(model, Fails())
    model.load_state_dict(before)
    fit(model)
    fit(clean)
    assert same(dict(model.state_dict()), dict(clean.state_dict()))
    assert model.network.layers[1].momentum == 0.1
    assert float(model.epoch_tally.sums[3]) == float(clean.epoch_tally.sums[3])
