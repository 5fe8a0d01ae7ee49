"""Random numbers in the network (dropout, say): a function of the micro-batch, not of the rank or of what was before."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from project.train.micro_batch import micro_batch


class ChanceByMicroBatch(Callback):
    """Seeds PyTorch's generators before each micro-batch that is trained on."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not torch.manual_seed: where there is a CUDA build and no GPU, it formats a stack trace each time (0.5 ms).
        seed = micro_batch(trainer).seed
        torch.default_generator.manual_seed(seed)
        if pl_module.device.type == "cuda":
            torch.cuda.manual_seed(seed)
