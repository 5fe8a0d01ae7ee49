"""A memory forecast is what ranks hold, byte for byte, and a dry run shows it."""

import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing import start_processes
from torch.utils.checkpoint import checkpoint

from project import Sharded, Trainer
from project.doctor.memory_forecast import Forecaster, Layout, numbers, on_meta, report
from project.errors import UserError
from project.model.gpt import LanguageModel
from project.train.blocks import blocks_of
from project.train.spread import local
from tests.conftest import TINY

GPT = ("fit", "--config=configs/gpt.yaml")
LAYOUTS = [Layout(ranks, shard) for ranks in (2, 3) for shard in ("full", "gradients")]
LAYOUTS += [Layout(3, "full", param_dtype=torch.bfloat16, reduce_dtype=torch.float32)]


class Net(LightningModule):
    """Sizes that no number of ranks divides, fewer rows than ranks, a tied weight, one that is frozen, and buffers."""

    def __init__(self, momentum=None):
        super().__init__()
        self.momentum = momentum
        self.tokens, self.head = nn.Embedding(11, 7), nn.Linear(7, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(7, 1, 15) for _ in range(3)))
        self.register_buffer("seen", torch.zeros(3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def training_step(self, batch, batch_idx=0):
        outputs = self.head(self.layers(self.tokens(batch[0]))) + self.frozen.sum()
        return nn.functional.cross_entropy(outputs, batch[1])

    forward = training_step

    def configure_optimizers(self):
        if self.momentum is not None:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)
        groups = [{"params": [p for p in self.parameters() if (p.ndim < 2) == small]} for small in (True, False)]
        return torch.optim.AdamW(groups, amsgrad=True)


def batch():
    return torch.arange(6), torch.arange(6) + 1


def text():
    tokens = torch.randint(0, 50, (2, 17))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gpt(layers=3, **settings):
    return LanguageModel(vocabulary=50, context=16, layers=layers, heads=2, width=24, **{"dropout": 0.0, **settings})


def attached(module, folder, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "default_root_dir": folder}
    trainer = Trainer(max_steps=1, accelerator="cpu", devices=1, **quiet, **settings)
    trainer.strategy.connect(module)
    module.trainer = trainer
    return trainer


def forecast(module, folder, layout, make=batch, **settings):
    forecaster = Forecaster(attached(module, folder, **settings), module, make)
    return forecaster.forecast(layout), forecaster.unknown


def of_a_rank(rank, cases, folder):
    """Takes a step of each case in which this rank is, and notes what rank 0 holds."""
    figures = []
    for number, (layout, momentum) in enumerate(cases):
        if rank < layout.ranks:
            store = dist.FileStore(f"{folder}/store-{number}", layout.ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.ranks)
            figures.append(held(layout, Net(momentum)))
            dist.destroy_process_group()
    if rank == 0:
        torch.save(figures, f"{folder}/held.pt")


def held(layout, module):
    policy = MixedPrecisionPolicy(param_dtype=layout.param_dtype, reduce_dtype=layout.reduce_dtype)
    for _, block in blocks_of(module):
        fully_shard(block, mp_policy=policy, reshard_after_forward=layout.shard != "gradients")
    fully_shard(module, mp_policy=policy, reshard_after_forward=False)
    optimizer = module.configure_optimizers()
    module(batch()).backward()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value is not None]
    tensors = {"parameters": module.parameters(), "gradients": gradients, "optimiser": states, "other": module.buffers()}
    return {name: sum(local(tensor).nbytes for tensor in some) for name, some in tensors.items()}


@pytest.mark.slow
def test_a_rank_holds_what_is_forecast(tmp_path):
    cases = [(layout, None) for layout in LAYOUTS] + [(layout, 0.9) for layout in LAYOUTS[:2]]
    start_processes(of_a_rank, (cases, str(tmp_path)), nprocs=3, start_method="forkserver")
    for at, ((layout, momentum), figures) in enumerate(zip(cases, torch.load(tmp_path / "held.pt"), strict=True)):
        module = on_meta(Net, momentum) if at % 2 else Net(momentum)
        foreseen, unknown = forecast(module, tmp_path, layout)
        assert not unknown
        assert {name: foreseen.figures[name] for name in figures} == figures, layout


def kept_by_a_forward_pass(module, micro_batch, context=nullcontext):
    """Bytes that a real one keeps, each storage once, without the parameters'."""
    module.log = lambda *args, **kwargs: None
    own, kept = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}, {}

    def keep(tensor):
        if (at := tensor.untyped_storage().data_ptr()) not in own:
            kept[at] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), context():
        loss = module.training_step(micro_batch, 0)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("kind", ["plain", "dropout", "bf16"])
def test_a_forward_pass_keeps_what_is_forecast(kind, tmp_path):
    made = partial(gpt, dropout=0.1 * (kind == "dropout"))
    given = {"plugins": [MixedPrecision("bf16-mixed", "cpu")]} if kind == "bf16" else {}  # also where the CPU has no bf16
    context = partial(torch.autocast, "cpu", torch.bfloat16) if kind == "bf16" else nullcontext
    foreseen, unknown = forecast(on_meta(made), tmp_path, Layout(), text, **given)
    assert (foreseen.figures["activations"], unknown) == (kept_by_a_forward_pass(made(), text(), context), [])


def test_with_checkpoints_what_goes_into_blocks_is_kept_and_one_block(tmp_path):
    layout = Layout(2, "full", checkpoint_activations=True)
    foreseen = forecast(gpt(4), tmp_path, layout, text)[0].figures["activations"]
    module = gpt(4)
    whole = kept_by_a_forward_pass(module, text())
    for block in module.network.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    inputs = kept_by_a_forward_pass(module, text())
    block = kept_by_a_forward_pass(gpt(1), text()) - kept_by_a_forward_pass(gpt(0), text())
    assert inputs < foreseen < whole
    assert abs(foreseen - (inputs + block)) <= 2 * (2 * 16 * 24 * 4)  # bytes that go into a block are there already


def test_what_looks_at_its_numbers_is_not_known_and_leaves_no_trace(tmp_path):
    class Looks(Net):
        def training_step(self, batch, batch_idx):
            self.seen_it = torch.rand(1)
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() > 0 else -loss

    module, before = Looks(), torch.get_rng_state()
    foreseen, unknown = forecast(module, tmp_path, Layout(2, "full"))
    assert foreseen.figures["activations"] is None
    assert foreseen.figures["optimiser"]
    assert [line.partition(":")[0] for line in unknown] == ["activations not known"]
    assert foreseen.texts["total"].startswith(">= ")
    assert not hasattr(module, "seen_it")
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.device.type == "cpu" and type(parameter) is nn.Parameter for parameter in module.parameters())


def test_averages_micro_batches_and_blocks_make_it_more(tmp_path):
    base, _ = forecast(Net(), tmp_path, Layout(2, "full"))
    average, _ = forecast(Net(), tmp_path, Layout(2, "full"), callbacks=[WeightAveraging()])
    assert average.figures["other"] == 2 * base.figures["other"] + base.figures["parameters"]
    waiting, _ = forecast(Net(), tmp_path, Layout(2, "full", accumulation=2))
    assert waiting.figures["gradients"] == sum(p.nbytes for p in Net().parameters() if p.requires_grad)
    assert waiting.texts["gradients"].endswith(" *")
    # Backwards: a block, the next one's buffer, its gradients, and those of the one before on their way; the root's as well.
    root, block = (sum(p.nbytes for p in part.parameters()) for part in (gpt(0), gpt(1).network.blocks[0]))
    gathered = forecast(gpt(4), tmp_path, Layout(1, "full", reduce_dtype=torch.float32), text)[0].figures["gathered"]
    assert gathered == root + 2 * block + root + 2 * block
    assert Layout(64, "node", per_host=8).shards == 8


def cells(output):
    """Of the table's rows, by strategy and ranks."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    return {(row[2], row[0]): row for row in rows}


def test_a_dry_run_takes_any_number_of_ranks_in_one_process_and_leaves_nothing(quick):
    run = quick(*GPT, "--dry_run=2,64", "--trainer.strategy=sharded", "--trainer.devices=2")
    assert run.code == 0, run.output
    assert not run.runs
    table = cells(run.output)
    assert list(table) == [("sharded, full", "2"), ("sharded, full", "64"), ("ddp", "any")]
    assert table["sharded, full", "64"][1] == "32"  # hosts, of two devices each
    assert "* whole, until the last micro-batch of a step" in run.output
    assert "64 ranks: 64 rank(s) with micro-batches of 16 can't make a global batch of 64" in run.output
    assert "2 ranks: fits a device like the one here" in run.output


@pytest.mark.slow
def test_a_dry_run_of_images_and_of_a_network_that_no_machine_holds(quick):
    run = quick("fit", "--config=configs/ddp.yaml", *TINY, "--dry_run", "--trainer.devices=3", "--data.global_batch_size=48")
    assert run.code == 0, run.output
    assert list(cells(run.output)) == [("ddp", "any"), ("sharded, full", "3")]
    assert "not known" not in run.output
    huge = ("--model.init_args.layers=80", "--model.init_args.heads=64", "--model.init_args.width=8192")
    run = quick(*GPT, *huge, "--trainer.global_batch_size=null", "--trainer.strategy=sharded", "--dry_run=8,1024")
    assert run.code == 0, run.output
    assert cells(run.output)["sharded, full", "8"][3] == "30 GiB"  # 64.4e9 x 4 bytes / 8
    assert re.search(r"8 ranks: does not fit a device like the one here.*HINT: checkpoint_activations=true", run.output)


@pytest.mark.faults
def test_a_dry_run_takes_one_process_and_numbers(cli):
    assert "fit --dry_run takes one process. HINT" in cli(*GPT, "--dry_run", torchrun=2).output
    assert [numbers("true", 4), numbers("true", 1), numbers("64,8", 1)] == [[4], [2], [8, 64]]
    with pytest.raises(UserError, match="numbers of ranks"):
        numbers("8,many", 1)


def test_at_the_start_of_a_sharded_fit_a_line_says_what_each_rank_will_hold(tmp_path, caplog, monkeypatch):
    module = on_meta(gpt)
    trainer = attached(module, tmp_path, strategy=Sharded(param_dtype="fp32"))
    module.train_dataloader = lambda: torch.utils.data.DataLoader([(torch.arange(16),) * 2] * 4, batch_size=2, shuffle=True)
    with caplog.at_level("INFO"):
        report(trainer, None, "auto", False)
        assert re.search(r"Each rank will hold at most .*: parameters .*, activations \d", caplog.text)
        assert re.search(r"INFO .*1 ranks: fits a device like the one here", caplog.text)
        monkeypatch.setattr("project.doctor.memory_forecast._room", lambda device, ranks: (200_000, ""))
        report(trainer, None, "auto", False)
    assert re.search(r"WARNING .*does not fit .*\(195 KiB each\). HINT: \w+=\w+ makes it", caplog.text)
