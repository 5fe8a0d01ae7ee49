#!/usr/bin/env python
"""What it costs to see a run: the time that is spent in Throughput, Dashboard and Life, against that of a step.

    .venv/bin/python scripts/measure/watch_cost.py                 MiniResNet and the GPT, on one process and on two
    .venv/bin/python scripts/measure/watch_cost.py gpt             one of them

Each process computes with one thread. Every call of theirs is timed, and the timing with it: figures are too high rather than
too low. What is written in the background (TensorBoard's thread) is not in them.
"""

import statistics
import sys
import tempfile
import time
from typing import Any

from fingerprint_cost import WARM_UP, printed_figures

RUNS = {
    "minires": (
        *("--config=configs/ddp.yaml", "--data.num_workers=0", "--data.batch_size=16", "--data.global_batch_size=32"),
        *("--data.source.init_args.train_size=16000", "--data.source.init_args.val_size=64"),
    ),
    "gpt": ("--config=configs/gpt.yaml",),
}
BESIDE = ("_fetch", "_fetched", "_gradient")  # what is called beside the hooks


def measure(words: list[str]) -> None:
    """In a process of its own."""
    from lightning.pytorch import Callback

    import project.trainer
    from project.cli.main import main
    from project.watch.dashboard import Dashboard
    from project.watch.throughput import Throughput

    class Clock(Callback):
        def __init__(self) -> None:
            self.spent, self.steps, self.last = [0.0], [0.0], time.perf_counter()

        def wrap(self, call: Any) -> Any:
            def timed(*args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter()
                try:
                    return call(*args, **kwargs)
                finally:
                    self.spent[-1] += time.perf_counter() - start

            return timed

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % trainer.accumulate_grad_batches == 0:
                now = time.perf_counter()
                self.steps.append(now - self.last)
                self.last = now
                self.spent.append(0.0)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                print("found", statistics.median(self.steps[WARM_UP:]), statistics.mean(self.spent[WARM_UP:-1]), flush=True)

    before, clock = project.trainer.with_ours, Clock()

    def with_clock(*given: Any) -> Any:
        made = before(*given)
        for callback in made:
            if isinstance(callback, (Throughput, Dashboard)):
                for name in [*(name for name in vars(type(callback)) if name.startswith("on_")), *BESIDE]:
                    if hasattr(callback, name):
                        setattr(callback, name, clock.wrap(getattr(callback, name)))
        return [clock, *made]

    project.trainer.with_ours = with_clock
    sys.argv = ["project", "fit", *words]
    main()


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        measure(sys.argv[2:])
        return
    for name in sys.argv[1:] or list(RUNS):
        for ranks in (1, 2):
            launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--") if ranks > 1 else ()
            with tempfile.TemporaryDirectory() as folder:
                step, spent = printed_figures(__file__, RUNS[name], folder, launcher)["found"]
            print(f"{name:8} {ranks} rank(s): a step {1e3 * step:.2f} ms, {1e3 * spent:.3f} ms to see it ({spent / step:.2%})")


if __name__ == "__main__":
    main()
