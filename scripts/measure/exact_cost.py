#!/usr/bin/env python
"""What trainer.exact costs in a step: runs with it and without, in turns.

    .venv/bin/python scripts/measure/exact_cost.py                 MiniResNet and the GPT, on one and on two processes
    .venv/bin/python scripts/measure/exact_cost.py gpt 2           one of them

Prints milliseconds a step (the median over the turns of the medians over a run's steps), their ratio and its spread, and the
bytes that a rank sends in a step. Each rank computes with one thread, with and without.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

TURNS, STEPS, WARM_UP = 5, 14, 4
RUNS = {
    "minires": (
        *("--config=configs/ddp.yaml", "--data.num_workers=0", "--data.batch_size=16", "--data.global_batch_size=32"),
        *("--data.source.init_args.train_size=2000", "--data.source.init_args.val_size=64"),
    ),
    "gpt": ("--config=configs/gpt.yaml", "--trainer.global_batch_size=32"),
}


def measure(words: list[str]) -> None:
    """In a process of its own: prints the median of its steps' seconds."""
    from lightning.pytorch import Callback

    from project.cli import main

    class Times(Callback):
        def __init__(self) -> None:
            self.begun: list[float] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % trainer.accumulate_grad_batches == 0:
                self.begun.append(time.perf_counter())

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                times = [after - before for before, after in pairwise(self.begun)][WARM_UP:]
                print("seconds", statistics.median(times), flush=True)

    import project.callbacks

    before = project.callbacks.with_ours
    import project.trainer

    project.trainer.with_ours = lambda given, *others: [*before(given, *others), Times()]
    sys.argv = ["project", "fit", *words]
    main()


def seconds(name: str, ranks: int, exact: bool) -> float:
    words = [
        *(*RUNS[name], f"--trainer.exact={exact}".lower(), "--trainer.threads=1", "--trainer.accelerator=cpu"),
        *(f"--trainer.max_steps={STEPS + WARM_UP}", "--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0"),
        "--trainer.log_every_n_steps=10", "--checkpoints.monitor=null", f"--trainer.devices={ranks}",
    ]  # fmt: skip
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        here = os.getcwd()
        words = [word.replace("--config=", f"--config={here}/") for word in words] + [f"--trainer.default_root_dir={folder}"]
        done = subprocess.run(
            [*start, os.path.abspath(__file__), "--child", *words], cwd=folder, text=True, capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": here},
        )  # fmt: skip
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("seconds ")]
    assert found, done.stdout + done.stderr
    return float(found[0])


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        measure(sys.argv[2:])
        return
    names = sys.argv[1:2] or list(RUNS)
    for name in names:
        for ranks in [int(one) for one in sys.argv[2:3]] or [1, 2]:
            turns = [(seconds(name, ranks, False), seconds(name, ranks, True)) for _ in range(TURNS)]
            plain, exact = (statistics.median(times) for times in zip(*turns, strict=True))
            ratios = sorted(exact / plain for plain, exact in turns)
            print(
                f"{name:8} {ranks} rank(s): {1e3 * plain:6.1f} ms, exact {1e3 * exact:6.1f} ms, ratio "
                f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
