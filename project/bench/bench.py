"""The benchmark: our training against the loop of project/bench/plain_ddp.py, with the same network, batch and ranks.

Three programs take turns for each number of ranks: the plain loop, ours in fp32 with the plain loop's memory format, and ours
as the config has it. Two more show what the framework alone costs, and two loaders what the data alone does.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from project.bench.interleaved import Measured, Program, interleaved
from project.bench.worker import load

PLAIN, SAME, OURS = "plain", "ours in fp32", "ours"
PLAIN_LOOP = Path(__file__).with_name("plain_ddp.py")
_FRAMEWORK_STEPS = 60  # times as many as of the real thing: they are short


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how long."""

    config: Path
    folder: Path
    batch_size: int
    images: int
    workers: Callable[[int], int]  # loader processes of each of so many ranks
    threads: Callable[[int], int]
    flops: float  # of a sample, forwards and backwards
    turns: int
    steps: int

    def plain(self, ranks: int, *words: str) -> Program:
        command = (
            sys.executable,
            "-m",
            "project.bench.worker",
            str(PLAIN_LOOP),
            "--epochs=1000000",
            f"--size={self.images}",
            *words,
        )
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())} if ranks > 1 else {}
        return Program(PLAIN, ranks, (command,) * ranks, {**self._environment(ranks), **rendezvous})

    def ours(self, name: str, ranks: int, *words: str) -> Program:
        command = (
            *(sys.executable, "-m", "project", "fit", f"--config={self.config}", f"--run={name.replace(' ', '-')}-{ranks}"),
            *(f"--trainer.devices={ranks}", "--trainer.num_nodes=1", "--trainer.max_epochs=1000000", "--trainer.max_steps=-1"),
            *("--trainer.limit_val_batches=0", "--data.global_batch_size=null", "--trainer.accumulate_grad_batches=1"),
            "--trainer.fingerprints=false",  # the plain loop takes none
            *("--trainer.callbacks+=project.bench.worker.BenchWorker", *words),
        )
        return Program(name, ranks, (command,), self._environment(ranks))

    def _environment(self, ranks: int) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        return {"OMP_NUM_THREADS": str(self.threads(ranks)), "PYTHONPATH": path}


@dataclass
class Round:
    """The programs that took turns on so many ranks, and the matrix product that took its turn with them."""

    ranks: int
    batch_size: int
    programs: dict[str, Measured]
    peaks: dict[str, float] = field(default_factory=dict)  # FLOP/s of this machine, by data type

    def speed(self, name: str) -> float:
        """Samples a second."""
        return self.batch_size * self.ranks / self.programs[name].step


def training(comparison: Comparison, ranks: int, dtypes: Sequence[torch.dtype]) -> Round:
    batch, workers = f"{comparison.batch_size}", f"{comparison.workers(ranks)}"
    programs = [
        comparison.plain(ranks, "--batch-size", batch, "--workers", workers),
        comparison.ours(SAME, ranks, "--trainer.precision=32-true", "--model.channels_last=false"),
        comparison.ours(OURS, ranks),
    ]
    peaks: dict[str, list[float]] = {str(dtype).removeprefix("torch."): [] for dtype in dtypes}

    def product() -> None:
        for dtype in dtypes:
            peaks[str(dtype).removeprefix("torch.")].append(peak(dtype))

    measured = interleaved(programs, comparison.folder, comparison.turns, comparison.steps, product)
    return Round(ranks, comparison.batch_size, measured, {name: max(values) for name, values in peaks.items()})


def framework(comparison: Comparison, ranks: int) -> Round:
    """A network that is nothing, on images that are nothing: what is left of a step."""
    small = ("--data.source.init_args.image_size=8", "--data.batch_size=2", "--data.crop_padding=0")
    programs = [
        comparison.plain(ranks, "--trivial", "--batch-size=2"),
        comparison.ours(OURS, ranks, "--model.network=project.bench.worker.Trivial", "--trainer.precision=32-true", *small),
    ]
    measured = interleaved(programs, comparison.folder, comparison.turns, comparison.steps * _FRAMEWORK_STEPS)
    return Round(ranks, 2, measured)


def loading(comparison: Comparison, ours: Callable[[], Iterator[int]]) -> dict[str, list[float]]:
    """Samples a second of one core, from the loader to the batch that is ready on the device; no network."""
    plain = load(str(PLAIN_LOOP))
    args = plain.arguments().parse_args([f"--size={comparison.images}", f"--batch-size={comparison.batch_size}"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def theirs() -> Iterator[int]:
        for images, labels in plain.loader_of(args):
            images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            yield len(labels)

    speeds: dict[str, list[float]] = {PLAIN: [], OURS: []}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(comparison.turns + 1):
            for name, batches in ((PLAIN, theirs), (OURS, ours)):
                speed = _pace(batches())
                if number:
                    speeds[name].append(speed)
    finally:
        torch.set_num_threads(threads)
    return speeds


def _pace(batches: Iterator[int], seconds: float = 0.5) -> float:
    next(batches)
    start, samples = time.perf_counter(), 0
    for count in batches:
        samples += count
        if time.perf_counter() - start > seconds:
            break
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return samples / (time.perf_counter() - start)


def peak(dtype: torch.dtype, repeats: int = 3) -> float:
    """FLOP/s of a matrix product, on all of this machine's cores or on its first GPU; the best of a few."""
    cuda = torch.cuda.is_available()
    size = 8192 if cuda else 2048
    left, right = (torch.randn(size, size, device="cuda" if cuda else "cpu").to(dtype) for _ in range(2))
    best = float("inf")
    for number in range(repeats + 1):
        start = time.perf_counter()
        torch.mm(left, right)
        if cuda:
            torch.cuda.synchronize()
        if number:
            best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def results(rounds: Sequence[Round], alone: Round, loaders: dict[str, list[float]], comparison: Comparison) -> dict[str, Any]:
    """Everything that was measured, for JSON."""
    return {
        "batch_size": comparison.batch_size,
        "turns": comparison.turns,
        "steps": comparison.steps,
        "training": [_training_results(one, comparison.flops) for one in rounds],
        "framework": {
            "ranks": alone.ranks,
            "us_a_step": {name: 1e6 * value.step for name, value in alone.programs.items()},
            "us_more": [
                1e6 * (ours - plain)
                for ours, plain in zip(alone.programs[OURS].seconds, alone.programs[PLAIN].seconds, strict=True)
            ],
            "phases_us": {
                name: {phase: 1e6 * value for phase, value in one.phases.items()} for name, one in alone.programs.items()
            },
        },
        "loading": {
            "samples_per_s": loaders,
            "ratio": [ours / plain for ours, plain in zip(loaders[OURS], loaders[PLAIN], strict=True)],
        },
    }


def _training_results(one: Round, flops: float) -> dict[str, Any]:
    return {
        "ranks": one.ranks,
        "peak_flops": one.peaks,
        "programs": {
            name: {
                "samples_per_s": [one.batch_size * one.ranks / value for value in measured.seconds],
                "ratio": measured.against(one.programs[PLAIN]),
                "cpu_s_per_1000": 1e3 * median(measured.cpu) / (one.batch_size * one.ranks),
                "peak_memory": measured.memory,
                "phases_ms": {phase: 1e3 * value for phase, value in measured.phases.items()},
                "flops": flops * one.speed(name),
            }
            for name, measured in one.programs.items()
        },
    }
