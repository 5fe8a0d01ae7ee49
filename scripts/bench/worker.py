"""A program that trains in turns: it takes so many steps when the benchmark says so, reports, and waits.

    python -m project fit ... --trainer.callbacks+=scripts.bench.worker.BenchWorker
    python -m scripts.bench.worker scripts/bench/plain_ddp.py --batch-size 64      the same for the plain loop

Each rank talks to the benchmark through the socket whose path is in BENCH_SOCKET; without one nothing waits.
"""

import importlib.util
import json
import os
import socket
import sys
import time
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from scripts.bench.phases import LastGradient, Phases, watch_loaders

SOCKET = "BENCH_SOCKET"


def fp32() -> dict[str, str | bool]:
    """How this process computes in fp32; TF32 is several times as fast, and less exact."""
    return {"products": torch.get_float32_matmul_precision(), "tf32 in convolutions": torch.backends.cudnn.allow_tf32}


class Worker:
    """Between two steps: the turn goes on, or is over."""

    def __init__(self) -> None:
        self._lines: Any = None
        if path := os.environ.get(SOCKET):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            self._lines = connection.makefile("rw")
            self._first_step: LastGradient | None = LastGradient()
        self._last_gradient: torch.Tensor | None = None
        self._left, self._start = 0, 0.0
        self._phases: Phases | None = None

    def after_step(self) -> None:
        if self._lines is None or (self._left and self._has_steps_left()):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a turn is over when the device is
        answer = {"seconds": time.perf_counter() - self._start, "phases": {}}
        if self._first_step is not None:
            self._last_gradient, self._first_step = self._first_step.end(), None
            answer["fp32"] = fp32()
        if self._phases is not None:
            answer["phases"], self._phases = self._phases.end(), None
        self._say(answer)
        wanted = json.loads(self._lines.readline())
        self._left = wanted["steps"]
        if wanted["phases"]:
            self._phases = Phases(self._last_gradient)
        self._start = time.perf_counter()

    def _has_steps_left(self) -> bool:
        self._left -= 1
        return self._left > 0

    def _say(self, answer: dict[str, Any]) -> None:
        self._lines.write(json.dumps(answer) + "\n")
        self._lines.flush()


class BenchWorker(Callback):
    """The worker, in our training."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        watch_loaders()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._worker = Worker()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._worker.after_step()


class Trivial(nn.Module):
    """A network that is nothing to compute: what is left of a step is the framework."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.flatten(1))  # type: ignore[no-any-return]


class Ready(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Images that need no making."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.image = torch.zeros(3, 8, 8)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.image, index % 10


def load(script: str) -> ModuleType:
    """The plain loop, as a module."""
    spec = importlib.util.spec_from_file_location("plain", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    plain = load(sys.argv[1])
    trivial = "--trivial" in sys.argv
    args = plain.arguments().parse_args([argument for argument in sys.argv[2:] if argument != "--trivial"])
    if trivial:
        plain.SyntheticDataset = Ready  # type: ignore[attr-defined]
    torch.manual_seed(0)
    watch_loaders()
    plain.train(args, Trivial() if trivial else plain.MiniResNet(), Worker().after_step)


if __name__ == "__main__":
    main()
