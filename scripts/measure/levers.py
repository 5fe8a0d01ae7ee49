#!/usr/bin/env python
"""What each lever is worth: the same training with and without it, in turns, on this machine.

    .venv/bin/python scripts/measure/levers.py                 all that need no GPU; a quarter of an hour on two cores
    .venv/bin/python scripts/measure/levers.py channels_last   these

Prints samples/s with and without, and the ratio: the median of five turns, and its spread.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from torch.fx.experimental.optimization import fuse

from project.cluster.cores import cores
from project.cluster.memory import keep_freed_memory
from project.model import MiniResNet
from scripts.bench.bench import Comparison
from scripts.bench.interleaved import Program, interleaved
from scripts.bench.report import spread

DDP = "--trainer.strategy=lightning.pytorch.strategies.DDPStrategy"
SETTING = "--trainer.strategy.dict_kwargs"
GIVES_BACK = "import project.cluster.memory as memory; memory.keep_freed_memory = lambda: None"
BY_BLOCK = (
    "import project.model.minires as minires; block = minires.BasicBlock; make = block.__init__; "
    "block.__init__ = lambda self, *given, **named: (make(self, *given, **named), self.compile())[0]"
)
# lever: (processes, what switches it on, what switches it off); code for what no setting does
LEVERS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "bf16": (1, ("--trainer.precision=bf16-mixed",), ("--trainer.precision=32-true",)),
    "channels_last": (1, (), ("--model.channels_last=false",)),
    "channels_last_fp32": (1, ("--trainer.precision=32-true",), ("--trainer.precision=32-true", "--model.channels_last=false")),
    "fused_sgd": (1, ("--model.optimizer.init_args.fused=true",), ("--model.optimizer.init_args.fused=false",)),
    "images_on_the_device": (1, (), ("--data.resident=never", "--data.num_workers=0")),
    "loader_process": (1, ("--data.num_workers=1",), ("--data.num_workers=0",)),
    "freed_memory_kept": (1, (), (GIVES_BACK,)),
    "compile": (1, ("--model.compile=default",), ()),
    "compile_max_autotune": (1, ("--model.compile=max-autotune",), ()),
    "compile_block_by_block": (1, (BY_BLOCK,), ()),
    "gradient_as_bucket_view": (2, (DDP, f"{SETTING}.gradient_as_bucket_view=true"), ()),
    "static_graph": (2, (DDP, f"{SETTING}.static_graph=true"), ()),
    "bucket_of_5_MB": (2, (DDP, f"{SETTING}.bucket_cap_mb=5"), ()),
    "no_broadcast_of_buffers": (2, (), (DDP, f"{SETTING}.broadcast_buffers=true")),
    "gradients_in_bf16": (2, ("--trainer.gradient_compression=bf16",), ()),
}
FOLDING = "folded_batch_norm"
TURNS, STEPS = 5, 3


def program(contest: Comparison, name: str, ranks: int, *words: str) -> Program:
    code = [argument for argument in words if argument.startswith("import ")]
    made = contest.project(name, ranks, *(argument for argument in words if argument not in code))
    if not code:
        return made
    text = "; ".join([*code, "from project.cli.main import main; main()"])
    return replace(made, commands=((sys.executable, "-c", text, *made.commands[0][3:]),))


def folding() -> tuple[str, str, str]:
    """Batch norm folded into the convolutions, which only an evaluation can have."""
    keep_freed_memory()
    network = MiniResNet().to(memory_format=torch.channels_last).eval()
    folded, images = fuse(network), torch.randn(64, 3, 32, 32).to(memory_format=torch.channels_last)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for turn in range(TURNS + 1):
            for name, module in (("with", folded), ("without", network)):
                start = time.perf_counter()
                for _ in range(STEPS):
                    module(images)
                if turn:
                    seconds[name].append((time.perf_counter() - start) / STEPS)
    ratio = [off / on for on, off in zip(*seconds.values(), strict=True)]
    return f"{64 / median(seconds['with']):,.0f}", f"{64 / median(seconds['without']):,.0f}", spread(ratio, ".3f")


def main() -> None:
    chosen = sys.argv[1:] or [*LEVERS, FOLDING]
    table = Table(title="Samples/s in micro-batches of 64, bf16, channels_last", title_justify="left")
    for column in ("lever", "processes", "with", "without", "ratio"):
        table.add_column(column, justify="left" if column == "lever" else "right")
    with TemporaryDirectory() as place:
        contest = Comparison(
            config=Path(__file__).parents[2] / "configs" / "bench.yaml",
            folder=Path(place),
            batch_size=64,
            images=50_000,
            workers=lambda ranks: 0,
            threads=cores,
            flops=0.0,
            turns=TURNS,
            steps=STEPS,
        )
        for name in chosen:
            if name == FOLDING:
                table.add_row("folded batch norm, in evaluation", "1", *folding())
                continue
            ranks, on, off = LEVERS[name]
            programs = [program(contest, "with", ranks, *on), program(contest, "without", ranks, *off)]
            folder = Path(place) / name
            folder.mkdir()
            measured = interleaved(programs, folder, TURNS, STEPS)
            ratio = measured["with"].against(measured["without"])
            speeds = [f"{64 * ranks / measured[way].step:,.0f}" for way in ("with", "without")]
            table.add_row(name.replace("_", " "), str(ranks), *speeds, spread(ratio, ".3f"))
            print(name, *speeds, spread(ratio, ".3f"), file=sys.stderr)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
