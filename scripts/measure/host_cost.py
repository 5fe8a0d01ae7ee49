#!/usr/bin/env python
"""What a step on a GPU costs the host: ours, ours as a graph, and the plain loop, in turns, on the stand-in for a GPU.

    python scripts/measure/host_cost.py            five turns of 60 steps each, batch 64, fp16, one GPU

Kernels are left undone, and so the milliseconds are the host's alone: CPU time of the main thread, a step. No GPU is used.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST, LAST, TURNS = 20, 80, 5
OURS = (
    *("fit", f"--config={ROOT}/configs/bench.yaml", "--run=it", "--trainer.accelerator=gpu", "--trainer.devices=1"),
    *("--trainer.precision=16-mixed", f"--trainer.max_steps={LAST + 10}", "--trainer.limit_val_batches=0"),
    *("--trainer.log_every_n_steps=1000", "--trainer.num_sanity_val_steps=0", "--data.source.init_args.train_size=8192"),
)
KINDS = {"plain": (), "eager": OURS, "as a graph": (*OURS, "--trainer.capture=auto", "--data.crop_padding=2")}


def plain() -> None:
    """Trains as the plain loop does, and writes what a step costs to cost-0.json."""
    import torch

    from scripts.bench import plain_ddp
    from tests.standin.emulate import DRIVER

    steps, start = 0, (0, 0.0)

    def after_step() -> None:
        nonlocal steps, start
        steps += 1
        now = DRIVER.standin_launches(), 1000 * time.thread_time()
        if steps == FIRST:
            start = now
        elif steps == LAST:
            launches, milliseconds = ((after - before) / (LAST - FIRST) for before, after in zip(start, now, strict=True))
            Path("cost-0.json").write_text(json.dumps({"launches": launches, "milliseconds": milliseconds}))

    torch.manual_seed(0)
    arguments = plain_ddp.arguments().parse_args(["--epochs=1", f"--size={64 * (LAST + 10)}", "--precision=fp16"])
    plain_ddp.train(arguments, plain_ddp.MiniResNet(), after_step)


def measured(kind: str) -> dict[str, float]:
    """Starts a program of this kind, and returns what a step of it costs."""
    from tests.standin.pool import environment, meeting_place

    probe = {"class_path": "tests.standin.probes.Cost", "init_args": {"first": FIRST, "last": LAST}}
    arguments = ["-m", "project", *KINDS[kind], "--trainer.callbacks=" + json.dumps([probe])]
    words = arguments if KINDS[kind] else [__file__, "plain"]
    with tempfile.TemporaryDirectory() as folder, meeting_place() as place:
        own = {**os.environ, **environment(1, place), "STANDIN_EMULATE": "0"}
        done = subprocess.run([sys.executable, *words], cwd=folder, env=own, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        costs: dict[str, float] = json.loads(Path(folder, "cost-0.json").read_text())
    return costs


def main() -> None:
    seen: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(TURNS):
        for kind, costs in seen.items():
            costs.append(measured(kind))
    base = [cost["milliseconds"] for cost in seen["plain"]]
    for kind, costs in seen.items():
        spent = [cost["milliseconds"] for cost in costs]
        ratio = statistics.median(own / reference for own, reference in zip(spent, base, strict=True))
        print(
            f"{kind:12} {statistics.median(spent):6.2f} ms a step ({min(spent):.2f} to {max(spent):.2f}), "
            f"{costs[0]['launches']:.1f} launches, {ratio:.2f} times the plain loop"
        )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    plain() if sys.argv[1:] == ["plain"] else main()
