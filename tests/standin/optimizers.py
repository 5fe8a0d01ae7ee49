"""Trains a small network with each optimiser of torch, by a strategy: what came of it is written to optimizers-RANK.json."""

import json
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from project import Trainer
from project.errors import UserError
from project.sharded.shards import local

Make = Callable[[Any], optim.Optimizer]
NAMES = (
    *("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "LBFGS"),
    *("Adafactor", "Muon"),
)
FUSED: dict[str, Make] = {
    "SGD momentum": partial(optim.SGD, lr=0.01, momentum=0.9),
    "SGD fused": partial(optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "SGD dampening fused": partial(optim.SGD, lr=0.01, momentum=0.9, dampening=0.1, fused=True),
    "Adam fused": partial(optim.Adam, lr=0.01, fused=True),
    "AdamW fused": partial(optim.AdamW, lr=0.01, fused=True),
    "Adagrad fused": partial(optim.Adagrad, lr=0.01, fused=True),
    "Adam capturable": partial(optim.Adam, lr=0.01, capturable=True),
}


NOT_IN_THIS_TORCH = "this torch has no kernel for it"
"""Said of Adagrad's fused kernel for GPUs, and of Rprop with shards, by torch 2.11."""
LACKING = re.compile("`fused=True` requires all the params|does not have a sharding strategy registered")

LAUNCHED: dict[str, str] = {}
"""What the launcher of this rank has put into its environment."""


class Small(LightningModule):
    """Two layers without biases, as Muon takes matrices only."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.network(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())

    def on_train_end(self) -> None:
        self.finite = all(bool(local(parameter).isfinite().all()) for parameter in self.parameters())

    def train_dataloader(self) -> Any:
        points = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), 4)


def outcome(number: int, make: Make, **settings: Any) -> str:
    """Returns 'trained', or the message of the refusal; anything else is raised."""
    # Lightning takes some of it back at the end of a fit; and a port may still be that of the fit before.
    os.environ.update({**LAUNCHED, "MASTER_PORT": str(int(LAUNCHED["MASTER_PORT"]) + number)})
    trainer = Trainer(
        max_steps=3, accelerator="gpu", devices=int(LAUNCHED["WORLD_SIZE"]), global_batch_size=8, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, fingerprints=False, default_root_dir="run", **settings,
    )  # fmt: skip
    module = Small(make)
    try:
        trainer.fit(module)
    except UserError as error:
        return str(error)
    except RuntimeError as error:
        if LACKING.search(str(error)):
            return NOT_IN_THIS_TORCH
        raise
    return "trained" if module.finite else "its weights are not finite"


def main() -> None:
    LAUNCHED.update(
        {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
    )
    strategy, precision = sys.argv[1:3]
    makes = FUSED | {name: partial(getattr(optim, name), lr=0.01) for name in NAMES if hasattr(optim, name)}
    settings = {"strategy": strategy, "precision": precision}
    outcomes = {name: outcome(number, make, **settings) for number, (name, make) in enumerate(makes.items())}
    Path(f"optimizers-{LAUNCHED['LOCAL_RANK']}.json").write_text(json.dumps(outcomes))
