"""Optimisers on the shards of three ranks, against the same optimisers on DTensors: the same bits, and the same objects.

Run in 3 processes, from test_sharded.py.
"""

import os
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from project.sharded.local_step import _BY_ELEMENTS, clip, on_shards
from project.sharded.shards import local, total_norm
from project.survive.failure import message

MORE: dict[type[Optimizer], list[dict[str, Any]]] = {
    optim.SGD: [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    optim.AdamW: [{"amsgrad": True}, {"fused": True}],
    optim.RMSprop: [{"centered": True, "momentum": 0.5}],
}


class Network(nn.Sequential):
    """Uneven shards, one that a rank has nothing of, a parameter without a gradient, and one that is not sharded."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
        self.unused, self.plain = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))


def sharded(network: nn.Module) -> Any:
    network = deepcopy(network)
    return fully_shard(network, mesh=init_device_mesh("cpu", (3,)), ignored_params={network.plain})


def same(value: Any, expected: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is type(expected) and torch.equal(local(value), local(expected))
    return bool(value == expected)


def compare(kind: type[Optimizer], settings: dict[str, Any], whole: nn.Module) -> None:
    networks = [sharded(whole) for _ in range(2)]
    # torch's own steps take no DTensors and tensors at once.
    groups = [
        [{"params": [each for each in network.parameters() if each is not network.plain]}, {"params": [network.plain]}]
        for network in networks
    ]
    optimizers = [kind(group, lr=0.1, **settings) for group in groups]  # type: ignore[call-arg]
    kept = [*optimizers[1].param_groups[0]["params"]]
    same_states: list[Any] = []
    for step in range(3):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for network, optimizer in zip(networks, optimizers, strict=True):
            optimizer.zero_grad()
            (network(inputs).square().mean() + network.plain.square().sum()).backward()
            parameters = [*network.parameters()]
            clip(parameters, 0.5, total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))
        optimizers[0].step()
        with on_shards(optimizers[1]):
            assert not any(
                isinstance(each, DTensor) and each.grad is not None for each in optimizers[1].param_groups[0]["params"]
            )
            optimizers[1].step()
        states = [value for state in optimizers[1].state.values() for value in state.values() if isinstance(value, DTensor)]
        same_states = same_states or states
    assert all(first is last for first, last in zip(same_states, states, strict=True)), "made anew in each step"
    assert all(parameter is original for parameter, original in zip(optimizers[1].param_groups[0]["params"], kept, strict=True))
    assert all(local(each.detach()).grad is None for each in networks[1].parameters() if isinstance(each, DTensor))
    for parameter, reference in zip(networks[1].parameters(), networks[0].parameters(), strict=True):
        assert same(parameter.detach(), reference.detach()), (kind, settings)
        states = optimizers[1].state.get(parameter, {}), optimizers[0].state.get(reference, {})
        assert states[0].keys() == states[1].keys(), (kind, settings)
        assert all(same(states[0][name], states[1][name]) for name in states[0]), (kind, settings, states)


def main() -> None:
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    whole = Network()
    for kind in sorted(_BY_ELEMENTS, key=lambda kind: kind.__name__):
        foreach = [{"foreach": True}] if kind is not optim.Rprop else []  # torch has none of it for DTensors
        for settings in ({"foreach": False}, *foreach, *MORE.get(kind, [])):
            compare(kind, settings, whole)
    norms = []
    for network in (whole, sharded(whole)):
        network.zero_grad()
        network(torch.ones(4, 5)).square().mean().backward()
        gradients = [each.grad for each in network.parameters() if each.grad is not None]
        norms += [total_norm(gradients).item(), total_norm([each.to(torch.bfloat16) for each in gradients]).item()]
        clip(network.parameters(), 0.01, total_norm(gradients))
        assert abs(total_norm(gradients).item() - 0.01) < 1e-5
    assert abs(norms[0] - norms[2]) < 1e-6 * norms[0], norms
    assert abs(norms[1] - norms[3]) < 1e-2 * norms[1], norms
    broken = optim.Adam(sharded(whole).parameters())
    try:
        with on_shards(broken):
            raise KeyError
    except KeyError:
        assert all(isinstance(each, nn.Parameter) for each in broken.param_groups[0]["params"])
    with pytest.raises(RuntimeError) as mixed:
        sharded(whole)[0].weight * torch.ones(7, 5)
    assert "For a penalty on weights" in message(mixed.value)
    dist.destroy_process_group()
