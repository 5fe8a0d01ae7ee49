"""Where the time of a step goes, and which rank makes the others wait."""

import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from project import Trainer
from project.model import MiniResNet
from project.watch.flops import flops, peak, peak_of
from project.watch.throughput import Measured, Stragglers, Throughput, excess
from tests.conftest import Cli
from tests.watch.plugged import MICRO_BATCHES

EVERY = 5


@pytest.mark.timed
def test_a_slow_rank_is_named_with_its_cause(cli: Cli):
    """One run: 30 balanced steps, 30 in which rank 1's data is slow, 30 in which rank 0's network is."""
    slow = {"class_path": "tests.watch.plugged.SlowData", "init_args": {"start": 30, "stop": 60}}
    network = {"class_path": "tests.watch.plugged.SlowNetwork", "init_args": {"start": 60, "stop": 90}}
    callbacks = [
        {"class_path": "tests.watch.plugged.Collectives"},
        {"class_path": "project.watch.throughput.Throughput", "init_args": {"every_n_steps": EVERY}},
    ]
    run = cli(
        *("fit", "--config=configs/ddp.yaml", "--data.source=project.data.Datasets", "--data.source.init_args.num_classes=10"),
        *(f"--data.source.init_args.{split}={json.dumps(slow)}" for split in ("train", "val")),
        *(f"--data.batch_size={64 // (2 * MICRO_BATCHES)}", "--data.global_batch_size=64", "--data.num_workers=0"),
        *("--trainer.limit_val_batches=0", "--trainer.log_every_n_steps=1000", "--trainer.max_epochs=2"),
        *("--trainer.max_steps=95", "--trainer.precision=32-true"),
        *(f"--model.network={json.dumps(network)}", f"--trainer.callbacks={json.dumps(callbacks)}", "--trainer.devices=2"),
    )
    assert run.code == 0, run.output
    named = re.findall(r"Rank (\d), \S+, is slow.* is ([\d.]+) times .* because of its (\w+) .*HINT: .", run.output)
    assert [(rank, cause) for rank, _, cause in named] == [("1", "data"), ("0", "compute")], run.output

    data, compute, sync = (run.curve(f"speed/{tag}") for tag in ("worst_data", "worst_compute", "gradient_sync"))
    assert list(data) == list(compute) == list(sync) == list(range(EVERY, 96, EVERY))
    for factor, curve, steps in ((named[0][1], data, (55, 60)), (named[1][1], compute, (85, 90))):
        assert float(factor) > 2  # 40 ms more in a step of a few
        assert min(curve[step] for step in steps) > 2
        assert max(curve[step] for step in (*range(15, 31, EVERY), 95)) < min(curve[step] for step in steps)
    assert min(sync[step] for step in (55, 85)) > 0.25  # one rank of two waits almost all the time
    assert len(named) == 2  # the balanced steps named nobody
    events = [json.loads(line) for line in (run.runs[0] / "life.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "straggler", "straggler", "stop"]  # what notify.py tells
    assert min(run.curve("speed/samples_per_s").values()) > 0
    assert max(run.curve("speed/tflops").values()) > 0
    assert re.search(r"training +95 steps, .* samples/s .*% data wait, \d+% gradient sync", run.output)

    counts = [json.loads((run.folder / f"collectives-{rank}.json").read_text()) for rank in (0, 1)]
    assert counts[0] == counts[1]
    steady = {int(step): count for step, count in counts[0].items() if 3 < int(step) < 63}  # the rehearsal is over
    for step, count in steady.items():  # a window is closed at the end of its last step
        assert count.get("all_gather", 0) == int((step + 1) % EVERY == 0), step
        assert set(count) <= {"all_reduce", "all_gather"}, count
        assert count.get("all_reduce", 0) <= 1, step  # of notes about signals, and not in every step if steps are short
    assert sum(steady[step].get("all_reduce", 0) for step in range(4, 30)) < 26


def test_verdicts(caplog):
    caplog.set_level("INFO")
    stragglers = Stragglers(["a", "b", "c", "d"], 50)
    fine, slow, starved = Measured(0.001, 0.1, 0.02), Measured(0.001, 0.2, 0.0), Measured(0.11, 0.1, 0.0)

    def windows(count: int, *ranks: Measured) -> list[str]:
        caplog.clear()
        for _ in range(count):
            stragglers.compare(ranks)
        return [record.getMessage() for record in caplog.records]

    assert windows(10, fine, fine, fine, fine) == []
    assert windows(2, fine, fine, slow, fine) == []
    assert windows(5, fine, fine, fine, fine) == []  # twice is chance
    (message,) = windows(50, fine, fine, slow, fine)
    assert message.startswith("Rank 2, c, is slow, and all wait for it: its own work is 2.0 times the usual rank's, because of")
    assert "its compute (200 ms a step, usually 100), and was for 150 steps" in message
    (message,) = windows(10, fine, fine, starved, fine)
    assert "2.1 times the usual rank's, because of its data (110 ms a step, usually 1)" in message
    assert len(windows(200, fine, fine, starved, fine)) == 2  # once in a while
    assert windows(5, fine, fine, fine, fine) == ["Rank 2, c, keeps pace again."]
    assert len(windows(5, fine, slow, fine, starved)) == 2  # half of them
    stragglers = Stragglers(["a", "b"], 1)
    assert windows(4, fine, slow) == []  # not yet a second
    assert len(windows(1, fine, slow)) == 1
    assert excess([fine, slow], "compute") == pytest.approx([1.0, 1.99], abs=0.01)
    assert excess([fine, slow], "data") == [1.0, 1.0]


def test_flops_are_counted_without_touching_the_network():
    network = MiniResNet()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    chance = torch.get_rng_state()
    assert flops(network, (3, 32, 32)) == pytest.approx(2.52e9, rel=0.01)
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(parameter.grad is None and not parameter.is_meta for parameter in network.parameters())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_what_can_not_be_told_is_no_reason_to_end():
    """The operations of a network without shapes, and the peak in a precision of one's own."""
    assert flops(torch.nn.LazyLinear(10), (3, 8, 8)) == 0
    device = SimpleNamespace(root_device=torch.device("cpu"))
    assert peak(SimpleNamespace(strategy=device, precision="my own")) is None


GPUS = {  # TFLOP/s in 16 bits, in fp32 by TF32, and in fp32 proper; of names that begin alike
    "NVIDIA H100 80GB HBM3": (989.4, 494.7, 66.9),
    "NVIDIA H100 PCIe": (756, 378, 51.2),
    "NVIDIA L4": (121, 60, 30.3),
    "NVIDIA L40S": (362, 183, 91.6),
    "Tesla T4": (65, 8.1, 8.1),
}


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true", "32-true"])
def test_the_peak_of_a_gpu_is_that_of_what_it_computes_in(monkeypatch, name, precision):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=name, multi_processor_count=132))
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")), precision=precision)
    half, tf32, single = GPUS[name]
    if precision != "32-true":
        none = name == "Tesla T4" and "bf16" in precision
        assert peak(trainer) == (None if none else half * 1e12)
        return
    assert peak(trainer) == tf32 * 1e12  # torch's default: convolutions may use it
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert peak(trainer) == single * 1e12


def test_a_slice_of_a_gpu_has_its_share_of_the_peak():
    whole = peak_of("NVIDIA H100 80GB HBM3", 132, torch.bfloat16, tf32=True)
    assert peak_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, torch.bfloat16, tf32=True) == pytest.approx(whole * 16 / 132)
    assert peak_of("NVIDIA H100 80GB HBM3", 114, torch.bfloat16, tf32=True) == whole  # no slice
    assert peak_of("NVIDIA H100 80GB HBM3", 132, torch.int8, tf32=True) is None
    assert peak_of("Somebody's GPU", 132, torch.bfloat16, tf32=True) is None


class Counting(Throughput):
    fetches = 0

    def _fetch(self):
        self.fetches += 1
        super()._fetch()


def test_a_second_fit_is_measured_as_the_first(tmp_path):
    """Of a trainer that fits twice, each micro-batch is fetched once."""
    counts = []
    throughput = Counting(every_n_steps=1)
    trainer = Trainer(
        max_epochs=1, limit_val_batches=0, default_root_dir=tmp_path, accelerator="cpu", devices=1,
        callbacks=[throughput], logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 8), batch_size=2))
        counts.append(throughput.fetches)
    assert counts[1] == 2 * counts[0]


class Thaws(BoringModel):
    """A layer that learns from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Linear(32, 32).requires_grad_(requires_grad=False)
        self.last: list[str] = []

    def forward(self, batch: Any) -> Any:
        return super().forward(self.backbone(batch))

    def on_train_epoch_start(self) -> None:
        self.backbone.requires_grad_(requires_grad=self.current_epoch > 0)

    def on_train_epoch_end(self) -> None:
        (throughput,) = (callback for callback in self.trainer.callbacks if isinstance(callback, Throughput))
        names = {id(parameter): name.partition(".")[0] for name, parameter in self.named_parameters()}
        self.last.append(names[id(throughput._last_gradient)])


def test_the_backward_pass_of_a_layer_that_learns_later_is_no_wait(tmp_path, monkeypatch):
    """The last gradient is that of another layer from then on."""
    monkeypatch.chdir(tmp_path)
    throughput, module = Throughput(every_n_steps=2), Thaws()
    throughput._stragglers = Stragglers(["a"], 2)  # as with several ranks
    settings: Any = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=2, limit_val_batches=0, callbacks=[throughput], **settings)
    trainer.fit(module, DataLoader(RandomDataset(32, 20), batch_size=4))
    assert module.last == ["layer", "backbone"]


class Dawdling(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.03)


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_what_follows_a_step_is_not_the_optimisers(tmp_path, monkeypatch, profiler):
    """A profiler has Lightning take the steps."""
    monkeypatch.chdir(tmp_path)
    throughput = Throughput(every_n_steps=2)
    settings: Any = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_steps=5, limit_val_batches=0, callbacks=[Dawdling(), throughput], profiler=profiler, **settings)
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 20), batch_size=4))
    assert throughput.phases["rest"] > 0.5 > throughput.phases["optimizer"]
