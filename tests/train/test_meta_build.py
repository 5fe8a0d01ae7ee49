"""A network that rank 0 builds has its bits on all ranks, which draw the same afterwards."""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from project.errors import UserError
from project.model.classifier import ImageClassifier
from project.model.gpt import LanguageModel
from project.model.minires import MiniResNet
from project.sharded.meta_build import StayOnMeta, build_once, give_memory, refuse_other_network, signature, without_values
from project.sharded.refusals import averages_on_host, refuse_no_values
from tests.model.strange_networks import Plain
from tests.survive.test_resume import same


class Everything(nn.Module):
    """Ties, buffers that are computed, draws of all kinds, and loops over shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.tokens.weight
        self.scaled = nn.Parameter(torch.randn(16, 16) * 0.02)
        self.frozen = nn.Parameter(torch.empty(4, 4).uniform_(-1, 1), requires_grad=False)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.q, self.k = (nn.Parameter(values) for values in torch.empty(2, 5, 5).normal_().unbind())
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
        if self.weight.sum() > 0:
            torch.rand(3)
        self.chosen = nn.Parameter(self.weight[self.weight > 0].clone())
        self.register_buffer("counts", torch.from_numpy(np.cumsum(self.weight.detach().numpy())))


class Twins(nn.Module):
    """Layers that were copied, moved to another dtype, another layout, and loaded."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
        self.layers[1].to(memory_format=torch.channels_last)
        self.layers[2].double()
        state = {
            name: torch.rand_like(value) if value.is_floating_point() else value for name, value in layer.state_dict().items()
        }
        self.layers[0].load_state_dict(state)


def lora() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nn.utils.parametrizations.weight_norm(net[0])
    nn.utils.parametrizations.spectral_norm(net[1])
    return net


NETS: dict[str, Callable[[], nn.Module]] = {
    "everything": Everything,
    "asks": Asks,
    "twins": Twins,
    "computes": Plain,
    "classifier": lambda: ImageClassifier(MiniResNet(widths=(8, 16), blocks=1)),
    "language model": lambda: LanguageModel(vocabulary=40, context=16, layers=2, heads=2, width=16),
    "swin": lambda: torchvision.models.SwinTransformer([4, 4], 8, [2, 2], [2, 4], [7, 7], stochastic_depth_prob=0.2),
    "lstm": lambda: nn.LSTM(6, 5, num_layers=2, bidirectional=True, proj_size=3),
    "parametrized": lora,
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
    "bfloat16": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16(),
}
READS_PARAMETERS = ("asks", "computes", "orthogonal")


@pytest.mark.parametrize("name", NETS)
def test_a_network_without_values_is_like_another_and_draws_the_same(name, monkeypatch):
    monkeypatch.setattr("project.sharded.meta_build.SMALL", 0)
    torch.manual_seed(7)
    expected = build_once(NETS[name], lambda network: network, rank=0)
    torch.manual_seed(7)
    network = build_once(NETS[name], lambda network: network, rank=1)
    refuse_other_network(network, signature(expected))
    whole = not any(parameter.is_meta for parameter in network.parameters())
    assert whole == (name in READS_PARAMETERS)
    if whole:
        assert same(expected.state_dict(), network.state_dict())
    assert whole or all(parameter.is_meta for parameter in network.parameters())
    objects = [id(parameter) for parameter in network.parameters()]
    give_memory(network, torch.device("cpu"))
    assert objects == [id(parameter) for parameter in network.parameters()]
    refuse_other_network(network, signature(expected))


def on_meta() -> nn.Module:
    return nn.Linear(3, 3).to("meta")


def tied_by_memory() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight.data = net[0].weight.data
    return net


@pytest.mark.parametrize(
    ("make", "message"), [(on_meta, "without values"), (tied_by_memory, "1.weight and 0.weight share memory")]
)
def test_rank_0_refuses_what_it_can_not_send(make, message):
    with pytest.raises(UserError, match=message):
        refuse_no_values(make())


def test_another_network_is_refused():
    with pytest.raises(UserError, match=r"different networks: \('weight', \(4, 3\), .* and \('weight', \(5, 3\)"):
        refuse_other_network(nn.Linear(3, 5), signature(nn.Linear(3, 4)))


def test_a_copy_moves_to_no_device_before_it_has_values(monkeypatch):
    monkeypatch.setattr("project.sharded.meta_build.SMALL", 0)
    network = build_once(lambda: nn.Linear(3, 3), lambda network: network, rank=1)
    with StayOnMeta():
        average = AveragedModel(network, device=torch.device("cpu"))
        moved = torch.ones(2).to("cpu", torch.float64)
    assert average.module.weight.is_meta
    assert moved.dtype is torch.float64
    assert without_values(network, average) == ""
    kept = [network.weight.detach().clone()]
    assert "of (3, 3) was computed" in without_values(network, average)
    del kept


def test_averages_are_on_the_host_until_the_network_is_sharded():
    placed, unplaced = EMAWeightAveraging(device="cuda:0"), EMAWeightAveraging()
    with averages_on_host(SimpleNamespace(callbacks=[placed, unplaced])):  # type: ignore[arg-type]
        assert (placed._device, unplaced._device) == (torch.device("cuda:0"), torch.device("cpu"))
    assert (placed._device, unplaced._device) == (torch.device("cuda:0"), None)
