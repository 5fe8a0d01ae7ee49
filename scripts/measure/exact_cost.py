#!/usr/bin/env python
"""What trainer.exact costs in a step: with it and without, in turns.

    .venv/bin/python scripts/measure/exact_cost.py [minires|gpt] [TURNS]

On one process and on two; as root on Linux with iproute2 also on two hosts (network namespaces), and with a link of 100 Mbit/s
between them. Each rank computes with one thread. Prints milliseconds a step (medians), how often the step without it fits into
the one with it (by time, and by the processors' time), and the memory at the peak.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from lightning.fabric.plugins.environments.lightning import find_free_network_port

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench.interleaved import Program, interleaved
from tests.cluster.hosts import Hosts

ROOT = Path(__file__).parents[2]
STEPS, SLOW = 2, "100mbit"
RUNS = {
    # 32 samples a step, in micro-batches of 16
    "minires": (
        f"--config={ROOT}/configs/ddp.yaml",
        "--data.num_workers=0",
        "--data.batch_size=16",
        "--data.global_batch_size=32",
    ),
    "gpt": (f"--config={ROOT}/configs/gpt.yaml", "--trainer.global_batch_size=32"),
}


def program(name: str, words: tuple[str, ...], ranks: int, hosts: Hosts | None = None) -> Program:
    command = (
        *(sys.executable, "-m", "project", "fit", *words, f"--run={name.replace(' ', '-')}", "--trainer.threads=1"),
        *(
            "--trainer.accelerator=cpu",
            "--trainer.max_epochs=1000000",
            "--trainer.max_steps=-1",
            "--trainer.limit_val_batches=0",
        ),
        *(f"--trainer.devices={ranks}", "--checkpoints.monitor=null"),
        "--trainer.callbacks+=scripts.bench.worker.BenchWorker",
    )
    made = Program(name, ranks, (command,), {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    if hosts is None:
        return made
    port, commands = find_free_network_port(), []
    for number, host in enumerate(hosts):
        place = ("LOCAL_RANK=0", f"NODE_RANK={number}", f"MASTER_ADDR={hosts[0].address}", f"MASTER_PORT={port}")
        nodes = ("--trainer.devices=1", f"--trainer.num_nodes={len(hosts)}")
        commands.append((*host.enter(), "env", "--unset=RANK", "--unset=WORLD_SIZE", *place, *command, *nodes))
    return replace(made, commands=tuple(commands))


def show(title: str, words: tuple[str, ...], ranks: int, turns: int, hosts: Hosts | None = None) -> None:
    with TemporaryDirectory() as folder:
        programs = [
            program(name, (*words, f"--trainer.exact={name == 'exact'}".lower()), ranks, hosts) for name in ("plain", "exact")
        ]
        measured = interleaved(programs, Path(folder), turns, STEPS)
    plain, exact = measured["plain"], measured["exact"]
    ratios = sorted(1 / ratio for ratio in exact.against(plain))
    cpu = sorted(exact_cpu / plain_cpu for plain_cpu, exact_cpu in zip(plain.cpu, exact.cpu, strict=True))
    print(
        f"{title:28} {1e3 * plain.step:6.1f} ms, exact {1e3 * exact.step:6.1f} ms: {median(ratios):.3f} times "
        f"({ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}), processors {median(cpu):.3f} times; "
        f"memory {plain.memory / 2**20:.0f} MiB, exact {exact.memory / 2**20:.0f} MiB",
        flush=True,
    )


def main() -> None:
    names = [sys.argv[1]] if len(sys.argv) > 1 else list(RUNS)
    turns = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    for name in names:
        show(f"{name}, one process", RUNS[name], 1, turns)
        show(f"{name}, two processes", RUNS[name], 2, turns)
    if os.geteuid():
        return
    for name in names:
        with TemporaryDirectory() as place, Hosts(2, Path(place)) as hosts:
            show(f"{name}, two hosts", RUNS[name], 2, turns, hosts)
            for host in hosts:
                host.slow(SLOW)
            show(f"{name}, two hosts, 100 Mbit/s", RUNS[name], 2, turns, hosts)


if __name__ == "__main__":
    main()
