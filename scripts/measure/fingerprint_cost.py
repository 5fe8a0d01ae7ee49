#!/usr/bin/env python
"""What fingerprints cost in a step: in one process, steps with them and without, by chance.

    .venv/bin/python scripts/measure/fingerprint_cost.py                 MiniResNet and the GPT
    .venv/bin/python scripts/measure/fingerprint_cost.py gpt             one of them

Each process computes with one thread. A step of MiniResNet has one micro-batch of 16 here, and not eight; the GPT's is that of
its config.
Prints the median milliseconds of steps with fingerprints and without, their ratio, and what is spent in the callback itself,
which the noise of the steps does not hide; and how many bytes a step leaves in the file.
"""

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS, WARM_UP = 200, 20
RUNS = {
    "minires": (
        *("--config=configs/ddp.yaml", "--data.num_workers=0", "--data.batch_size=16", "--data.global_batch_size=16"),
        *("--data.source.init_args.train_size=8000", "--data.source.init_args.val_size=64"),
    ),
    "gpt": ("--config=configs/gpt.yaml",),
}
HOOKS = ("on_train_epoch_start", "on_train_batch_start", "on_before_backward", "on_train_batch_end", "on_save_checkpoint")


def measure(words: list[str]) -> None:
    """In a process of its own. The callback is told of about every second step: without it, nothing of a step is changed."""
    from lightning.pytorch import Callback

    import project.trainer
    from project.cli.main import main
    from project.watch.fingerprints import Fingerprints

    class Turns(Callback):
        def __init__(self) -> None:
            self.last, self.on = time.perf_counter(), True
            self.times: dict[bool, list[float]] = defaultdict(list)
            self.spent: dict[bool, list[float]] = defaultdict(list)
            self.in_hooks, self.chance = 0.0, random.Random(0)

        def wrap(self, hook: Any) -> Any:
            def call(trainer: Any, *args: Any, **kwargs: Any) -> None:
                if not self.on:
                    return
                start = time.perf_counter()
                hook(trainer, *args, **kwargs)
                self.in_hooks += time.perf_counter() - start

            return call

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % trainer.accumulate_grad_batches:
                return
            now = time.perf_counter()
            self.times[self.on].append(now - self.last)
            self.spent[self.on].append(self.in_hooks)
            self.on, self.last, self.in_hooks = self.chance.random() < 0.5, time.perf_counter(), 0.0  # log points are even

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            series = [self.times[True], self.times[False], self.spent[True]]
            print("found", *(statistics.median(times[WARM_UP // 2 :]) for times in series), flush=True)
            # The middle hides what is done seldom: gathering, writing, listening to modules.
            print("mean", statistics.mean(self.spent[True][WARM_UP // 2 :]), flush=True)

    before, turns = project.trainer.with_ours, Turns()

    def with_turns(given: Any, *arguments: Any) -> Any:
        made = before(given, *arguments)
        for callback in made:
            if isinstance(callback, Fingerprints):
                for hook in HOOKS:
                    setattr(callback, hook, turns.wrap(getattr(callback, hook)))
        return [turns, *made]

    project.trainer.with_ours = with_turns
    sys.argv = ["project", "fit", *words]
    main()


def printed_figures(script: str, words: Sequence[str], folder: str, launcher: Sequence[str] = ()) -> dict[str, list[float]]:
    """What a script of this folder, which measures in a process of its own, prints there: a name and figures in each line."""
    root = os.getcwd()
    words = [
        *(*words, "--trainer.threads=1", "--trainer.accelerator=cpu", "--trainer.limit_val_batches=0"),
        *(f"--trainer.max_steps={STEPS + WARM_UP}", "--trainer.num_sanity_val_steps=0", "--checkpoints.monitor=null"),
        *("--trainer.devices=1", "--run=it"),
    ]  # fmt: skip
    words = [argument.replace("--config=", f"--config={root}/") for argument in words]
    done = subprocess.run(
        [sys.executable, *launcher, os.path.abspath(script), "--child", *words], cwd=folder, text=True, capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
    )  # fmt: skip
    figures = {line.split()[0]: [float(figure) for figure in line.split()[1:]] for line in done.stdout.splitlines()}
    assert "found" in figures, done.stdout + done.stderr
    return figures


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        measure(sys.argv[2:])
        return
    for name in sys.argv[1:] or list(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            figures = printed_figures(__file__, RUNS[name], folder)
            lines = (Path(folder) / "lightning_logs/it/fingerprints.jsonl").read_text().splitlines()
        on, off, spent = figures["found"]
        (mean,) = figures["mean"]
        plain = [len(line) + 1 for line in lines if "format" not in line and "modules" not in line]
        print(
            f"{name:8} {1e3 * off:6.2f} ms, with fingerprints {1e3 * on:6.2f} ms, ratio {on / off:.4f}; in the callback "
            f"{1e3 * spent:.2f} ms ({spent / off:.2%}), on the average of all steps {1e3 * mean:.2f} ms ({mean / off:.2%}); "
            f"{statistics.median(plain):.0f} bytes a step",
            flush=True,
        )


if __name__ == "__main__":
    main()
