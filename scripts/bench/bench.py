"""The benchmark: our training against the loop of scripts/bench/plain_ddp.py, with the same network, batch and ranks.

Programs take turns for each number of ranks: the plain loop in fp32, ours in fp32 with the plain loop's memory format, and ours
as the config has it; where that computes in 16 bits, the plain loop does so beside it. Two more show what the framework alone
costs, and two loaders what the data alone does.
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

from project.errors import UserError
from scripts.bench.clock import clock
from scripts.bench.interleaved import Measured, Program, interleaved
from scripts.bench.worker import load

PLAIN, SAME, OURS = "plain", "ours in fp32", "ours"
PLAIN_LOOP = Path(__file__).with_name("plain_ddp.py")
_FRAMEWORK_STEPS = 60  # times as many as of the real thing: they are short
_LEAST = 0.5  # seconds of a turn: five steps of a GPU are over in ten milliseconds
_SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def plain_in(precision: str) -> str:
    """What the plain loop is called in the table."""
    return f"{PLAIN} in {precision}"


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

    def plain(self, ranks: int, precision: str, *words: str, name: str | None = None) -> Program:
        command = (
            sys.executable,
            "-m",
            "scripts.bench.worker",
            str(PLAIN_LOOP),
            "--epochs=1000000",
            f"--size={self.images}",
            f"--precision={precision}",
            *words,
        )
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())} if ranks > 1 else {}
        return Program(name or plain_in(precision), ranks, (command,) * ranks, {**self._environment(ranks), **rendezvous})

    def project(self, name: str, ranks: int, *words: str) -> Program:
        command = (
            *(sys.executable, "-m", "project", "fit", f"--config={self.config}", f"--run={name.replace(' ', '-')}-{ranks}"),
            *(f"--trainer.devices={ranks}", "--trainer.num_nodes=1", "--trainer.max_epochs=1000000", "--trainer.max_steps=-1"),
            *("--trainer.limit_val_batches=0", "--data.global_batch_size=null", "--trainer.accumulate_grad_batches=1"),
            "--trainer.fingerprints=false",  # the plain loop takes none
            *("--trainer.callbacks+=scripts.bench.worker.BenchWorker", *words),
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
    peaks: dict[str, float] = field(default_factory=dict)  # FLOP/s of this machine, by precision

    def speed(self, name: str) -> float:
        """Samples a second."""
        return self.batch_size * self.ranks / self.programs[name].step


def training(comparison: Comparison, ranks: int, dtypes: Sequence[torch.dtype]) -> Round:
    """Measures on so many ranks; `dtypes` are fp32 and, where the config computes in another, that."""
    precisions = [_SHORT[dtype] for dtype in dtypes]
    words = ("--batch-size", f"{comparison.batch_size}", "--workers", f"{comparison.workers(ranks)}")
    plain = [comparison.plain(ranks, precision, *words) for precision in precisions]
    same = comparison.project(SAME, ranks, "--trainer.precision=32-true", "--model.channels_last=false")
    programs = [plain[0], same, *plain[1:], comparison.project(OURS, ranks)]
    peaks: dict[str, list[float]] = {precision: [] for precision in precisions}

    def product() -> None:
        for dtype in dtypes:
            peaks[_SHORT[dtype]].append(peak(dtype))

    measured = interleaved(programs, comparison.folder, comparison.turns, comparison.steps, product, _LEAST)
    compute_alike(measured)
    return Round(ranks, comparison.batch_size, measured, {name: max(values) for name, values in peaks.items()})


def compute_alike(measured: dict[str, Measured]) -> None:
    """Refuses to compare TF32 with fp32."""
    ways = {str(program.fp32): name for name, program in measured.items()}
    if len(ways) > 1:
        listing = "; ".join(f"{name}: {way}" for way, name in ways.items())
        raise UserError(f"The programs compute otherwise in fp32, so their speeds don't compare: {listing}.")


def framework(comparison: Comparison, ranks: int) -> Round:
    """A network that is nothing, on images that are nothing: what is left of a step."""
    small = ("--data.source.init_args.image_size=8", "--data.batch_size=2", "--data.crop_padding=0")
    programs = [
        comparison.plain(ranks, "fp32", "--trivial", "--batch-size=2", name=PLAIN),
        comparison.project(OURS, ranks, "--model.network=scripts.bench.worker.Trivial", "--trainer.precision=32-true", *small),
    ]
    measured = interleaved(programs, comparison.folder, comparison.turns, comparison.steps * _FRAMEWORK_STEPS, None, _LEAST)
    return Round(ranks, 2, measured)


def loading(comparison: Comparison, project_batches: Callable[[], Iterator[int]]) -> dict[str, list[float]]:
    """Samples a second of one core, from the loader to the batch that is ready on the device; no network."""
    plain = load(str(PLAIN_LOOP))
    args = plain.arguments().parse_args([f"--size={comparison.images}", f"--batch-size={comparison.batch_size}"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def plain_batches() -> Iterator[int]:
        for images, labels in plain.loader_of(args):
            images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            yield len(labels)

    speeds: dict[str, list[float]] = {PLAIN: [], OURS: []}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(comparison.turns + 1):
            for name, batches in ((PLAIN, plain_batches), (OURS, project_batches)):
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
    """FLOP/s of a matrix product, on all of this machine's cores or on its first GPU; the best of a few.

    On a GPU several are timed in a row, so that the time of a launch and of a wait is in none of them; and where convolutions
    may compute in TF32 this product does, too, or the share that is taken of it could be more than the whole.
    """
    cuda = torch.cuda.is_available()
    size, row, device = (8192, 10, "cuda") if cuda else (2048, 1, "cpu")
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    times, before = clock(), torch.get_float32_matmul_precision()
    best = float("inf")
    if cuda and torch.backends.cudnn.allow_tf32:
        torch.set_float32_matmul_precision("high")
    try:
        for number in range(repeats + 1):
            start = times.now()
            for _ in range(row):
                torch.mm(left, right)
            end = times.now()
            times.wait(end)
            if number:
                best = min(best, times.seconds(start, end) / row)
    finally:
        torch.set_float32_matmul_precision(before)
    return 2 * size**3 / best


def results(rounds: Sequence[Round], alone: Round, loaders: dict[str, list[float]], comparison: Comparison) -> dict[str, Any]:
    """Everything that was measured, for JSON."""
    return {
        "batch_size": comparison.batch_size,
        "turns": comparison.turns,
        "steps": comparison.steps,
        "training": [_training_results(round_, comparison.flops) for round_ in rounds],
        "framework": {
            "ranks": alone.ranks,
            "steps": {name: value.steps for name, value in alone.programs.items()},
            "us_a_step": {name: 1e6 * value.step for name, value in alone.programs.items()},
            "us_more": [
                1e6 * (project - plain)
                for project, plain in zip(alone.programs[OURS].seconds, alone.programs[PLAIN].seconds, strict=True)
            ],
            "phases_us": {
                name: {phase: 1e6 * value for phase, value in program.phases.items()}
                for name, program in alone.programs.items()
            },
        },
        "loading": {
            "samples_per_s": loaders,
            "ratio": [project / plain for project, plain in zip(loaders[OURS], loaders[PLAIN], strict=True)],
        },
    }


def _training_results(round_: Round, flops: float) -> dict[str, Any]:
    programs = {
        name: {
            "samples_per_s": [round_.batch_size * round_.ranks / value for value in measured.seconds],
            "steps": measured.steps,
            "ratio": measured.against(round_.programs[plain_in("fp32")]),
            "cpu_s_per_1000": 1e3 * median(measured.cpu) / (round_.batch_size * round_.ranks),
            "peak_memory": measured.memory,
            "phases_ms": {phase: 1e3 * value for phase, value in measured.phases.items()},
            "flops": flops * round_.speed(name),
        }
        for name, measured in round_.programs.items()
    }
    # Like beside like: ours as the config has it against the plain loop in its precision.
    for precision in (name for name in round_.peaks if name != "fp32"):
        for name in (plain_in(precision), OURS):
            programs[name][f"ratio_in_{precision}"] = round_.programs[name].against(round_.programs[plain_in(precision)])
    return {
        "ranks": round_.ranks,
        "fp32": round_.programs[OURS].fp32,
        "peak_flops": round_.peaks,
        "programs": programs,
    }
