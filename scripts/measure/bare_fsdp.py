"""The bare loop that sharded_cost.py compares with: torch's `fully_shard` on the blocks of our GPT, and no Trainer.

Gradients are added up once a step, as in ours; optimiser, schedule, data and the type are the same. Takes its turns as
scripts/bench/worker.py does: RANK, WORLD_SIZE and where the store is come from the environment.
"""

import sys
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2]))
from project.data.text import TextData, Windows, batch_of
from project.model.gpt import GPT
from project.model.schedule import WarmupCosine
from scripts.bench.worker import Worker


def train(layers: int, heads: int, width: int, context: int, micro_batch: int, accumulation: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    network = GPT(context=context, layers=layers, heads=heads, width=width, dropout=0.0)
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh, reshard_after_forward=False)
    matrices, vectors = (
        [parameter for parameter in network.parameters() if (parameter.ndim >= 2) == is_matrix] for is_matrix in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    schedule = WarmupCosine(optimizer, 30)
    data = TextData(context=context, batch_size=micro_batch)
    data.prepare_data()
    windows = Windows(data.path("train"), context)
    sampler = DistributedSampler(windows)
    loader = DataLoader(windows, micro_batch, sampler=sampler, collate_fn=batch_of, drop_last=True)
    worker = Worker()
    for epoch in count():
        sampler.set_epoch(epoch)
        for number, (tokens, following) in enumerate(loader, 1):
            last = number % accumulation == 0
            network.set_requires_gradient_sync(last)
            loss = F.cross_entropy(network(tokens).flatten(0, 1), following.flatten())
            (loss / accumulation).backward()
            if last:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                worker.after_step()


if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
