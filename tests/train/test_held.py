"""What a rank is said to hold is what ranks hold, byte for byte: the same network, spread over real processes."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from project import Trainer
from project.model.gpt import LanguageModel
from project.train.blocks import blocks_of
from project.train.foretold import Foretold
from project.train.held import Inventory, Shape, Sharing, held
from project.train.on_paper import made_on_paper
from project.train.optimizer_state import optimizers
from project.train.shards import local

SHARES = [
    Sharing(2),
    *(Sharing(ranks, shard) for ranks in (2, 3) for shard in ("full", "gradients")),
    Sharing(3, "full", param_dtype=torch.bfloat16, reduce_dtype=torch.float32, accumulation=2),
    Sharing(2, "full", accumulation=2),
    Sharing(4, "node", per_host=2),
]


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.register_buffer("seen", torch.zeros(3))
        self.inner, self.outer = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x):
        return x + self.outer(self.inner(self.norm(x)).relu())


class Net(LightningModule):
    """Sizes that no number of ranks divides, fewer rows than ranks, a tied weight, one that is frozen, and buffers."""

    def __init__(self, momentum=None):
        super().__init__()
        self.momentum = momentum
        self.tokens, self.head = nn.Embedding(11, 7), nn.Linear(7, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.layers = nn.Sequential(*(Layer(7) for _ in range(3)))
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def training_step(self, batch, batch_idx):
        tokens, following = batch
        return nn.functional.cross_entropy(
            self.head(self.layers(self.tokens(tokens)) * self.scale) + self.frozen.sum(), following
        )

    def forward(self, batch):
        return self.training_step(batch, 0)

    def configure_optimizers(self):
        if self.momentum is not None:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)
        few = [one for one in self.parameters() if one.ndim < 2]
        many = [one for one in self.parameters() if one.ndim >= 2]
        optimizer = torch.optim.AdamW([{"params": many}, {"params": few, "weight_decay": 0.0}], amsgrad=True)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


def batch(samples=6):
    return torch.arange(samples), torch.arange(samples) + 1


def said(module, tmp_path, sharing, make=batch, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    trainer = Trainer(max_steps=1, accelerator="cpu", devices=1, **quiet, **settings)
    trainer.strategy.connect(module)
    module.trainer = trainer
    return Foretold(trainer, module, None, make).held(sharing)


def of_a_rank(rank, cases, folder):
    """Takes a step of each case in which this rank is, and notes what rank 0 holds."""
    found = []
    for number, (sharing, momentum) in enumerate(cases):
        if rank < sharing.ranks:
            store = dist.FileStore(f"{folder}/store-{number}", sharing.ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=sharing.ranks)
            found.append(holds(sharing, Net(momentum)))
            dist.destroy_process_group()
    if rank == 0:
        torch.save(found, f"{folder}/held.pt")


def holds(sharing, module):
    wrapped, held = share(module, sharing), {}
    optimizer = next(optimizers(module.configure_optimizers()))
    for number in range(sharing.accumulation):
        last = number == sharing.accumulation - 1
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(last)
        wrapped(batch()).backward()
        if not last:  # those that wait lie where FSDP2 keeps the whole parameters
            wait = [one.grad for part in module.modules() if isinstance(part, FSDPModule) for one in kept_by(part)]
            held["whole_gradients"] = sum(one.nbytes for one in wait if one is not None)
    parameters = [*module.parameters()]
    held["gradients"] = sum(local(one.grad).nbytes for one in parameters if one.grad is not None)
    optimizer.step()
    held["parameters"] = sum(local(one).nbytes for one in parameters)
    states = [one for state in optimizer.state.values() for one in state.values() if one is not None]
    held["optimizer"] = sum(local(one).nbytes for one in states)
    held["others"] = sum(one.nbytes for one in module.buffers())
    return held


def kept_by(part):
    group = part._get_fsdp_state()._fsdp_param_group
    return [one._unsharded_param for one in group.fsdp_params] if group else []


def share(module, sharing):
    if sharing.shard is None:
        return DistributedDataParallel(module)
    hosts = sharing.ranks // sharing.parts
    sizes = (hosts, sharing.parts) if sharing.shard == "node" else (sharing.ranks,)
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shard")[-len(sizes) :])
    policy = MixedPrecisionPolicy(param_dtype=sharing.param_dtype, reduce_dtype=sharing.reduce_dtype)
    for _, block in blocks_of(module):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=sharing.shard != "gradients")
    return fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


@pytest.mark.slow
def test_a_rank_holds_what_is_said(tmp_path):
    cases = [(one, None) for one in SHARES] + [(one, 0.9) for one in SHARES[:4]]
    start_processes(of_a_rank, (cases, str(tmp_path)), nprocs=4, start_method="forkserver")
    there = torch.load(tmp_path / "held.pt")
    for (sharing, momentum), holds in zip(cases, there, strict=True):
        on_paper = said(made_on_paper(partial(Net, momentum)), tmp_path, sharing)
        assert not on_paper.unknown
        assert {name: getattr(on_paper, name) for name in holds} == holds, sharing


def kept_by_a_forward_pass(module, batch, context=nullcontext):
    """Bytes that a real one keeps, each storage once, without the parameters'."""
    module.log = lambda *args, **kwargs: None
    held, kept = {one.untyped_storage().data_ptr() for one in module.parameters()}, {}

    def keep(tensor):
        if (at := tensor.untyped_storage().data_ptr()) not in held:
            kept[at] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one), context():
        loss = module.training_step(batch, 0)
    return sum(one.nbytes() for one in kept.values()), loss


def text(samples=2, context=16):
    tokens = torch.randint(0, 50, (samples, context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("kind", ["plain", "dropout", "bf16"])
def test_a_forward_pass_keeps_what_is_said(kind, tmp_path):
    made = partial(LanguageModel, vocabulary=50, context=16, layers=3, heads=2, width=24, dropout=0.1 * (kind == "dropout"))
    given = {"plugins": [MixedPrecision("bf16-mixed", "cpu")]} if kind == "bf16" else {}  # also where the CPU has no bf16
    context = partial(torch.autocast, "cpu", torch.bfloat16) if kind == "bf16" else nullcontext
    there, _ = kept_by_a_forward_pass(made(), text(), context)
    on_paper = said(made_on_paper(made), tmp_path, Sharing(), text, **given)
    assert (on_paper.activations, dict(on_paper.unknown)) == (there, {})


def test_with_checkpoints_what_goes_into_blocks_is_kept_and_one_block(tmp_path):
    made = partial(LanguageModel, vocabulary=50, context=16, layers=4, heads=2, width=24, dropout=0.0)
    sharing = Sharing(2, "full", checkpoint_activations=True)
    on_paper = said(made_on_paper(made), tmp_path, sharing, text)
    module = made()
    whole, _ = kept_by_a_forward_pass(module, text())
    for block in module.network.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    inputs, _ = kept_by_a_forward_pass(module, text())
    one = partial(LanguageModel, vocabulary=50, context=16, layers=1, heads=2, width=24, dropout=0.0)
    none = partial(LanguageModel, vocabulary=50, context=16, layers=0, heads=2, width=24, dropout=0.0)
    block = kept_by_a_forward_pass(one(), text())[0] - kept_by_a_forward_pass(none(), text())[0]
    x = 2 * 16 * 24 * 4  # bytes that go into a block; those of one that is computed again are there already
    assert inputs < on_paper.activations < whole
    assert abs(on_paper.activations - (inputs + block)) <= 2 * x


def test_what_looks_at_its_numbers_is_not_known_and_leaves_no_trace(tmp_path):
    class Looks(Net):
        def training_step(self, batch, batch_idx):
            self.seen_it = True
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() > 0 else -loss

    module = Looks()
    before = torch.get_rng_state()
    on_paper = said(module, tmp_path, Sharing(2, "full"))
    assert on_paper.activations is None
    assert list(on_paper.unknown) == ["activations"]
    assert on_paper.optimizer
    assert not hasattr(module, "seen_it")
    assert torch.equal(before, torch.get_rng_state())
    assert all(one.device.type == "cpu" and type(one) is nn.Parameter for one in module.parameters())


def test_an_average_of_the_weights_is_counted(tmp_path):
    average = said(made_on_paper(Net), tmp_path, Sharing(2, "full"), callbacks=[WeightAveraging()])
    without = said(made_on_paper(Net), tmp_path, Sharing(2, "full"))
    assert average.others == 2 * without.others + without.parameters


def test_more_is_whole_with_larger_blocks_and_in_a_mode_that_keeps_them():
    shapes = {str(n): (Shape((64, 64), torch.float32),) for n in range(4)}
    of = Inventory((Shape((8,), torch.float32),), shapes, buffers=0)
    block, root = 64 * 64 * 4, 8 * 4
    # Backwards: the block, the next one's buffer, its gradients, and those of the one before on their way.
    assert held(of, Sharing(2, "full")).gathered == root + 2 * block + 2 * block + root
    assert held(of, Sharing(2, "gradients")).gathered == root + 4 * block + 2 * block + root
    assert held(of, Sharing(2, "full", accumulation=2)).gathered == root + 2 * block + block
    assert held(of, Sharing(2)).gathered == 4 * block + root  # DDP's buckets
    assert held(of, Sharing(2, on_gpu=True)).gathered == 0
    offloaded = held(of, Sharing(2, "full", cpu_offload=True, on_gpu=True), optimizer=100)
    assert offloaded.total == offloaded.gathered
    assert offloaded.on_host == 100 + 2 * offloaded.parameters
