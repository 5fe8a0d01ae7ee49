"""Real runs, and what `python -m project same` says of them."""

import copy
import json
import pickle
import re
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from project import Trainer
from project.checkpoints.callback import Checkpoints
from project.cli import same
from project.watch.fingerprint_file import FILE, Recorded, read
from project.watch.fingerprints import Fingerprints, ModuleOutputs
from tests.conftest import TINY, Run, forked
from tests.survive.test_resume import faults

FIT = (
    *("fit", "--config=configs/ddp.yaml", *TINY, "--trainer.accelerator=cpu", "--data.batch_size=8", "--run=it"),
    *("--data.global_batch_size=48", "--trainer.max_steps=4", "--trainer.limit_val_batches=0", "--checkpoints.monitor=null"),
)
NOISY = [argument for argument in FIT if "network" not in argument] + ["--model.network=tests.watch.plugged.Noisy"]


def fit(folder: Path, *words: str, ranks: int = 1, base=FIT) -> Run:
    folder.mkdir(exist_ok=True)
    done = forked(folder, *base, *words, ranks=ranks)
    assert done.code == 0, done.output
    return done


def records(folder: Path) -> Recorded:
    return read(folder / "lightning_logs/it", "it")


@pytest.fixture
def verdict(capsys, tmp_path, monkeypatch):
    """verdict("a", "b") is the exit code and what the verb says of the runs in these folders."""
    monkeypatch.chdir(tmp_path)

    def ask(*folders: str) -> tuple[int, str]:
        code = same.main([f"{folder}/lightning_logs/it" for folder in folders])
        out = capsys.readouterr()
        return code, " ".join((out.out + out.err).split())

    return ask


def test_exact_on_one_and_on_three_ranks_is_the_same_and_otherwise_not(tmp_path, verdict):
    fit(tmp_path / "one", "--trainer.exact=true")
    fit(tmp_path / "three", "--trainer.exact=true", ranks=3)
    code, text = verdict("one", "three")
    assert code == 0, text
    assert (
        " are the same to the last bit up to step 4 of both, on 1 and 3 ranks. Compared: weights and losses of 4 steps, "
        in text
    )
    fit(tmp_path / "rounded", ranks=3)
    code, text = verdict("one", "rounded")
    assert code == 1
    assert "step 1 (epoch 1) is the first that differs. The weights before it and all losses in it are the same" in text
    assert "trainer.exact: True, and False" in text
    assert "Settings that differ: trainer.exact: True, and False Where they ran: trainer.devices: auto, and 3" in text
    fit(tmp_path / "other", "--seed_everything=1")
    code, text = verdict("one", "other")
    assert code == 1
    assert "they begin with other weights" in text
    assert "Settings that differ: " in text
    assert "seed_everything: 0, and 1" in text


def test_a_module_with_chance_of_its_own_is_named(tmp_path, verdict):
    for name in ("a", "b"):
        fit(tmp_path / name, base=NOISY)
    code, text = verdict("a", "b")
    assert code == 1
    assert "step 1 (epoch 1) is the first that differs" in text
    assert "the loss of micro-batch 0 is not: it is the forward pass" in text
    assert "The first module that gave something else, in micro-batch 0: network.noise (Noise), after" in text
    assert "after network.before (Conv2d), which gave the same" in text


def test_killed_and_resumed_is_the_same(tmp_path, verdict):
    words = ("--trainer.max_steps=14", "--checkpoints.every_n_steps=4")
    fit(tmp_path / "whole", *words)
    struck = faults({"step": 11})  # its first ten steps are in the file, and the last checkpoint is of step 8
    (tmp_path / "killed").mkdir()
    assert forked(tmp_path / "killed", *FIT, *words, struck).code == -signal.SIGKILL
    with (tmp_path / "killed/lightning_logs/it" / FILE).open("a") as file:
        file.write('{"step":11,"epo')  # it was being written
    fit(tmp_path / "killed", *words, struck)
    recorded = records(tmp_path / "killed")
    assert [(start.step, [step.step for step in steps]) for start, steps in recorded.starts] == [
        (0, [*range(1, 11)]),
        (8, [*range(9, 15)]),
    ]
    assert verdict("whole", "killed")[0] == 0
    code, text = verdict("killed")
    assert code == 0
    assert "2 steps, from 9 to 10, were computed more than once, the same to the last bit each time." in text


def test_a_rank_whose_weights_change_silently_is_named(tmp_path, verdict):
    callbacks = json.dumps([{"class_path": "tests.watch.plugged.Spoil", "init_args": {"rank": 1, "step": 2}}])
    words = (f"--trainer.callbacks={callbacks}", "--trainer.limit_val_batches=2")
    done = fit(tmp_path / "spoilt", *words, "--trainer.ranks_differ=warn", ranks=2)
    warnings = re.findall(r"WARNING .*After step (\d+), rank (\d+) on \S+ has other weights", done.output)
    assert warnings == [("2", "1")], done.output
    recorded = records(tmp_path / "spoilt")
    assert len(recorded.steps[1].record.modules) > 20, "also of a network within DistributedDataParallel"
    differing = {step: list(taken.record.others) for step, taken in recorded.steps.items()}
    assert differing == {1: [], 2: ["1"], 3: ["1"], 4: ["1"]}
    code, text = verdict("spoilt")
    assert code == 1
    assert "rank 1 had other weights than rank 0 after step 2" in text
    (tmp_path / "stopped").mkdir()
    stopped = forked(tmp_path / "stopped", *FIT, *words, ranks=2)
    assert stopped.code == 1
    assert "Not the same: network" in stopped.output
    assert "Traceback" not in stopped.output
    assert not [*(tmp_path / "stopped/lightning_logs/it/checkpoints").glob("*.ckpt")]


# In this process -----------------------------------------------------------------------------------------------------


class Failing(BoringModel):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            raise KeyError("a bug")
        return super().training_step(batch, batch_idx)


def trained(folder: Path, model, **settings) -> Path:
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False, "default_root_dir": folder}
    trainer = Trainer(**{"max_steps": 6, "limit_val_batches": 0, **quiet, **settings})
    trainer.fit(model)
    return folder


def test_a_run_that_fails_has_its_last_steps_on_record(tmp_path):
    with pytest.raises(KeyError, match="a bug"):
        trained(tmp_path, Failing())
    assert list(read(tmp_path, "it").steps) == [1, 2, 3]


def test_left_out_where_it_is_not_wanted(tmp_path):
    trained(tmp_path, BoringModel(), fingerprints=False)
    trained(tmp_path, BoringModel(), fast_dev_run=True)
    trained(tmp_path, BoringModel(), barebones=True, enable_checkpointing=None, logger=None, enable_progress_bar=None)
    assert not (tmp_path / FILE).exists()


def test_a_module_that_is_compiled_as_a_whole_finds_no_hooks(tmp_path):
    compiled = torch.compile(BoringModel(), backend="eager")
    recorded = read(trained(tmp_path, compiled, max_steps=2), "it")
    assert [taken.record.modules for taken in recorded.steps.values()] == [(), ()]
    vars(model := BoringModel())["training_step"] = None  # as Lightning leaves it of a compiled one
    ModuleOutputs(model)
    assert not model.layer._forward_hooks
    assert read(trained(tmp_path / "plain", BoringModel(), max_steps=2), "it").steps[1].record.modules[0][0] == "layer (Linear)"


class Two(BoringModel):
    """Steps two optimisers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self(batch).sum())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.2)]


class Growing(BoringModel):
    """Has a tensor whose size changes, and another one instead in its second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.current_epoch == 0:
            self.queue = torch.cat([self.queue, torch.ones(1)])

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.register_buffer("later", torch.zeros(3))
            del self.queue


def test_steps_of_all_kinds(tmp_path):
    manual = read(trained(tmp_path / "manual", Two(), max_steps=106, max_epochs=None), "manual")
    assert list(manual.steps) == [*range(2, 107, 2)]
    assert [step for step, taken in manual.steps.items() if taken.record.modules] == [2, 102]
    assert all(len(taken.record.losses) == 1 for taken in manual.steps.values())
    accumulated = read(trained(tmp_path / "accumulated", BoringModel(), accumulate_grad_batches=3), "accumulated")
    assert all(list(taken.record.losses) == [0, 1, 2] for taken in accumulated.steps.values())
    double = read(trained(tmp_path / "double", BoringModel(), precision="64-true"), "double")
    assert {len(bits) for taken in double.steps.values() for bits in taken.record.losses.values()} == {8}
    recorded = read(
        trained(tmp_path / "growing", Growing(), limit_train_batches=3, enable_checkpointing=False, fingerprints=True),
        "growing",
    )
    assert [(start.step, start.names[2:], len(steps)) for start, steps in recorded.starts] == [
        (0, ("queue",), 3),
        (3, ("later",), 3),
    ]
    assert len({step.tensors[2] for step in recorded.starts[0][1]}) == 3
    assert recorded.starts[1][0].weights is None, "another network than before the step"


def test_the_loss_is_as_the_module_gave_it(tmp_path):
    """Not divided by the micro-batches of a rank, whose number is another on other ranks."""
    seen = []

    class Listening(BoringModel):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            seen.append(output["loss"].detach().numpy().tobytes())
            return output

    recorded = read(trained(tmp_path, Listening(), accumulate_grad_batches=2), "it")
    assert [bits for taken in recorded.steps.values() for _, bits in sorted(taken.record.losses.items())] == seen


def test_what_a_checkpoint_has_behind_it_is_on_record_with_it(tmp_path):
    known = {}

    class Looking(Callback):
        def on_train_batch_start(self, trainer, *args):
            path = tmp_path / FILE
            known[trainer.global_step] = path.read_text().count('"losses"') if path.exists() else 0

    trained(tmp_path, BoringModel(), callbacks=[Looking(), Checkpoints(every_n_steps=4)])
    assert known == {0: 0, 1: 0, 2: 0, 3: 2, 4: 4, 5: 4}  # the rehearsal asks for a checkpoint, too
    assert len(read(tmp_path, "it").steps) == 6


def test_a_folder_that_can_not_be_written_ends_no_training(tmp_path, caplog):
    (tmp_path / FILE).mkdir()
    trained(tmp_path, BoringModel(), max_steps=30)
    messages = [record.getMessage() for record in caplog.records if "Fingerprints" in record.getMessage()]
    assert len(messages) == 1
    assert "Training continues" in messages[0]


def test_it_is_a_callback_that_can_be_copied():
    for callback in (copy.deepcopy(Fingerprints(True)), pickle.loads(pickle.dumps(Fingerprints(True)))):
        assert callback.exact
