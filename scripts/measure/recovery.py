#!/usr/bin/env python
"""From SIGKILL of a rank to the end of the first new step: ranks that a supervisor replaces, against torchrun's restarts.

    .venv/bin/python scripts/measure/recovery.py [RANKS] [KILLS]

They take turns of two kills each, seconds after a start, on MiniResNet of configs/ddp.yaml with small images, on the CPU,
a thread for each rank.
Prints medians (and the least and the most), and how many steps were taken again.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

ROOT = Path(__file__).resolve().parents[2]
KILLS_IN_A_TURN = 2
SPARES_AFTER = 3.0  # seconds after a start: by then its spare ranks are there
WORDS = (
    *("fit", f"--config={ROOT}/configs/ddp.yaml", "--run=it", "--trainer.accelerator=cpu", "--trainer.threads=1"),
    *("--data.source.init_args.image_size=8", "--data.source.init_args.train_size=25600", "--data.num_workers=0"),
    *("--model.network.init_args.widths=[8,16]", "--model.network.init_args.blocks=1", "--trainer.precision=32-true"),
    *("--trainer.max_epochs=1000000", "--trainer.limit_val_batches=0", "--trainer.log_every_n_steps=1"),
    "--trainer.callbacks+=scripts.measure.recovery.Steps",
)


class Steps(Callback):
    """Notes when each step of rank 0 has ended, and the process of each rank."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Path(f"rank-{trainer.global_rank}").write_text(str(os.getpid()))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            with Path("steps").open("a") as file:
                file.write(f"{time.time()} {trainer.global_step} {os.getpid()}\n")


def steps(folder: Path) -> list[tuple[float, int, int]]:
    """Returns when each step ended, its number, and the process of rank 0."""
    lines = (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []
    return [(float(words[0]), int(words[1]), int(words[2])) for line in lines if len(words := line.split()) == 3]


def kills(folder: Path, program: subprocess.Popen[bytes], ranks: int) -> Iterator[tuple[float, int]]:
    """Kills ranks at random; yields the seconds until the first new step has ended, and how many steps are taken again."""
    seen = 0
    for _ in range(KILLS_IN_A_TURN):
        while len(taken := steps(folder)) < seen + random.randint(15, 40) or time.time() < taken[seen][0] + SPARES_AFTER:
            assert program.poll() is None, (folder / "output").read_text()
            time.sleep(0.01)
        before, process = steps(folder), int((folder / f"rank-{random.randrange(ranks)}").read_text())
        struck = time.time()
        os.kill(process, signal.SIGKILL)
        while not (after := [step for step in steps(folder)[len(before) :] if step[2] != before[-1][2]]):
            assert program.poll() is None, (folder / "output").read_text()
            time.sleep(0.005)
        seen = len(steps(folder))
        yield after[0][0] - struck, before[-1][1] - after[0][1] + 1


def main() -> None:
    ranks, number = (int(word) for word in [*sys.argv[1:], "2", "10"][:2])
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    programs = {
        "supervised, plain Python": ("-m", "project", *WORDS, f"--trainer.devices={ranks}", "--recover.restarts=100"),
        "supervised, torchrun": (*torchrun, "-m", "project", "--", *WORDS, "--recover.restarts=100"),
        "torchrun's restarts": (
            *torchrun,
            "--max-restarts=100",
            "-m",
            "project",
            "--",
            *WORDS,
            "--checkpoints.every_n_steps=10",
        ),
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in programs}
    batch = f"--data.global_batch_size={16 * ranks * 2}"
    for _ in range(-(-number // KILLS_IN_A_TURN)):
        for name, words in programs.items():
            with tempfile.TemporaryDirectory() as place, Path(place, "output").open("w") as output:
                command = [sys.executable, *words, batch]
                program = subprocess.Popen(command, cwd=place, env=environment, stdout=output, stderr=output)
                taken[name] += kills(Path(place), program, ranks)
                program.terminate()
                program.wait()
    for name, found in taken.items():
        seconds = [second for second, _ in found]
        again = statistics.median(count for _, count in found)
        print(
            f"{name:<26}{statistics.median(seconds):5.2f} s  ({min(seconds):.2f} to {max(seconds):.2f}), {again:g} steps again"
        )


if __name__ == "__main__":
    main()
