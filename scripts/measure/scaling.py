#!/usr/bin/env python
"""How our training scales, in turns: one process, two, two hosts; and what a slow network takes, and what wins it back.

    .venv/bin/python scripts/measure/scaling.py            as root, on Linux with iproute2: the hosts are network namespaces

Every process has one thread. Prints samples/s (median of five turns, and its spread), how often that is the first line's, and
the share of a step that the ranks wait for each other's gradients.
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from lightning.fabric.plugins.environments.lightning import find_free_network_port
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.bench import Comparison
from scripts.bench.interleaved import Program, interleaved
from scripts.bench.report import spread
from tests.cluster.hosts import Hosts

TURNS, STEPS, SLOW = 5, 2, "100mbit"


def on_hosts(program: Program, hosts: Hosts) -> Program:
    """The same program, a rank on each host."""
    port = find_free_network_port()
    commands = []
    for number, host in enumerate(hosts):
        place = ("LOCAL_RANK=0", f"NODE_RANK={number}", f"MASTER_ADDR={hosts[0].address}", f"MASTER_PORT={port}")
        nodes = ("--trainer.devices=1", f"--trainer.num_nodes={len(hosts)}")
        commands.append((*host.enter(), "env", "--unset=RANK", "--unset=WORLD_SIZE", *place, *program.commands[0], *nodes))
    return replace(program, commands=tuple(commands))


def show(title: str, programs: list[Program], samples: list[int], folder: Path) -> None:
    folder.mkdir()
    measured = interleaved(programs, folder, TURNS, STEPS)
    table = Table(title=title, title_justify="left")
    for column in ("", "samples/s", "times the first", "gradient sync"):
        table.add_column(column, justify="right" if column else "left")
    first = measured[programs[0].name]
    for program, count in zip(programs, samples, strict=True):
        result = measured[program.name]
        speeds = [count / seconds for seconds in result.seconds]
        ratio = median(result.against(first)) * count / samples[0]
        share = result.phases["sync"] / sum(result.phases.values())
        table.add_row(program.name, spread(speeds, ",.0f"), f"{ratio:.2f}", f"{share:.0%}")
    Console(width=110).print(table)


def main() -> None:
    if not shutil.which("ip"):
        sys.exit("There is no program ip. HINT: apt-get install iproute2")
    with TemporaryDirectory() as place, Hosts(2, Path(place)) as hosts:
        config = Path(__file__).parents[2] / "configs" / "bench.yaml"
        contest = Comparison(config, Path(place), 64, 50_000, lambda ranks: 0, lambda ranks: 1, 0.0, turns=TURNS, steps=STEPS)
        half, four = "--data.batch_size=32", "--trainer.accumulate_grad_batches=4"
        bf16 = "--trainer.gradient_compression=bf16"

        programs = [
            contest.project("one process", 1),
            contest.project("two processes", 2),
            on_hosts(contest.project("two hosts", 2), hosts),
            contest.project("two processes of half the batch", 2, half),
            on_hosts(contest.project("two hosts of half the batch", 2, half), hosts),
        ]
        show("Weak and strong scaling", programs, [64, 128, 128, 64, 64], Path(place) / "scaling")

        for host in hosts:
            host.slow(SLOW)
        programs = [
            on_hosts(contest.project("gradients in fp32", 2), hosts),
            on_hosts(contest.project("gradients in bf16", 2, bf16), hosts),
            on_hosts(contest.project("accumulation 4", 2, four), hosts),
            on_hosts(contest.project("both", 2, bf16, four), hosts),
        ]
        show(f"Two hosts, and a link of {SLOW}/s between them", programs, [128, 128, 512, 512], Path(place) / "slow")


if __name__ == "__main__":
    main()
