#!/usr/bin/env python
"""A GPT of 100 million parameters, sharded: the bytes that each rank holds, and the weights after 50 steps, against DDP's.

    .venv/bin/python scripts/measure/sharded.py [float64|exact] [RANKS ...]        usually on 1, 2 and 4 ranks, and both

DDP runs on one rank, and accumulates what more ranks would compute; what it holds is the same on any number of ranks. Bytes are
counted in the third step, when its gradients are there and the optimiser has its moments. Needs 12 GB of memory, and an hour
of two cores. Prints a line for each run, and what two runs differ by.
"""

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

ROOT = Path(__file__).parents[2]
STEPS = int(os.environ.get("STEPS", "50"))
GPT = {"vocabulary": 20_000, "context": 16, "layers": 12, "heads": 12, "width": 768}
KINDS = {"float64": ("--trainer.precision=64-true",), "exact": ("--trainer.precision=32-true", "--trainer.exact=true")}
WORDS = (
    *("fit", f"--config={ROOT}/configs/gpt.yaml", "--run=it", "--checkpoints.monitor=null", "--data.init_args.text=../texts"),
    *("--data.init_args.batch_size=1", "--data.init_args.context=16", "--model.init_args.warmup_steps=5"),
    *("--trainer.accelerator=cpu", "--trainer.threads=1", "--trainer.global_batch_size=4", f"--trainer.max_steps={STEPS}"),
    *("--trainer.limit_val_batches=0", "--checkpoints.every_n_steps=1000000", "--trainer.log_every_n_steps=1"),
    *(f"--model.init_args.{name}={value}" for name, value in GPT.items()),
    "--trainer.callbacks+=scripts.measure.sharded.Holding",
)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Holding(Callback):
    """Notes what a rank holds in the third step (held-RANK.json), and the weights at the end (weights.pt)."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step != 2:
            return
        parameters = list(pl_module.parameters())
        moments = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
        gradients = [one.grad for one in parameters if one.grad is not None]
        held = {"parameters": parameters, "gradients": gradients, "optimiser": moments}
        found = {name: sum(local(one).nbytes for one in tensors) for name, tensors in held.items()}
        Path(f"held-{trainer.global_rank}.json").write_text(json.dumps(found))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        whole = {}
        for name, one in pl_module.named_parameters():  # on all ranks, as each has a part
            value = one.detach().full_tensor() if isinstance(one, DTensor) else one.detach()
            if trainer.is_global_zero:
                whole[name] = value.clone()
        if trainer.is_global_zero:
            torch.save(whole, "weights.pt")


def run(place: Path, name: str, kind: str, strategy: str, ranks: int) -> Path:
    folder = place / name
    folder.mkdir()
    words = (*WORDS, *KINDS[kind], f"--trainer.strategy={strategy}", f"--trainer.devices={ranks}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    with (folder / "output.txt").open("w") as output:
        command = [sys.executable, "-m", "project", *words]
        done = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{name} has ended with {done.returncode}:\n{(folder / 'output.txt').read_text()[-3000:]}")
    held = [json.loads((folder / f"held-{rank}.json").read_text()) for rank in range(ranks)]
    most = max(sum(one.values()) for one in held)
    parts = ", ".join(f"{name} {max(one[name] for one in held) / 2**20:.1f}" for name in held[0])
    seconds = time.perf_counter() - began
    print(f"{name}: a rank holds {most / 2**20:.1f} MiB ({parts}); {seconds:.0f} s with start and end", flush=True)
    (folder / "most").write_text(str(most))
    shutil.rmtree(folder / "lightning_logs")
    return folder


def digest(state: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, one in state.items():
        found.update(name.encode() + one.contiguous().numpy().tobytes())
    return found.hexdigest()


def compare(one: Path, other: Path, ranks: int) -> None:
    ours, theirs = (torch.load(folder / "weights.pt", weights_only=True, mmap=True) for folder in (one, other))
    assert list(ours) == list(theirs)
    furthest = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
    share = int((one / "most").read_text()) / int((other / "most").read_text()) * ranks
    print(
        f"  against {other.name}: {share:.4f} times 1/{ranks} of its bytes; weights after {STEPS} steps differ by at most "
        f"{furthest:.1e}, sha256 {digest(ours)[:16]} and {digest(theirs)[:16]}",
        flush=True,
    )


def main() -> None:
    kinds = [one for one in KINDS if one in sys.argv] or list(KINDS)
    counts = [int(one) for one in sys.argv[1:] if one.isdigit()] or [1, 2, 4]
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "texts").mkdir()
        for number in range(256):
            words = f"File {number} says {number * number}, and {number % 7} times so.\n"
            (place / "texts" / f"{number}.txt").write_text(words * 2)
        for kind in kinds:
            ddp = run(place, f"{kind}, DDP", kind, "ddp", 1)
            for ranks in counts:
                sharded = run(place, f"{kind}, sharded, {ranks} rank(s)", kind, "sharded", ranks)
                compare(sharded, ddp, ranks)
                (sharded / "weights.pt").unlink()
            (ddp / "weights.pt").unlink()


if __name__ == "__main__":
    main()
