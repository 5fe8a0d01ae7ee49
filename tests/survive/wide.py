"""A network that is large for its work, for test_cramped.py; and what it took of the memory."""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn


def memory(name: str) -> int:
    """Bytes that this process has now ('VmRSS') or had at most ('VmHWM')."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Wide(LightningModule):
    """Of the same blocks, each of width x width parameters."""

    def __init__(self, width: int = 2048, blocks: int = 16) -> None:
        super().__init__()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        self.before = memory("VmRSS")
        self.first = nn.Linear(6, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.last = nn.Linear(width, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        output = self.last(self.blocks(self.first(batch["point"].float())))
        loss = nn.functional.mse_loss(output, batch["sum"].float())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        """There is one as the data has one."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Measured(Callback):
    """Leaves what the network had taken at most when training began: memory-RANK.json."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Wide)
        figures = {"before": pl_module.before, "built": memory("VmHWM") - pl_module.before}
        Path(f"memory-{trainer.global_rank}.json").write_text(json.dumps(figures))
