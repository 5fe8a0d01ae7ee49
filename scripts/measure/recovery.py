#!/usr/bin/env python
"""From SIGKILL of a rank to the end of the first new step: ranks that a supervisor replaces, against torchrun's restarts.

    .venv/bin/python scripts/measure/recovery.py [RANKS] [KILLS] [--run minires|own|sharded] [--by plain ...] [WORDS]

They take turns of two kills each, seconds after a start, on the CPU, a thread for each rank. The runs: MiniResNet with small
images; a user's own module with torchmetrics; a sharded GPT. `plain` is plain Python; `srun` is a real Slurm (as root) with all
ranks on one node; under `nodes` each has its own; `ray` has a cluster on this machine; `restarts` are torchrun's. Other words
(--recover.every_n_steps=1) go to all. Prints medians, the least and the most, and the steps taken again.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

KILLS_IN_A_TURN = 2
SPARES_AFTER = 4.0  # seconds after a start: by then its spare ranks are there, and have imported the user's code
LONG = (
    *("--trainer.max_epochs=1000000", "--trainer.threads=1", "--trainer.limit_val_batches=0"),
    "--trainer.callbacks+=scripts.measure.recovery.Steps",
)
BATCH = {"minires": 32, "own": 12, "sharded": 12}  # samples of a rank behind a step
WORDS = {  # added to those of tests/survive/test_recovery.py
    "minires": ("--data.source.init_args.train_size=25600", "--data.batch_size=16", "--data.global_batch_size={}"),
    "own": ("--data.size=24000", "--trainer.global_batch_size={}"),
    "sharded": ("--trainer.max_steps=1000000", "--trainer.global_batch_size={}"),
}


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


@contextmanager
def started(words: Sequence[str], place: Path, ranks: int) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a program, and ends it."""
    from tests.cluster.slurm import Slurm  # here and in main: ranks, which load this file for Steps, do without
    from tests.conftest import environment

    variables = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    with ExitStack() as stack, (place / "output").open("w") as output:
        if words[0] == "srun":
            (place / "slurm").mkdir()
            slurm = stack.enter_context(Slurm(ranks, place / "slurm"))
            variables |= {"SLURM_CONF": str(slurm.folder / "slurm.conf"), "GLOO_SOCKET_IFNAME": "eth0"}
            program = slurm.hosts[0].start(words, output, place, variables)
        else:
            program = subprocess.Popen(words, cwd=place, env=variables, stdout=output, stderr=output)
        yield program
        program.terminate()
        program.wait()


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.own import write_texts
    from tests.survive.test_recovery import RUNS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="?", type=int, default=2)
    parser.add_argument("kills", nargs="?", type=int, default=4)
    parser.add_argument("--run", choices=WORDS, default="minires")
    parser.add_argument("--by", nargs="+", default=["plain", "torchrun", "restarts"])
    given, rest = parser.parse_known_args()
    ranks, python, project = given.ranks, sys.executable, ("-m", "project")
    words = (*RUNS[given.run], *LONG, *(argument.format(BATCH[given.run] * ranks) for argument in WORDS[given.run]), *rest)
    supervised = (*words, "--recover.restarts=100")
    torchrun = (python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    programs = {
        "plain": (python, *project, *supervised, f"--trainer.devices={ranks}"),
        "torchrun": (*torchrun, *project, "--", *supervised),
        "srun": ("srun", "--nodes=1", f"--ntasks-per-node={ranks}", python, *project, *supervised),
        "nodes": ("srun", f"--nodes={ranks}", "--ntasks-per-node=1", python, *project, *supervised),
        "ray": (python, *project, "ray", *supervised, f"--workers={ranks}"),
        "restarts": (*torchrun, "--max-restarts=100", *project, "--", *words, "--checkpoints.every_n_steps=10"),
    }
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in given.by}
    for _ in range(-(-given.kills // KILLS_IN_A_TURN)):
        for name in given.by:
            with tempfile.TemporaryDirectory() as folder:
                write_texts(Path(folder, "texts"), 1024)
                (place := Path(folder, "run")).mkdir()
                with started(programs[name], place, ranks) as program:
                    taken[name] += kills(place, program, ranks)
    for name, recoveries in taken.items():
        seconds, repeated = zip(*recoveries, strict=True)
        print(
            f"{given.run}, {ranks} ranks, {name:<9}{statistics.median(seconds):5.2f} s  "
            f"({min(seconds):.2f} to {max(seconds):.2f}), {statistics.median(repeated):g} steps again (at most {max(repeated)})"
        )


if __name__ == "__main__":
    main()
