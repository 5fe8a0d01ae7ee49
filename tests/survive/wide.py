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
        found = self.last(self.blocks(self.first(batch["point"].float())))
        loss = nn.functional.mse_loss(found, batch["sum"].float())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        """There is one as the data has one."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Measured(Callback):
    """Leaves what building the network has taken at most, and what training has: memory-RANK.json."""

    def _write(self, trainer: Trainer, module: LightningModule, what: str) -> None:
        file = Path(f"memory-{trainer.global_rank}.json")
        found = json.loads(file.read_text()) if file.exists() else {}
        found[what] = memory("VmHWM") - module.before
        found[what + " now"] = memory("VmRSS") - module.before
        found["before"] = module.before
        file.write_text(json.dumps(found))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, "built")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._write(trainer, pl_module, f"step {trainer.global_step}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, "trained")
