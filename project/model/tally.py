"""Tally: loss, top-1 and top-5 accuracy of everything seen, as one torchmetrics metric.

One state of four sums instead of a metric each: a batch costs a few small kernels and no wait for the device, the ranks are
joined by one reduction, and every sample weighs the same, whatever batch it came in.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

# Sums of millions of losses need the digits; Apple's GPUs don't have them.
_SUMS = torch.float32 if torch.backends.mps.is_available() else torch.float64


class Tally(Metric):
    """Mean loss and accuracy, over all ranks, since the last reset."""

    full_state_update = False
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.num_classes = 0
        self.add_state("sums", torch.zeros(4, dtype=_SUMS), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor, mean_loss: Tensor) -> None:
        self.num_classes = logits.shape[1]
        if not len(labels):  # an evaluation may have fewer samples than ranks
            return
        hits = logits.topk(min(5, self.num_classes), dim=1).indices == labels[:, None]
        count = len(labels)
        self.sums += torch.stack(
            [
                mean_loss.detach().to(_SUMS) * count,
                hits[:, 0].sum().to(_SUMS),
                hits.sum().to(_SUMS),
                torch.full((), count, dtype=_SUMS, device=labels.device),
            ]
        )

    def compute(self) -> dict[str, Tensor]:
        """`loss`, `acc`, and `acc5` where there are more than five classes."""
        return self.means(self.sums.unbind())

    def means(self, sums: Sequence[Any]) -> dict[str, Any]:
        loss, top1, top5, count = sums
        values = {"loss": loss / count, "acc": top1 / count}
        if self.num_classes > 5:
            values["acc5"] = top5 / count
        return values
