"""A run whose arithmetic is exact: small whole numbers and powers of two, so that it has the same bits on any processor.

    python dyadic.py RANKS STRATEGY FOLDER [STEP AT WHICH IT IS STOPPED]

It prints the weights at its end, as they are. Its randomness and its state lie where a user puts them: a draw in the step, a
buffer, a callback, a metric, sums of an epoch, a schedule.
"""

import hashlib
import json
import os
import signal
import sys
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from project import Trainer


class Dyadic(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4, dtype=torch.float64)
        self.mean = torchmetrics.SumMetric()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) % 5 - 2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Keeps 8 digits behind the point: each step adds some, and a double holds 53."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_((parameter * 256).round() / 256)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        drawn = torch.randint(-1, 2, inputs.shape).double()
        loss: torch.Tensor = (self.layer(inputs + drawn) - targets).square().sum(1).mean()
        self.mean.update(targets.sum())
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(inputs), sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen += self.mean.compute()
        self.mean.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 2**-6, momentum=0.5)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        inputs, targets = (torch.randint(-1, 2, (40, n), generator=generator).double() for n in (8, 4))
        return DataLoader(TensorDataset(inputs, targets), batch_size=2, shuffle=True)


class Counts(Callback):
    """Counts samples, as its state; stops the run after a step."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at, self.count = stop_at, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1 if trainer.global_step == 1 + self.count else 0
        if self.stop_at and trainer.global_step == self.stop_at and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def main(ranks: int, strategy: str, folder: str, stop_at: int) -> None:
    seed_everything(7, verbose=False)
    module, counts = Dyadic(), Counts(stop_at)
    trainer = Trainer(
        devices=ranks, strategy=strategy if ranks > 1 else "auto", accelerator="cpu", max_epochs=2, global_batch_size=8,
        default_root_dir=folder, callbacks=[counts], logger=False, enable_progress_bar=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, ckpt_path="last" if os.path.isdir(f"{folder}/checkpoints") else None)
    values = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in module.state_dict().values()]
    if trainer.is_global_zero:
        weights = hashlib.sha256(b"".join(value.double().numpy().tobytes() for value in values)).hexdigest()
        print(json.dumps({"weights": weights, "loss": trainer.callback_metrics["loss"].item(), "count": counts.count}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]) if len(sys.argv) > 4 else 0)
