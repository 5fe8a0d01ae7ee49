"""Tally is a torchmetrics metric of loss, top-1 and top-5 accuracy over all samples that it has seen, without a wait for the
device. Every sample weighs the same, whatever batch it came in."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

# Sums of millions of losses need the digits; Apple's GPUs don't have them.
_SUMS = torch.float32 if torch.backends.mps.is_available() else torch.float64
_GRID = 2.0**24  # multiples of 1/16,777,216 add up without rounding, in any order, as long as the sum is below 500 million
_AT_ONCE = 64  # micro-batches summed up together

Number = TypeVar("Number", float, Tensor)
Note = tuple[Tensor, Tensor]
"""The mean loss of a micro-batch, and for each sample which of its best guesses is right: five, or one of few classes."""


def note(logits: Tensor, labels: Tensor, mean_loss: Tensor) -> Note:
    guesses = 5 if logits.shape[1] > 5 else 1
    if labels.ndim == 2:  # shares: the largest counts
        labels = labels.argmax(1)
    return mean_loss.detach(), logits.detach().topk(guesses, dim=1).indices == labels[:, None]


def add_up(notes: Sequence[Note]) -> Tensor:
    """Returns sums over all samples: of their loss, right first guesses, right guesses, and their number."""
    hits = torch.cat([hits for _, hits in notes])
    loss = torch.zeros((), dtype=_SUMS, device=hits.device)
    for size in {len(hits) for _, hits in notes} - {0}:  # an evaluation may have fewer samples than ranks
        losses = torch.stack([mean for mean, hits in notes if len(hits) == size]).to(_SUMS) * size
        loss = loss + (losses * _GRID).round().sum() / _GRID
    right = hits.sum(0, dtype=_SUMS)
    return torch.stack([loss, right[0], right.sum(), torch.full_like(loss, len(hits))])


def means(sums: Sequence[Number], guesses: int) -> dict[str, Number]:
    """Returns `loss`, `acc`, and `acc5` where there are more than five classes."""
    loss, top1, top5, count = sums
    if not count:  # every step of an epoch was left out
        return {}
    values = {"loss": loss / count, "acc": top1 / count}
    return {**values, "acc5": top5 / count} if guesses == 5 else values


class Tally(Metric):
    """A metric: mean loss and accuracy, over all ranks, since the last reset."""

    full_state_update = False
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.guesses = 1
        self._notes: list[Note] = []  # what is not in the sums yet
        self.add_state("sums", torch.zeros(4, dtype=_SUMS), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor, mean_loss: Tensor) -> None:
        self.add([note(logits, labels, mean_loss)])

    def add(self, notes: Sequence[Note]) -> None:
        self._notes.extend(notes)
        if len(self._notes) >= _AT_ONCE:
            self.total()

    def total(self) -> Tensor:
        """Returns the sums of this rank."""
        if self._notes:
            self.sums = self.sums + add_up(self._notes)
            self.guesses = self._notes[-1][1].shape[1]
            self._notes.clear()
        return self.sums

    def reset(self) -> None:
        super().reset()
        self._notes.clear()

    def compute(self) -> dict[str, Tensor]:
        return means(self.total().unbind(), self.guesses)
