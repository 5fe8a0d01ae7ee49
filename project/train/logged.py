"""What `self.log` logs: its means over an epoch count each sample once, also those of a resumed run."""

from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector

from project.data.dealing import DealtLoader
from project.train.micro_batch import micro_batch


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
                metric.cumulated_batch_size = metric.cumulated_batch_size.double()
