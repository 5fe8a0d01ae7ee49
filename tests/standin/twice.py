"""Fits one sharded network again and again in a process, from Python: what came of it is written to twice-RANK.json."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from project import Sharded, Trainer
from tests.standin.optimizers import Small


class Normed(Small):
    """Has buffers, too, and fails in the middle of a forward pass if it is to."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
        self.network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.fails = False

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.training_step(batch, batch_idx)
        self.log("val_loss", loss, sync_dist=True)
        if self.fails:
            raise ArithmeticError("of the module")
        return loss

    def val_dataloader(self) -> DataLoader[Any]:
        loader: DataLoader[Any] = self.train_dataloader()
        return loader


LAUNCHED: dict[str, str] = {}
"""What the launcher of this rank has put into its environment, of which Lightning takes some back at the end of a fit."""


def trainer(strategy: Any, *callbacks: Callback) -> Trainer:
    os.environ.update(LAUNCHED)
    return Trainer(
        max_epochs=1, accelerator="gpu", devices=int(LAUNCHED["WORLD_SIZE"]), global_batch_size=8, logger=False,
        precision="32-true", enable_progress_bar=False, strategy=strategy, callbacks=[*callbacks],
        default_root_dir=f"run-{strategy}" if isinstance(strategy, str) else "run",
    )  # fmt: skip


def error(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def alone() -> None:
    """On one GPU: what an earlier fit has connected by NCCL alone is no place for what lies on the host."""
    settings: dict[str, Any] = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "fingerprints": False}
    Trainer(strategy=Sharded(reduce_dtype="bf16"), **settings).fit(Normed())
    Path("alone.txt").write_text(error(lambda: Trainer(strategy=Sharded(cpu_offload=True), **settings).fit(Normed())))


def main() -> None:
    LAUNCHED.update(
        {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
    )
    results: dict[str, Any] = {}
    for strategy in ("ddp", "sharded"):
        module, first = Normed(), trainer(strategy)
        first.fit(module)
        values = [first.validate(module, ckpt_path="best", verbose=False)]
        second = trainer(strategy)
        second.fit(module)
        second.save_checkpoint(f"{strategy}.ckpt")
        values += [[second.callback_metrics], trainer(strategy).validate(Normed(), ckpt_path=f"{strategy}.ckpt", verbose=False)]
        results[strategy] = [float(value["val_loss"]) for (value,) in values]
    results["average"] = error(lambda: trainer("sharded", EMAWeightAveraging()).fit(module))
    module.fails = True
    results["fails"] = error(lambda: trainer("sharded").validate(module, verbose=False))
    results["offload"] = error(lambda: trainer(Sharded(cpu_offload=True)).fit(Normed()))
    Path(f"twice-{LAUNCHED['LOCAL_RANK']}.json").write_text(json.dumps(results))
