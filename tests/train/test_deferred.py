"""Models that are built without memory for their weights have the bits that they would have had."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchvision
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics.classification import MulticlassConfusionMatrix

from project.errors import UserError
from project.model.classifier import ImageClassifier
from project.model.gpt import GPT, LanguageModel
from project.model.minires import MiniResNet
from project.model.start import start_from
from project.train.blocks import blocks_of
from project.train.deferred import deferred, resumed
from project.train.materialize import finish, materialize
from project.train.replayed import waiting
from tests.model.strange_networks import Plain


class Everything(nn.Module):
    """Ties, buffers that are computed, draws of all kinds, and loops over shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.tokens.weight
        self.scaled = nn.Parameter(torch.randn(16, 16) * 0.02)
        self.frozen = nn.Parameter(torch.empty(4, 4).uniform_(-1, 1), requires_grad=False)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.q, self.k = (nn.Parameter(one) for one in torch.empty(2, 5, 5).normal_().unbind())
        self.register_buffer("mask", torch.tril(torch.ones(12, 12)).view(1, 1, 12, 12))
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 16, 2).float() / 16)), persistent=False)
        self.register_buffer("angles", torch.outer(torch.arange(9.0), self.inv_freq))
        self.register_buffer("few", self.angles[:4])
        self.register_buffer("order", torch.randperm(40))
        self.from_numpy = nn.Parameter(torch.from_numpy(np.arange(12.0).reshape(3, 4)).float())
        self.beside = torch.linspace(0, 1, 7)
        self.tables = {"a": [torch.rand(6)]}
        self.scaled.decays = False  # type: ignore[attr-defined]
        self.apply(self._init)
        with torch.no_grad():
            self.layers[2].weight.copy_(self.layers[1].weight)
            self.layers[1].weight.zero_()
            self.layers[1].weight[1:3, ::2] = torch.eye(8)[:2]
            self.layers[0].bias += self.layers[2].weight.sum(1)
            self.layers[0].weight[self.layers[0].weight > 0.5] = 0.25
        self.layers[0].weight.data = self.layers[0].weight.data * self.layers[2].bias.norm()

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                module.bias.data.normal_(0, 1, generator=torch.Generator().manual_seed(3))
        if module is self.layers:
            nn.init.orthogonal_(module[2].weight, gain=0.5)
            nn.init.sparse_(module[0].weight, 0.3)
            nn.init.xavier_normal_(module[1].weight, generator=torch.Generator().manual_seed(5))


class Asks(nn.Module):
    """Python wants to know values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        rates = [one.item() for one in torch.linspace(0, 0.5, 4)]
        self.drops = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        self.largest = float(self.weight.abs().max())
        if self.weight.sum() > 0:
            torch.rand(3)
        self.chosen = nn.Parameter(self.weight[self.weight > 0].clone())
        self.listed = self.weight[0].tolist()
        self.array = self.weight.detach().numpy().copy()
        self.register_buffer("counts", torch.from_numpy(np.cumsum(self.array)))
        assert self.weight.device == torch.device("cpu")
        assert not self.weight.is_meta
        assert self.weight.cpu() is self.weight.to("cpu") is self.weight
        assert self.weight.data_ptr() == self.weight[0].data_ptr() != self.chosen.data_ptr()
        self.text = f"{self.weight[0, 0]:.3f}"


class Twins(nn.Module):
    """Layers that were copied, moved to another dtype, another layout, and loaded."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
        self.layers[1].to(memory_format=torch.channels_last)
        self.layers[2].double()
        state = {name: torch.rand_like(one) if one.is_floating_point() else one for name, one in layer.state_dict().items()}
        self.layers[0].load_state_dict(state)
        self.embedding = nn.Embedding(5, 3)
        self.embedding.weight.data = torch.from_numpy(np.ones((5, 3), np.float32))
        self.given, values = nn.Linear(3, 3), np.ones((3, 3), np.float32)
        with torch.no_grad():
            self.given.weight.copy_(torch.from_numpy(values))
        values[:] = 0
        self.skipped = nn.utils.skip_init(nn.Linear, 3, 3)
        nn.init.ones_(self.skipped.weight)
        nn.init.ones_(self.skipped.bias)


def lora() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.utils.parametrizations.weight_norm(net[0])
    nn.utils.parametrizations.spectral_norm(net[1])
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "everything": Everything,
    "asks": Asks,
    "twins": Twins,
    "minires": lambda: MiniResNet(widths=(8, 16), blocks=1),
    "gpt": lambda: GPT(vocabulary=40, context=16, layers=2, heads=2, width=16),
    "classifier": lambda: ImageClassifier(MiniResNet(widths=(8, 16), blocks=1)),
    "computes": Plain,
    "language model": lambda: LanguageModel(vocabulary=40, context=16, layers=2, heads=2, width=16),
    "resnet18": lambda: torchvision.models.resnet18(),
    "vit": lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=7),
    "swin": lambda: torchvision.models.SwinTransformer([4, 4], 8, [2, 2], [2, 4], [7, 7], stochastic_depth_prob=0.2),
    "convnext": lambda: torchvision.models.ConvNeXt(
        [torchvision.models.convnext.CNBlockConfig(8, 16, 2), torchvision.models.convnext.CNBlockConfig(16, None, 2)], 0.1
    ),
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "lstm": lambda: nn.LSTM(6, 5, num_layers=2, bidirectional=True, proj_size=3),
    "attention": lambda: nn.MultiheadAttention(16, 2, kdim=8, vdim=4, add_bias_kv=True),
    "parametrized": lora,
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(8, 8)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "double": lambda: nn.Linear(8, 8, dtype=torch.float64),
    "bfloat16": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16(),
}


def tensors(module: nn.Module) -> dict[str, Any]:
    """All that it holds, however it holds it."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        for key, value in {**vars(part), **part._parameters, **part._buffers}.items():
            if (
                isinstance(value, (Tensor, float, list, str, np.ndarray, dict))
                and not key.startswith("_")
                and key != "training"
            ):
                found[f"{name}.{key}"] = value
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        alike = ("dtype", "device", "shape", "requires_grad", "is_leaf") if one.is_leaf else ("dtype", "device", "shape")
        return (
            type(one) is type(other)
            and all(getattr(one, what) == getattr(other, what) for what in alike)
            and one.stride() == other.stride()
            and torch.equal(one, other)
        )
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same([*one.values()], [*other.values()])
    return bool(one == other)


@pytest.mark.parametrize("small", [0, 256])
@pytest.mark.parametrize("name", NETS)
def test_the_bits_are_those_of_the_ordinary_construction(name, small):
    torch.manual_seed(7)
    usual, after = NETS[name](), torch.rand(2)
    torch.manual_seed(7)
    with deferred(small) as record:
        net, after_it = NETS[name](), torch.rand(2)
    assert torch.equal(after, after_it if not record.knows(after_it) else record.value(after_it))
    torch.manual_seed(99)
    objects, state = [id(one) for one in net.parameters()], torch.get_rng_state()
    with_values = {*(("twins", "embedding.weight"), ("asks", "chosen"), ("everything", "from_numpy"))}
    for key, one in net.named_parameters():
        assert one.is_meta or one.untyped_storage().nbytes() <= small or (name, key) in with_values, key
    for block in net.children():
        materialize(block, "cpu")
    finish(net, "cpu")
    assert not waiting
    assert objects == [id(one) for one in net.parameters()]
    assert torch.equal(state, torch.get_rng_state())
    expected, found = tensors(usual), tensors(net)
    assert expected.keys() == found.keys()
    assert [key for key in expected if not same(expected[key], found[key])] == []


class Bytes(TorchDispatchMode):
    """Counts what lies in memory, and the most that ever did."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(one, Tensor) and not one.is_meta and one.untyped_storage() not in self.seen:
                storage = one.untyped_storage()
                self.seen.add(storage)
                weakref.finalize(storage, self._gone, storage.nbytes())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return made

    def _gone(self, size: int) -> None:
        self.now -= size


def layers() -> nn.Module:
    net = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(16)))
    for one in net:
        nn.init.orthogonal_(one.weight)
        for _ in range(8):
            one.weight.data = one.weight.data * 0.5
        assert float(one.weight[0, 0]) != 0
    return net


ONE = 128 * 128 * 4
"""Bytes of a layer."""


def test_no_more_than_a_block_lies_in_memory():
    with Bytes() as usual:
        layers()
    assert usual.most >= 16 * ONE
    with Bytes() as building, deferred():
        net = layers()
    assert building.most <= 6 * ONE  # QR has a few of its own
    assert building.now < ONE
    with Bytes() as making:
        for block in net:
            materialize(block, "cpu")
            assert making.now >= ONE
            block.weight.data = block.weight.data[:4].clone()  # as a rank keeps its part
        finish(net, "cpu")
    assert making.most <= 8 * ONE
    assert making.now <= ONE


def test_objects_keep_their_attributes_and_hooks():
    called: list[str] = []
    with deferred(0):
        net = nn.Linear(3, 2)
        net.weight.decays = False  # type: ignore[attr-defined]
        net.weight.register_hook(lambda _: called.append("hook"))
        net.bias.register_post_accumulate_grad_hook(lambda _: called.append("after"))
        weak = weakref.ref(net.weight)
    finish(net, "cpu")
    net(torch.ones(1, 3)).sum().backward()
    assert not net.weight.decays
    assert weak() is net.weight
    assert sorted(called) == ["after", "hook"]


def test_a_run_is_not_told_that_it_was_built_under_another_default():
    def build() -> nn.Module:
        net = nn.Linear(4, 4)
        net.register_buffer("ratio", torch.arange(5) / 3)
        return net

    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        usual = build()
        torch.manual_seed(1)
        with deferred(0):
            net = build()
    finally:
        torch.set_default_dtype(torch.float32)
    finish(net, "cpu")
    assert torch.get_default_dtype() is torch.float32
    assert {name: one.dtype for name, one in net.state_dict().items()} == dict.fromkeys(net.state_dict(), torch.float64)
    assert all(same(*pair) for pair in zip(usual.state_dict().values(), net.state_dict().values(), strict=True))


def test_buffers_of_several_blocks_go_on_sharing_memory():
    with deferred(0):
        table, net = torch.arange(12.0), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        net[0].register_buffer("table", table)
        net[1].register_buffer("table", table.view(3, 4))
        del table
    for block in net:
        materialize(block, "cpu")
    finish(net, "cpu")
    net[0].table[0] = 7
    assert net[1].table[0].tolist() == [7, 1, 2, 3]


class Measured(LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = network
        self.confusion = MulticlassConfusionMatrix(5, normalize="true")


def test_metrics_work_and_what_lightning_copied_stays_without_memory():
    with deferred(0):
        module = Measured(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)))
    finish(module, "cpu")
    guesses, labels = torch.eye(5), torch.arange(5)
    for _ in range(2):
        module.confusion.update(guesses, labels)
        assert torch.equal(module.confusion.compute(), torch.eye(5))
        module.confusion.reset()
    ours = {id(one) for one in module.modules()}
    copies = [one for one in gc.get_objects() if type(one) in (nn.Linear, nn.BatchNorm1d) and id(one) not in ours]
    copies = [one for one in copies if one.weight.shape[0] == 5 and one.weight.is_meta]
    assert {type(one) for one in copies} == {nn.Linear, nn.BatchNorm1d}
    assert all(one.running_mean.is_meta for one in copies if isinstance(one, nn.BatchNorm1d))
    assert not any(one.is_meta for one in (*module.parameters(), *module.buffers()))


def test_a_copy_that_was_made_later_has_the_same_values():
    torch.manual_seed(2)
    usual = Everything()
    torch.manual_seed(2)
    with deferred(0):
        net = Everything()
    with resumed():
        average = AveragedModel(net, device=torch.device("cpu"))
        large = torch.ones(9000)
    assert not large.is_meta
    assert average.module.scaled.is_meta
    materialize(net, "cpu")
    finish(average, "cpu")
    for one in (net, average.module):
        assert all(torch.equal(*pair) for pair in zip(usual.state_dict().values(), one.state_dict().values(), strict=True))
    assert average.module.scaled is not net.scaled


RANKS = 3
MODULES: dict[str, Callable[[], Any]] = {
    # fully_shard takes no weights of another memory format
    "classifier": lambda: ImageClassifier(MiniResNet(widths=(9, 18), blocks=2), channels_last=False),
    "gpt": lambda: LanguageModel(vocabulary=40, context=16, layers=3, heads=2, width=16),
}


def on_a_rank(rank: int, place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=RANKS)
    mesh, found = init_device_mesh("cpu", (RANKS,)), {}
    for name, make in MODULES.items():
        torch.manual_seed(4)
        with deferred(0):
            module = make()
        for path, block in blocks_of(module):
            assert all(one.is_meta for one in block.parameters())
            materialize(block, "cpu", path)
            fully_shard(block, mesh=mesh)
        finish(module, "cpu")
        fully_shard(module, mesh=mesh)
        built = _whole(module)
        start_from(module.network, Path(place) / f"{name}.pt", "network.", say=False)
        assert all(isinstance(one, DTensor) for one in module.parameters())
        found[name] = built, _whole(module)
    torch.save(found, f"{place}/{rank}-found.pt")
    dist.destroy_process_group()


def _whole(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.full_tensor() if isinstance(one, DTensor) else one.clone() for name, one in module.state_dict().items()}


@pytest.mark.slow
def test_three_ranks_hold_their_parts_of_the_ordinary_model_and_of_a_file(tmp_path):
    others = {name: make().state_dict() for name, make in MODULES.items()}
    for name, state in others.items():
        torch.save({"state_dict": state}, tmp_path / f"{name}.pt")
    torch.multiprocessing.start_processes(on_a_rank, (str(tmp_path),), RANKS, start_method="forkserver")
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}-found.pt")
        for name, make in MODULES.items():
            torch.manual_seed(4)
            for expected, whole in zip((make().state_dict(), others[name]), found[name], strict=True):
                assert expected.keys() == whole.keys()
                assert [key for key in expected if not torch.equal(expected[key], whole[key])] == []


# What can't be deferred is said ---------------------------------------------------------------------------------------


def graded() -> nn.Module:
    net = nn.Linear(3, 3)
    net.weight.grad = torch.zeros(3, 3)
    return net


def elsewhere() -> nn.Module:
    return nn.Linear(3, 3).to("meta")


def like_elsewhere() -> nn.Module:
    net = nn.Linear(3, 3)
    net.register_buffer("no_values", torch.empty_like(net.weight, device="meta"))
    return net


def tied_by_memory() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight.data = net[0].weight.data
    return net


def written() -> nn.Module:
    net = nn.Linear(3, 3)
    net.weight.detach().numpy()[0, 0] = 1
    return net


@torch.library.custom_op("deferred_test::hidden", mutates_args=["x"])
def hidden(x: Tensor) -> None:
    """Draws, and does not say so."""
    x.copy_(torch.rand(x.shape))


def drawn() -> nn.Module:
    net = nn.Linear(3, 3)
    hidden(net.weight.data)
    return net


def conjugated() -> nn.Module:
    net = nn.Linear(3, 3)
    net.register_buffer("turned", torch.rand(9, dtype=torch.complex64).conj())
    return net


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (graded, "gradient was computed"),
        (elsewhere, "meta device"),
        (like_elsewhere, "meta device"),
        (tied_by_memory, "1.weight and 0.weight share memory"),
        (written, "read-only"),
        (drawn, "hidden.default is called"),
        (conjugated, "conjugated"),
    ],
)
def test_what_can_not_be_deferred_is_said(make, said):
    waiting.clear()
    try:
        with pytest.raises((UserError, ValueError), match=said):  # noqa: PT012
            with deferred(0):
                net = make()
            for name, block in net.named_children():
                materialize(block, "cpu", name)
            finish(net, "cpu")
    finally:
        waiting.clear()
    make()  # which is all right as usual
