#!/usr/bin/env python
"""What each lever is worth: the same training with and without it, in turns, on this machine.

    .venv/bin/python scripts/levers.py                 all that need no GPU; a quarter of an hour on two cores
    .venv/bin/python scripts/levers.py channels_last   these

Prints samples/s with and without, and the ratio: the median of five turns, and its spread.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from project.bench.bench import Contest
from project.bench.report import spread
from project.bench.turns import in_turns
from project.cluster.cores import cores

DDP = "--trainer.strategy=lightning.pytorch.strategies.DDPStrategy"
SETTING = "--trainer.strategy.dict_kwargs"
# lever: (processes, what switches it on, what switches it off)
LEVERS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "bf16": (1, ("--trainer.precision=bf16-mixed",), ("--trainer.precision=32-true",)),
    "channels_last": (1, (), ("--model.channels_last=false",)),
    "channels_last_fp32": (1, ("--trainer.precision=32-true",), ("--trainer.precision=32-true", "--model.channels_last=false")),
    "fused_sgd": (1, ("--model.optimizer.init_args.fused=true",), ("--model.optimizer.init_args.fused=false",)),
    "loader_process": (1, ("--data.num_workers=1",), ("--data.num_workers=0",)),
    "compile": (1, ("--model.compile=default",), ()),
    "gradient_as_bucket_view": (2, (DDP, f"{SETTING}.gradient_as_bucket_view=true"), ()),
    "static_graph": (2, (DDP, f"{SETTING}.static_graph=true"), ()),
    "bucket_of_5_MB": (2, (DDP, f"{SETTING}.bucket_cap_mb=5"), ()),
    "no_broadcast_of_buffers": (2, (), (DDP, f"{SETTING}.broadcast_buffers=true")),
    "gradients_in_bf16": (2, ("--trainer.gradient_compression=bf16",), ()),
}
TURNS, STEPS = 5, 3


def main() -> None:
    chosen = sys.argv[1:] or list(LEVERS)
    table = Table(title="Samples/s in micro-batches of 64, bf16, channels_last", title_justify="left")
    for column in ("lever", "processes", "with", "without", "ratio"):
        table.add_column(column, justify="left" if column == "lever" else "right")
    with TemporaryDirectory() as place:
        contest = Contest(
            config=Path(__file__).parents[1] / "configs" / "bench.yaml",
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
            ranks, on, off = LEVERS[name]
            programs = [contest.ours("with", ranks, *on), contest.ours("without", ranks, *off)]
            folder = Path(place) / name
            folder.mkdir()
            measured = in_turns(programs, folder, TURNS, STEPS)
            ratio = measured["with"].against(measured["without"])
            speeds = [f"{64 * ranks / measured[one].step:,.0f}" for one in ("with", "without")]
            table.add_row(name.replace("_", " "), str(ranks), *speeds, spread(ratio, ".3f"))
            print(name, *speeds, spread(ratio, ".3f"), file=sys.stderr)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
