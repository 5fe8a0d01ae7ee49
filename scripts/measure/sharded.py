#!/usr/bin/env python
"""A large GPT, sharded: the bytes that each rank holds, and the weights after some steps, against DDP's.

    .venv/bin/python scripts/measure/sharded.py                       100 M parameters, 50 steps: an hour of two cores, 12 GB
    .venv/bin/python scripts/measure/sharded.py --kinds float32 --steps 3 --ranks 2 4           the bytes alone
    .venv/bin/python scripts/measure/sharded.py --kinds float64 exact --width 192 --layers 4 --vocabulary 2000

DDP runs on one rank, and accumulates what more ranks would compute; what it holds is the same on any number of ranks. Bytes are
counted in the third step, when its gradients are there and the optimiser has its moments. Prints a line for each run, and what
two runs differ by.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from project.sharded.shards import local

ROOT = Path(__file__).parents[2]
KINDS = {
    "float32": ("--trainer.precision=32-true",),
    "float64": ("--trainer.precision=64-true",),
    "exact": ("--trainer.precision=32-true", "--trainer.exact=true"),
}
WORDS = (
    *("fit", f"--config={ROOT}/configs/gpt.yaml", "--run=it", "--checkpoints.monitor=null", "--data.init_args.text=../texts"),
    *("--data.init_args.batch_size=1", "--data.init_args.context=16", "--model.init_args.context=16"),
    *("--model.init_args.heads=12", "--model.init_args.warmup_steps=5"),
    *("--trainer.accelerator=cpu", "--trainer.threads=1", "--trainer.global_batch_size=4"),
    *("--trainer.limit_val_batches=0", "--checkpoints.every_n_steps=1000000", "--trainer.log_every_n_steps=1"),
    "--trainer.callbacks+=scripts.measure.sharded.Holding",
)


class Holding(Callback):
    """Notes what a rank holds in the third step (held-RANK.json), and the weights at the end (weights.pt)."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step != 2:
            return
        parameters = list(pl_module.parameters())
        moments = [tensor for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, Tensor)]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        held = {"parameters": parameters, "gradients": gradients, "optimiser": moments}
        sizes = {name: sum(local(tensor).nbytes for tensor in tensors) for name, tensors in held.items()}
        Path(f"held-{trainer.global_rank}.json").write_text(json.dumps(sizes))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        whole = {}
        for name, parameter in pl_module.named_parameters():  # on all ranks, as each has a part
            value = parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
            if trainer.is_global_zero:
                whole[name] = value.clone()
        if trainer.is_global_zero:
            torch.save(whole, "weights.pt")


class Runs:
    """Trains the same GPT in several ways, each in a folder of its own."""

    def __init__(self, place: Path, args: argparse.Namespace) -> None:
        self.place, self.steps = place, args.steps
        sizes = {"vocabulary": args.vocabulary, "layers": args.layers, "width": args.width, "lr": args.lr}
        self.words = (*WORDS, f"--trainer.max_steps={args.steps}")
        self.words += tuple(f"--model.init_args.{name}={value}" for name, value in sizes.items())
        (place / "texts").mkdir()
        for number in range(256):
            text = f"File {number} says {number * number}, and {number % 7} times so.\n"
            (place / "texts" / f"{number}.txt").write_text(text * 2)

    def run(self, kind: str, strategy: str, ranks: int) -> Path:
        folder = self.place / f"{kind}, {strategy}, {ranks} rank(s)"
        folder.mkdir()
        words = (*self.words, *KINDS[kind], f"--trainer.strategy={strategy}", f"--trainer.devices={ranks}")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        began = time.perf_counter()
        with (folder / "output.txt").open("w") as output:
            command = [sys.executable, "-m", "project", *words]
            done = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        if done.returncode:
            sys.exit(f"{folder.name} has ended with {done.returncode}:\n{(folder / 'output.txt').read_text()[-3000:]}")
        shutil.rmtree(folder / "lightning_logs")
        parts = {name: max(sizes[name] for sizes in held(folder)) / 2**20 for name in held(folder)[0]}
        print(
            f"{folder.name}: a rank holds {largest_rank(folder) / 2**20:.1f} MiB "
            f"({', '.join(f'{name} {size:.1f}' for name, size in parts.items())}); "
            f"{time.perf_counter() - began:.0f} s with start and end",
            flush=True,
        )
        return folder

    def compare(self, folder: Path, ddp: Path, ranks: int) -> None:
        weights, reference = (torch.load(place / "weights.pt", weights_only=True, mmap=True) for place in (folder, ddp))
        assert list(weights) == list(reference)
        furthest = max((weights[name] - reference[name]).abs().max().item() for name in weights)
        count = sum(tensor.numel() for tensor in weights.values())
        print(
            f"  against DDP: {largest_rank(folder) / largest_rank(ddp) * ranks:.4f} times 1/{ranks} of its bytes; {count:,} "
            f"weights differ after {self.steps} steps by at most {furthest:.1e}, "
            f"sha256 {digest(weights)} and {digest(reference)}",
            flush=True,
        )


def held(folder: Path) -> list[dict[str, int]]:
    """By rank."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("held-*.json"))]


def largest_rank(folder: Path) -> int:
    return max(sum(sizes.values()) for sizes in held(folder))


def digest(state: dict[str, Tensor]) -> str:
    checksum = hashlib.sha256()
    for name, tensor in state.items():
        checksum.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return checksum.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["float64", "exact"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=50, help="at least 3; here: %(default)s")
    parser.add_argument("--vocabulary", type=int, default=20_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--lr", type=float, default=1e-4, help="with 2e-3 what rounding leaves grows threefold in each step")
    args = parser.parse_args()
    with TemporaryDirectory() as place:
        runs = Runs(Path(place), args)
        for kind in args.kinds:
            ddp = runs.run(kind, "ddp", 1)
            for ranks in args.ranks:
                sharded = runs.run(kind, "sharded", ranks)
                runs.compare(sharded, ddp, ranks)
                (sharded / "weights.pt").unlink()
            (ddp / "weights.pt").unlink()


if __name__ == "__main__":
    main()
