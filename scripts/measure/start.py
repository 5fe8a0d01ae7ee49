#!/usr/bin/env python
"""From the command to the end of a run of one step: seconds, beside the plain PyTorch loop, in turns.

    .venv/bin/python scripts/measure/start.py

Prints the median of five turns of each, after one that is left out.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TURNS = 5
ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("--config", str(ROOT / "configs/ddp.yaml"), "--trainer.max_steps=1", "--trainer.limit_val_batches=0"),
    *("--model.network.init_args.widths=[8]", "--model.network.init_args.blocks=1", "--trainer.accelerator=cpu"),
)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
PROGRAMS = {
    "one process": ("-m", "project", "fit", *SMALL, "--trainer.devices=1"),
    "two processes": ("-m", "project", "fit", *SMALL, "--trainer.devices=2"),
    "torchrun, two processes": (*TORCHRUN, "-m", "project", "--", "fit", *SMALL),
    "the plain loop under torchrun, two processes": (
        *(*TORCHRUN, str(ROOT / "scripts/bench/plain_ddp.py"), "--epochs=1", "--size=16", "--batch-size=8"),
    ),
}


def main() -> None:
    taken: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(TURNS + 1):
            for name, words in PROGRAMS.items():
                start = time.perf_counter()
                subprocess.run([sys.executable, *words], cwd=folder, check=True, capture_output=True)
                taken[name].append(time.perf_counter() - start)
    for name, (_, *seconds) in taken.items():
        print(f"{name:<46}{statistics.median(seconds):5.1f} s  ({min(seconds):.1f} to {max(seconds):.1f})")


if __name__ == "__main__":
    main()
