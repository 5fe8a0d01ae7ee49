#!/usr/bin/env python
"""What staying alive costs in a steady step: the time spent in the callbacks that keep the run the same and stoppable.

    .venv/bin/python scripts/measure/survival_cost.py                                                   one process
    .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 scripts/measure/survival_cost.py    two

Prints microseconds a step (median of five turns of 20 steps, after a warm-up) and their share of MiniResNet's step.
"""

import logging
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from lightning.pytorch import Callback

from project.checkpoints.callback import Checkpoints
from project.data import ImageData, Synthetic
from project.exact.batch_norm import StepStatistics
from project.model import ImageClassifier, MiniResNet
from project.step.chance import ChanceByMicroBatch
from project.survive.hang.watchdog import Watchdog
from project.survive.nonfinite import NonFinite
from project.survive.preemption import StopTogether
from project.trainer import Trainer
from project.watch.throughput import Throughput

HOOKS = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end")
OURS = (Watchdog, NonFinite, Throughput, StepStatistics, ChanceByMicroBatch, StopTogether, Checkpoints)
TURNS, STEPS = 5, 20
spent: dict[str, list[float]] = defaultdict(lambda: [0.0])


def timed(name: str, hook: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        hook(*args, **kwargs)
        spent[name][-1] += time.perf_counter() - start

    return call


class Turns(Callback):
    """Closes a turn every STEPS steps."""

    def __init__(self) -> None:
        self.lengths: list[float] = []
        self.start = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0 and trainer.global_step % STEPS == 0:
            now = time.perf_counter()
            if trainer.global_step:
                self.lengths.append(now - self.start)
            self.start = now
            for times in spent.values():
                times.append(0.0)


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    data = ImageData(Synthetic(train_size=10_000, val_size=64), batch_size=16, global_batch_size=32, num_workers=0)
    turns = Turns()
    trainer = Trainer(
        strategy="ddp", max_steps=STEPS * (TURNS + 1) + 1, callbacks=turns, logger=False, limit_val_batches=0,
        precision="16-mixed", default_root_dir="/tmp/survival-cost", enable_progress_bar=False, num_sanity_val_steps=0,
    )  # fmt: skip
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, OURS):
            for hook in HOOKS:
                setattr(callback, hook, timed(type(callback).__name__, getattr(callback, hook)))
    torch.manual_seed(0)
    trainer.fit(ImageClassifier(MiniResNet()), datamodule=data)
    if trainer.is_global_zero:
        step = statistics.median(turns.lengths[1:]) / STEPS
        total = 0.0
        print(f"{trainer.world_size} process(es), a step of {step * 1e3:.1f} ms")
        for name, times in spent.items():
            cost = statistics.median(times[2:-1]) / STEPS
            total += cost
            print(f"  {name:20} {cost * 1e6:7.0f} us  {cost / step:7.3%}")
        print(f"  {'together':20} {total * 1e6:7.0f} us  {total / step:7.3%}")


if __name__ == "__main__":
    main()
