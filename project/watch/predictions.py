"""The verb `predict`: `python -m project predict` leaves predictions.csv in the run's folder, one line a sample, in order.

Where the samples' files are known, each line names its own.
"""

import csv
import logging
from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from project.step.data_ranks import data_ranks
from project.typed import callbacks_of, typed
from project.untrusted import replacing

log = logging.getLogger(__name__)

_COLUMNS = ("sample", "label", "confidence")


class PredictionWriter(Callback):
    """Collects sample, label, confidence and perhaps file from all ranks, and rank 0 writes them."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, float, str]] = []

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(outputs, Mapping) or not {*_COLUMNS} <= outputs.keys():
            return  # of another kind: trainer.predict returns them
        columns = [outputs[name].tolist() for name in _COLUMNS]
        files = outputs.get("file", [""] * len(columns[0]))
        self._rows.extend(zip(*columns, files, strict=True))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parts = data_ranks(trainer).all_gather_objects(self._rows)
        if trainer.is_global_zero and any(parts):
            path = Path(trainer.default_root_dir) / "predictions.csv"
            rows = sorted(row for part in parts for row in part)
            columns = [*_COLUMNS] + ["file"] * any(file for *_, file in rows)
            with replacing(path) as part, part.open("x", newline="") as opened:
                writer = csv.writer(opened)
                writer.writerow(columns)
                writer.writerows((s, c, f"{p:.4f}", file)[: len(columns)] for s, c, p, file in rows)
            log.info("Predictions: %s", path)
        elif trainer.is_global_zero and typed(trainer).configuration and not callbacks_of(trainer, BasePredictionWriter):
            log.warning(
                "What predict_step returns is written nowhere: a table needs sample, label and confidence, which it lacks. "
                "HINT: a BasePredictionWriter in trainer.callbacks writes it; Python's trainer.predict() returns it."
            )
        self._rows = []
