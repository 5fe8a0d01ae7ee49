#!/usr/bin/env python
"""What a sharded step costs: ours against the bare loop of bare_fsdp.py; and, over hosts, `node` against `full`.

    .venv/bin/python scripts/measure/sharded_cost.py overhead [TURNS]      two ranks of this machine
    .venv/bin/python scripts/measure/sharded_cost.py hosts [TURNS]         as root, on Linux with iproute2

The hosts are two network namespaces of two ranks each, with a link of 100 Mbit/s between them. Programs take turns. Prints
seconds a step (medians), and how often the one fits into the other: the median over the turns, and their middle half.
"""

import json
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from lightning.fabric.plugins.environments.lightning import find_free_network_port

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.interleaved import Measured, Program, interleaved
from tests.cluster.hosts import Hosts

ROOT = Path(__file__).parents[2]
SLOW = "100mbit"
# layers, heads, width, context, micro-batch, accumulation
LARGE, SMALL = (4, 4, 256, 64, 8, 2), (4, 4, 128, 64, 4, 1)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def fit(name: str, sizes: tuple[int, ...], ranks: int, shard: str = "full") -> tuple[str, ...]:
    layers, heads, width, context, micro_batch, accumulation = sizes
    strategy = json.dumps({"class_path": "project.Sharded", "init_args": {"shard": shard}})
    return (
        *(sys.executable, "-m", "project", "fit", f"--config={ROOT}/configs/gpt.yaml", f"--run={name.replace(' ', '-')}"),
        *("--trainer.accelerator=cpu", "--trainer.threads=1", "--trainer.precision=32-true", "--trainer.max_steps=-1"),
        *("--trainer.max_epochs=1000000", "--trainer.limit_val_batches=0", "--trainer.gradient_clip_val=null"),
        *(f"--trainer.strategy={strategy}", "--checkpoints.monitor=null", "--checkpoints.every_n_steps=1000000"),
        *(f"--trainer.global_batch_size={micro_batch * accumulation * ranks}", f"--data.init_args.batch_size={micro_batch}"),
        *(f"--data.init_args.context={context}", f"--model.init_args.context={context}", f"--model.init_args.width={width}"),
        *(f"--model.init_args.layers={layers}", f"--model.init_args.heads={heads}", f"--trainer.devices={min(ranks, 2)}"),
        "--trainer.callbacks+=scripts.bench.worker.BenchWorker",
    )


def show(title: str, first: Measured, second: Measured) -> None:
    ratios = sorted(1 / ratio for ratio in first.against(second))
    cpu = median(first_cpu / second_cpu for first_cpu, second_cpu in zip(first.cpu, second.cpu, strict=True))
    print(
        f"{title}: {first.step:.3f} s and {second.step:.3f} s a step; {median(ratios):.3f} times "
        f"({ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}), processors {cpu:.3f} times",
        flush=True,
    )
    for name, result in (("the first", first), ("the second", second)):
        phases = ", ".join(f"{at} {1e3 * part:.1f}" for at, part in result.phases.items())
        print(f"  {name}, milliseconds: {phases}", flush=True)


def overhead(turns: int) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
    bare = (sys.executable, str(ROOT / "scripts/measure/bare_fsdp.py"), *map(str, LARGE))
    programs = [
        Program("ours", 2, (fit("ours", LARGE, 2),), ENVIRONMENT),
        Program("bare", 2, (bare, bare), ENVIRONMENT | place),
    ]
    with TemporaryDirectory() as folder:
        measured = interleaved(programs, Path(folder), turns, 2)
    show("ours, and the bare loop", measured["ours"], measured["bare"])


def hosts(turns: int) -> None:
    with TemporaryDirectory() as place, Hosts(2, Path(place)) as two:
        for host in two:
            host.slow(SLOW)
        programs = []
        for shard in ("node", "full"):
            port, commands = find_free_network_port(), []
            for rank in range(4):
                store = (
                    f"MASTER_ADDR={two[0].address}",
                    f"MASTER_PORT={port}",
                    f"NODE_RANK={rank // 2}",
                    f"LOCAL_RANK={rank % 2}",
                )
                enter = (*two[rank // 2].enter(), "env", "--unset=RANK", "--unset=WORLD_SIZE", *store)
                commands.append((*enter, *fit(shard, SMALL, 4, shard), "--trainer.num_nodes=2"))
            programs.append(Program(shard, 4, tuple(commands), ENVIRONMENT))
        measured = interleaved(programs, Path(place), turns, 2)
    show(f"node, and full, {SLOW}", measured["node"], measured["full"])


def main() -> None:
    turns = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    {"overhead": overhead, "hosts": hosts}[sys.argv[1]](turns)


if __name__ == "__main__":
    main()
