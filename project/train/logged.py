"""What `self.log` logs: its means over an epoch count each sample once, also those of a resumed run."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor

from project.data.dealing import DealtLoader
from project.train.micro_batch import micro_batch

Sums = dict[str, list[tuple[Tensor, Tensor]]]
"""By what was logged: each rank's sum, or largest or smallest value, of the epoch so far, and the samples that are in it."""


class Results(_ResultCollection):
    """What the training steps of an epoch have logged; a run that was stopped within the epoch goes on with it."""

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.from_before: dict[str, tuple[Tensor, Tensor]] = {}

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        if key in self.from_before:
            metric: Any = self[key]
            before, samples = self.from_before.pop(key)
            metric.value = before.to(metric.value.device)
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = samples.to(metric.cumulated_batch_size.device)
        super().update_metrics(key, value, batch_size)

    def sums(self, ranks: int) -> Sums:
        """Of all ranks, which must call this together."""
        mine: dict[str, tuple[Tensor, Tensor]] = {}
        for key, found in self.items():
            metric: Any = found
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset:
                samples = metric.cumulated_batch_size if metric.meta.is_mean_reduction else torch.tensor(0)
                mine[key] = metric.value.detach().cpu(), samples.cpu()
        everybodys: list[Any] = [mine]
        if ranks > 1:
            everybodys = [None] * ranks
            dist.all_gather_object(everybodys, mine)
        return {key: [one[key] for one in everybodys] for key in mine if all(key in one for one in everybodys)}

    def go_on(self, sums: Sums, rank: int, ranks: int) -> None:
        """On another number of ranks, what was summed up is rank 0's."""
        for key, of_ranks in sums.items():
            if len(of_ranks) == ranks:
                self.from_before[key] = of_ranks[rank]
            elif rank == 0 and all(samples for _, samples in of_ranks):
                values, samples = zip(*of_ranks, strict=True)
                self.from_before[key] = torch.stack(values).sum(0), torch.stack(samples).sum(0)


class Logged(_LoggerConnector):
    """Lightning's, which guesses the size of a batch from what its `collate_fn` made (of strings, by their length)."""

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        super().on_batch_start(batch, dataloader_idx)
        results: Any = self.trainer._results
        if self.trainer.training:
            results.batch_size = micro_batch(self.trainer).size or None
            return
        loop: Any = self.trainer._active_loop
        loaders = loop._combined_loader.flattened
        loader = loaders[dataloader_idx or 0]
        if isinstance(loader, DealtLoader) and loader.taken:
            _, step, number = loader.taken.popleft()
            low, high = loader.keys.order.micro_span(step, number)
            results.batch_size = high - low

    def epoch_end_reached(self) -> None:
        """Lightning brings the ranks' numbers of samples to their mean as whole numbers: of 3 and 4, that would be 3."""
        super().epoch_end_reached()
        results: Any = self.trainer._results
        for metric in results.values():
            if metric.is_tensor and metric.meta.is_mean_reduction:
                dtype = metric.value.dtype if metric.value.is_floating_point() else torch.float32
                metric.cumulated_batch_size = metric.cumulated_batch_size.to(dtype)
