"""A memory forecast is what ranks hold, byte for byte, and a dry run shows it."""

import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing import start_processes
from torch.utils.checkpoint import checkpoint

from project import Sharded, Trainer
from project.doctor.activations import copy_like
from project.doctor.memory_forecast import Forecaster, Layout, numbers, on_meta, report
from project.errors import UserError
from project.model.gpt import LanguageModel
from project.sharded.blocks import blocks_of
from project.sharded.shards import local
from tests.conftest import TINY

GPT = ("fit", "--config=configs/gpt.yaml")
LAYOUTS = [Layout(3, "full"), Layout(3, "gradients"), Layout(3, "full", 8, 1, torch.bfloat16, torch.float32)]


def gpt(layers=3, **settings):
    return LanguageModel(vocabulary=50, context=16, layers=layers, heads=2, width=24, **{"dropout": 0.0, **settings})


class Net(LanguageModel):
    """Sizes that no number of ranks divides, fewer rows than ranks, a tied weight, one that is frozen, and a buffer."""

    def __init__(self):
        super().__init__(vocabulary=50, context=16, layers=3, heads=2, width=26, dropout=0.0)
        self.few, self.frozen = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens):
        return super().forward(tokens) * self.few

    def configure_optimizers(self):
        groups = [{"params": [p for p in self.parameters() if (p.ndim < 2) == small]} for small in (True, False)]
        return torch.optim.AdamW(groups, amsgrad=True)


def text():
    tokens = torch.randint(0, 50, (2, 17))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def attached(module, folder, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "default_root_dir": folder}
    trainer = Trainer(max_steps=1, accelerator="cpu", devices=1, **quiet, **settings)
    trainer.strategy.connect(module)
    module.trainer = trainer
    return trainer


def forecast(module, folder, layout, **settings):
    module.train_dataloader = lambda: torch.utils.data.DataLoader([text()], batch_size=None)
    forecaster = Forecaster(attached(module, folder, **settings), dry=False)
    return forecaster.forecast(layout), forecaster.unknown


def of_a_rank(rank, folder):
    """Takes a step with each layout, and notes what this rank holds."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    for number, layout in enumerate(LAYOUTS):
        module, policy = Net(), MixedPrecisionPolicy(param_dtype=layout.param_dtype, reduce_dtype=layout.reduce_dtype)
        for _, block in blocks_of(module):
            fully_shard(block, mp_policy=policy, reshard_after_forward=layout.shard != "gradients")
        fully_shard(module, mp_policy=policy, reshard_after_forward=False)
        optimizer, module.log = module.configure_optimizers(), lambda *args, **kwargs: None
        module.training_step(text(), 0).backward()
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        held = {"parameters": module.parameters(), "gradients": gradients, "optimiser": states, "other": module.buffers()}
        figures = {name: sum(local(tensor).nbytes for tensor in tensors) for name, tensors in held.items()}
        torch.save(figures, f"{folder}/{number}-{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_rank_holds_what_is_forecast(tmp_path):
    start_processes(of_a_rank, (str(tmp_path),), nprocs=3, start_method="forkserver")
    for number, layout in enumerate(LAYOUTS):
        figures = torch.load(tmp_path / f"{number}-0.pt")
        foreseen, _ = forecast(on_meta(Net) if number else Net(), tmp_path, layout)
        assert {name: foreseen.figures[name] for name in figures} == figures, layout


def kept_by_a_forward_pass(module, micro_batch, context=nullcontext):
    module.log = lambda *args, **kwargs: None
    own, kept = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}, {}

    def keep(tensor):
        if (at := tensor.untyped_storage().data_ptr()) not in own:
            kept[at] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), context():
        loss = module.training_step(micro_batch, 0)  # noqa: F841 (it holds what is kept)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("kind", ["plain", "dropout", "bf16"])
def test_a_forward_pass_keeps_what_is_forecast(kind, tmp_path):
    made = partial(gpt, dropout=0.1 * (kind == "dropout"))
    given = {"plugins": [MixedPrecision("bf16-mixed", "cpu")]} if kind == "bf16" else {}  # also where the CPU has no bf16
    context = partial(torch.autocast, "cpu", torch.bfloat16) if kind == "bf16" else nullcontext
    foreseen, unknown = forecast(on_meta(made), tmp_path, Layout(), **given)
    assert (foreseen.figures["activations"], unknown) == (kept_by_a_forward_pass(made(), text(), context), [])


def test_with_checkpoints_what_goes_into_blocks_is_kept_and_one_block(tmp_path):
    foreseen, _ = forecast(gpt(4), tmp_path, Layout(2, "full", checkpoint_activations=True))
    module = gpt(4)
    for block in module.network.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    block = kept_by_a_forward_pass(gpt(1), text()) - kept_by_a_forward_pass(gpt(0), text())
    wanted = kept_by_a_forward_pass(module, text()) + block
    assert abs(foreseen.figures["activations"] - wanted) <= 2 * (2 * 16 * 24 * 4)  # what goes into a block is there already


def test_what_looks_at_its_numbers_is_not_known_and_leaves_no_trace(tmp_path):
    class Looks(Net):
        def training_step(self, batch, batch_idx):
            self.seen_it = torch.rand(1)
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() > 0 else -loss

    module, before = Looks(), torch.get_rng_state()
    foreseen, unknown = forecast(module, tmp_path, Layout(2, "full"))
    assert foreseen.figures["optimiser"]
    assert [line.partition(":")[0] for line in unknown] == ["activations not known"]
    assert not hasattr(module, "seen_it")
    assert torch.equal(before, torch.get_rng_state())
    assert {(parameter.device.type, type(parameter)) for parameter in module.parameters()} == {("cpu", nn.Parameter)}


def test_optimisers_choose_groups_by_attributes_of_parameters(tmp_path):
    class Grouped(Net):
        def configure_optimizers(self):
            return torch.optim.AdamW([{"params": [each], "weight_decay": each.decay} for each in self.parameters()])

    module = Grouped()
    for parameter in module.parameters():
        parameter.decay = 0.1
    foreseen, unknown = forecast(module, tmp_path, Layout(2, "full"))
    assert foreseen.figures["optimiser"]
    assert not unknown


def test_averages_micro_batches_and_blocks_make_it_more(tmp_path):
    base, _ = forecast(Net(), tmp_path, Layout(2, "full"))
    averaged, _ = forecast(Net(), tmp_path, Layout(2, "full", accumulation=2), callbacks=[WeightAveraging()])
    assert averaged.figures["other"] == 2 * base.figures["other"] + base.figures["parameters"]
    assert averaged.figures["gradients"] == sum(p.nbytes for p in Net().parameters() if p.requires_grad)
    # Backwards: a block, the next one's buffer, its gradients, and those of the one before on their way; the root's as well.
    root, block = (sum(p.nbytes for p in part.parameters()) for part in (gpt(0), gpt(1).network.blocks[0]))
    gathered = forecast(gpt(4), tmp_path, Layout(1, "full", reduce_dtype=torch.float32))[0].figures["gathered"]
    assert gathered == root + 2 * block + root + 2 * block


def cells(output):
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    return {(row[2], row[0]): row for row in rows}


def test_a_dry_run_takes_any_number_of_ranks_in_one_process_and_leaves_nothing(quick):
    run = quick(*GPT, "--dry_run=2,64", "--trainer.strategy=sharded", "--trainer.devices=2")
    assert run.code == 0, run.output
    assert not run.runs
    assert [*(table := cells(run.output))] == [("sharded, full", "2"), ("sharded, full", "64"), ("ddp", "any")]
    assert table["sharded, full", "64"][1] == "32"  # hosts, of two devices each
    assert "* whole, until the last micro-batch of a step" in run.output
    assert "64 ranks: 64 rank(s) with micro-batches of 16 can't make a global batch of 64" in run.output
    assert "2 ranks: fits a device like the one here" in run.output
    assert [numbers("true", 4), numbers("true", 1), numbers("64,8", 1)] == [[4], [1], [8, 64]]
    with pytest.raises(UserError, match="numbers of ranks"):
        numbers("8,many", 1)


@pytest.mark.slow
def test_a_dry_run_of_images_and_of_a_network_that_no_machine_holds(quick):
    run = quick("fit", "--config=configs/ddp.yaml", *TINY, "--dry_run", "--trainer.devices=3", "--data.global_batch_size=48")
    assert list(cells(run.output)) == [("ddp", "any"), ("sharded, full", "3")]
    assert "not known" not in run.output
    huge = ("--model.init_args.layers=80", "--model.init_args.heads=64", "--model.init_args.width=8192")
    run = quick(*GPT, *huge, "--trainer.global_batch_size=null", "--trainer.strategy=sharded", "--dry_run=8,1024")
    assert cells(run.output)["sharded, full", "8"][3] == "30 GiB"  # 64.4e9 x 4 bytes / 8
    assert re.search(r"8 ranks: does not fit a device like the one here.*HINT: checkpoint_activations=true", run.output)


WIDE = """
import torch
from lightning.pytorch import LightningModule, Callback
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Wide(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 3000), nn.ReLU(), nn.Linear(3000, 3000), nn.ReLU(), nn.Linear(3000, 1))

    def training_step(self, batch, batch_idx):
        return self.network(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(256, 4)), batch_size=8)

class Peak(Callback):
    def teardown(self, trainer, pl_module, stage):
        peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
        Path(f"peak-{trainer.global_rank}").write_text(peak)
"""


def in_mib(cell):
    number, unit = cell.split()
    return float(number) * {"B": 2**-20, "KiB": 2**-10, "MiB": 1, "GiB": 1024}[unit]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "sharded"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fit_on_a_cpu_peaks_below_the_forecast(ranks, strategy, cli, tmp_path):
    (tmp_path / "wide.py").write_text(WIDE)
    given = [f"--trainer.devices={ranks}", f"--trainer.strategy={strategy}", "--trainer.global_batch_size=32"]
    given = ["fit", "--model=wide.Wide", "--trainer.accelerator=cpu", "--trainer.max_steps=8", *given]
    shown = cli(*given, "--dry_run")
    table = cells(shown.output)
    row = table["ddp", "1" if ranks == 1 else "any"] if strategy == "auto" else table["sharded, full", str(ranks)]
    run = cli(*given, "--trainer.callbacks+=wide.Peak")
    assert run.code == 0, run.output
    measured = [int((tmp_path / f"peak-{rank}").read_text()) / 1024 for rank in range(ranks)]
    assert max(measured) <= in_mib(row[-1]) <= 2 * max(measured), row
    if (ranks, strategy) == (1, "auto"):
        assert re.search(r"ddp: fits a device like the one here \([^,]* each\)", shown.output)


@pytest.mark.faults
def test_a_dry_run_takes_one_process(cli):
    assert "fit --dry_run takes one process. HINT" in cli(*GPT, "--dry_run", torchrun=2).output


def test_at_the_start_of_a_sharded_fit_a_line_says_what_each_rank_will_hold(tmp_path, caplog, monkeypatch):
    trainer = attached(module := on_meta(gpt), tmp_path, strategy=Sharded(param_dtype="fp32"))
    module.train_dataloader = lambda: torch.utils.data.DataLoader([(torch.arange(16),) * 2] * 4, batch_size=2, shuffle=True)
    with caplog.at_level("INFO"):
        report(trainer)
        assert re.search(r"Each rank will hold at most .*: parameters .*, activations \d", caplog.text)
        assert re.search(r"INFO .*1 ranks: fits a device like the one here", caplog.text)
        monkeypatch.setattr("project.doctor.memory_forecast._room", lambda device, ranks: (200_000, ""))
        report(trainer)
    assert re.search(r"WARNING .*does not fit .*\(195 KiB each\). HINT: \w+=\w+ makes it", caplog.text)


def test_a_copy_that_is_computed_with_logs_nothing(tmp_path: Path) -> None:
    """Its `training_step` may log by the logger itself: a sharded run that resumed had a point more."""
    module = BoringModel()
    module.trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=CSVLogger(tmp_path))
    copied = copy_like(module, lambda tensor: tensor, torch.device("cpu"))
    assert copied.logger is not None
    copied.logger.log_metrics({"loss": 1.0})
    copied.logger.save()
    assert not [*tmp_path.rglob("metrics.csv")]
    assert isinstance(module.logger, CSVLogger)
