#!/usr/bin/env python
"""How long training stands still for a sharded checkpoint, against a bare copy of the same numbers to main memory.

    .venv/bin/python scripts/measure/sharded_saves.py [TURNS] [RANKS]

A GPT of 26 M parameters with AdamW. In each turn every rank copies its parameters and moments to new memory, and saves; the
two take turns in being first. No save waits for the one before. Prints the medians of rank 0, the median of their ratio over
the turns with the middle half, and how long a step takes while a checkpoint is being written.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from project.sharded.shards import local

ROOT = Path(__file__).parents[2]
BETWEEN = 6  # steps from one turn to the next
WARM_UP = 2  # turns that do not count


class Saves(Callback):
    """Takes the turns, and leaves what it measured: saves.json."""

    def __init__(self) -> None:
        self.turns: list[dict[str, float]] = []
        self.began = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        since = trainer.global_step % BETWEEN
        if self.turns and since in (1, 0):  # the step after a save, while it is written, and the last before the next one
            self.turns[-1]["step beside" if since else "step alone"] = now - self.began
        if since == 0 and trainer.global_step:
            self.turn(trainer)
        self.began = time.perf_counter()

    def turn(self, trainer: Trainer) -> None:
        checkpoints: Any = trainer.checkpoint_callback
        state = [tensor for values in trainer.optimizers[0].state.values() for tensor in values.values()]
        held = [tensor for tensor in (*trainer.lightning_module.state_dict().values(), *state) if isinstance(tensor, Tensor)]

        def copy() -> list[Tensor]:
            return [local(tensor.detach()).to("cpu", copy=True) for tensor in held]

        checkpoints.wait()
        seconds = {}
        moves = [("copy", copy), ("save", lambda: checkpoints.save(trainer))]
        for name, move in moves if len(self.turns) % 2 else reversed(moves):
            if name == "copy":
                checkpoints.wait()
            seconds[name] = timed(move)
        self.turns.append({**seconds, "bytes": sum(local(tensor).nbytes for tensor in held)})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            Path("saves.json").write_text(json.dumps(self.turns))


def timed(move: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    move()
    return time.perf_counter() - began


def main() -> None:
    turns, ranks = map(int, (*sys.argv[1:], *(20, 2)[len(sys.argv) - 1 :]))
    words = (
        *("fit", f"--config={ROOT}/configs/gpt.yaml", "--run=it", "--trainer.strategy=sharded", f"--trainer.devices={ranks}"),
        *("--trainer.accelerator=cpu", "--trainer.threads=1", "--trainer.precision=32-true", "--trainer.limit_val_batches=0"),
        *(f"--trainer.global_batch_size={2 * ranks}", "--data.init_args.batch_size=2", "--data.init_args.context=16"),
        *("--model.init_args.context=16", "--model.init_args.width=512", "--model.init_args.layers=8"),
        *("--checkpoints.every_n_steps=1000000", "--checkpoints.every_n_minutes=.inf", "--checkpoints.monitor=null"),
        f"--trainer.max_steps={BETWEEN * (turns + WARM_UP + 1) + 1}",
        "--trainer.callbacks+=scripts.measure.sharded_saves.Saves",
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "project", *words], cwd=folder, env=environment, check=True, stdout=sys.stderr)
        measured = json.loads((Path(folder) / "saves.json").read_text())[WARM_UP:-1]
    ratios = sorted(turn["save"] / turn["copy"] for turn in measured)
    copy, save = (1e3 * median(turn[name] for turn in measured) for name in ("copy", "save"))
    print(
        f"{ranks} ranks, {measured[0]['bytes'] / 2**20:.0f} MiB on each: a copy takes {copy:.1f} ms, a save {save:.1f} ms; "
        f"{median(ratios):.2f} times ({ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f})"
    )
    beside, alone = (1e3 * median(turn[name] for turn in measured) for name in ("step beside", "step alone"))
    print(f"  a step takes {beside:.0f} ms while it is being written, and {alone:.0f} ms else")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
