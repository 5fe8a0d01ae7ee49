"""Two hosts with copies, on each of which two data ranks of two ranks share layers: what a rank holds, and writes.

Run by torchrun with 8 processes, from test_tensor_parallel.py.
"""

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from project.sharded.shards import local, shard_like, split, total_norm
from project.sharded.tensor_parallel import parallelize_layers


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "shard", "tensor"))
    torch.manual_seed(0)
    whole = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 10), nn.GELU(), nn.Linear(10, 7)).double()
    network: Any = deepcopy(whole)
    parallelize_layers("", network, {"1": ColwiseParallel(), "3": RowwiseParallel()}, mesh["tensor"])
    fully_shard(network, mesh=mesh["copies", "shard"])
    inputs = torch.randn(4, 7).double()
    for module in (whole, network):
        module(inputs).square().mean().backward()

    parameters = dict(whole.named_parameters())
    for name, parameter in network.named_parameters():
        assert torch.equal(local(shard_like(parameters[name].detach(), parameter)), local(parameter)), name
    norms = [total_norm([parameter.grad for parameter in each.parameters()]).item() for each in (whole, network)]
    assert abs(norms[0] - norms[1]) < 1e-14, norms

    slices = split({name: parameter.detach() for name, parameter in network.named_parameters()}).slices
    counts: list[Any] = [None] * 8
    dist.all_gather_object(counts, sum(part.numel() for part in slices.values()))
    assert sum(counts) == sum(parameter.numel() for parameter in parameters.values()), "each slice is written once"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
