"""A small GPT on bytes, and the plain LightningModule that trains it: nothing in here knows of this project's Trainer."""

from math import inf

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F
from torch.optim import AdamW

from project.errors import UserError
from project.model.schedule import WarmupCosine

_BYTES = 256
_TEMPERATURE = 0.8

Batch = tuple[Tensor, Tensor]
"""Tokens (samples, context), and for each of them the one that follows."""


class Attention(nn.Module):
    """A causal self-attention layer: each token looks at itself and at those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # Without dropout of its own: that would cost the fast kernels, and on a CPU there is none that has it.
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """A pre-norm decoder block: attention, then a GELU network four times as wide."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.network(self.network_norm(x)))
        return x


class GPT(nn.Module):
    """A GPT-2: tokens (samples, length) to logits of the next token (samples, length, vocabulary)."""

    def __init__(
        self, vocabulary: int = 256, context: int = 128, layers: int = 4, heads: int = 4, width: int = 128, dropout: float = 0.1
    ) -> None:
        super().__init__()
        if width % heads:
            raise UserError(f"width={width} can't be shared out among {heads} heads. HINT: take a multiple of {heads}.")
        self.context = context
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim >= 2:
                # What is added to the residual stream is smaller, so that its sum over all blocks is not larger for more.
                adds = name.endswith(("attention.output.weight", "network.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise UserError(
                f"{length} tokens are more than the network's context of {self.context}. HINT: set model.init_args.context and "
                "data.init_args.context to the same."
            )
        x = self.dropout(self.tokens(tokens) + self.positions.weight[:length])
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """Returns the plan by which ranks share its layers. Queries, keys and values lie side by side in one layer, so each
        rank computes a part of them and has the attention whole; the tied embedding stays whole, too."""
        return {
            "blocks.*.attention.inputs": ColwiseParallel(output_layouts=Replicate()),
            "blocks.*.attention.output": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.network.0": ColwiseParallel(),
            "blocks.*.network.2": RowwiseParallel(),
        }


class LanguageModel(LightningModule):
    """Trains a GPT to tell the next token: AdamW, warm-up and half a cosine. Losses are in nats per token.

    Args:
        vocabulary: tokens that there are; 256 for bytes.
        context: the most tokens that the network can look at.
        layers: decoder blocks.
        heads: of the attention in each block.
        width: numbers that stand for a token.
        dropout: share of what a block adds, and of the embeddings, that is left out in training.
        lr: the learning rate after the warm-up.
        weight_decay: of matrices; biases and norms have none.
        warmup_steps: optimiser steps until the full learning rate is reached.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        context: int = 128,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        dropout: float = 0.1,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__()
        self.network = GPT(vocabulary, context, layers, heads, width, dropout)
        self.lr, self.weight_decay, self.warmup_steps = lr, weight_decay, warmup_steps

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.network(tokens)
        return logits

    def loss(self, batch: Batch) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), following.flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Logs a sample of the text that it writes, by TensorBoard's own API."""
        of_bytes = self.network.tokens.num_embeddings == _BYTES
        boards = [logger for logger in self.loggers if isinstance(logger, TensorBoardLogger)]
        if self.trainer.sanity_checking or not of_bytes or not boards:
            return
        written = self.write().decode(errors="replace")  # by all ranks: each may hold a part of the network only
        # As Markdown shows code: each line as it is.
        shown = "".join(f"    {line}\n" for line in written.splitlines())
        for board in boards if self.trainer.is_global_zero else ():
            board.experiment.add_text("val/sample", shown, self.trainer.global_step)

    @torch.no_grad()
    def write(self, length: int = 256, start: bytes = b"\n", seed: int = 0) -> bytes:
        """Returns bytes that follow `start`: each drawn by its probability, the likely ones a little more often."""
        generator = torch.Generator(self.device).manual_seed(seed)
        tokens = torch.tensor([[*start]], device=self.device)
        for _ in range(length):
            logits = self(tokens[:, -self.network.context :])[:, -1].float()
            following = torch.multinomial((logits / _TEMPERATURE).softmax(1), 1, generator=generator)
            tokens = torch.cat([tokens, following], 1)
        return bytes(tokens[0, len(start) :].tolist())

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True if self.device.type == "cuda" else None)
        steps = self.trainer.estimated_stepping_batches
        # A run that only its time ends has no last step, and keeps its learning rate.
        schedule = WarmupCosine(optimizer, self.warmup_steps, int(steps) if 0 <= steps < inf else None)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
