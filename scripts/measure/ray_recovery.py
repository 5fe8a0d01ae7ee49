#!/usr/bin/env python
"""After a SIGKILL of one of two workers under Ray: how long nothing is learned, and how many steps are lost.

    scripts/setup test-all && .venv/bin/python -m pip install "ray[train]"
    .venv/bin/python scripts/measure/ray_recovery.py [--turns 2]

In turns, on a Ray of its own: `python -m project ray fit`, which saves every 20 steps beside the training; and Lightning's
Trainer with ray.train.lightning's strategy and its RayTrainReportCallback, which saves at the end of an epoch. Both train the
same module on the same data, 50 ms and 80 steps an epoch; the worker dies in the middle of the third.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parents[2]
STEPS, EPOCHS, KILLED_AT, BATCH = 80, 4, 200, 4


class Slow(LightningModule):
    """Linear regression; a step takes 50 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: Any) -> Tensor:
        """The squared error."""
        time.sleep(0.05)  # the measured part is what comes between steps
        inputs, targets = batch
        return nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Points(LightningDataModule):
    """So many that two ranks take STEPS steps in an epoch."""

    def train_dataloader(self) -> DataLoader[Any]:
        """In the order that the sampler says."""
        inputs = torch.randn(STEPS * BATCH * 2, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH)


class Ledger(Callback):
    """Each rank notes each step: when, which, and its process."""

    def __init__(self, folder: str = ".") -> None:
        self._folder = Path(folder)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """A line in ledger-RANK.jsonl."""
        line = json.dumps({"time": time.time(), "step": trainer.global_step, "pid": os.getpid()})
        with (self._folder / f"ledger-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(f"{line}\n")


def steps(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank has noted."""
    file = folder / f"ledger-{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []


def rays_own(folder: str) -> None:
    """As Ray's documentation has it."""
    import ray.train
    from ray.train import Checkpoint
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
    from ray.train.torch import TorchTrainer

    def train(config: dict[str, Any]) -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
        trainer = prepare_trainer(
            Trainer(
                max_epochs=EPOCHS, accelerator="cpu", devices="auto", strategy=RayDDPStrategy(),
                plugins=[RayLightningEnvironment()], callbacks=[Ledger(config["folder"]), RayTrainReportCallback()],
                enable_checkpointing=False, logger=False, enable_progress_bar=False, enable_model_summary=False,
            )
        )  # fmt: skip
        checkpoint: Checkpoint | None = ray.train.get_checkpoint()
        if checkpoint is None:
            trainer.fit(Slow(), datamodule=Points())
            return
        with checkpoint.as_directory() as place:
            trainer.fit(Slow(), datamodule=Points(), ckpt_path=f"{place}/checkpoint.ckpt")

    ray.init("local", num_cpus=2, log_to_driver=False, logging_level="CRITICAL", include_dashboard=False)
    TorchTrainer(
        train, train_loop_config={"folder": folder}, scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=3)),
    ).fit()  # fmt: skip


def measured(command: list[str], folder: Path) -> tuple[float, int]:
    """Seconds without a new step after rank 1 was killed, and the steps that were taken again."""
    with (folder / "output.txt").open("w") as output:
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        settings = {**os.environ, "PYTHONPATH": python_path, "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        running = subprocess.Popen(command, cwd=folder, env=settings, stdout=output, stderr=subprocess.STDOUT)
        while len(before := steps(folder, 1)) < KILLED_AT:
            assert running.poll() is None, (folder / "output.txt").read_text()
            time.sleep(0.01)
        os.kill(before[-1]["pid"], signal.SIGKILL)
        struck = time.time()
        assert running.wait(600) == 0, (folder / "output.txt").read_text()
    taken = steps(folder, 1)
    after = [entry for entry in taken if entry["pid"] != before[-1]["pid"]]
    reached = max(entry["step"] for entry in taken if entry["pid"] == before[-1]["pid"])
    assert max(entry["step"] for entry in after) == STEPS * EPOCHS, "the run has not ended"
    return after[0]["time"] - struck, reached - after[0]["step"] + 1


def main() -> None:
    """Prints a line for each turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rays-own", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rays_own:
        rays_own(given.rays_own)
        return
    module = "scripts.measure.ray_recovery"
    command = [
        sys.executable,
        "-m",
        "project",
        "ray",
        "fit",
        "--workers=2",
        "--run=it",
        f"--model={module}.Slow",
        f"--data={module}.Points",
    ]
    command += [f"--trainer.callbacks={module}.Ledger", f"--trainer.max_epochs={EPOCHS}", "--checkpoints.every_n_steps=20"]
    for turn in range(given.turns):
        for name in ("ours", "Ray's own"):
            folder = Path(tempfile.mkdtemp(prefix="ray-recovery-"))
            own = [sys.executable, "-m", module, "--rays-own", str(folder)]
            seconds, lost = measured(command if name == "ours" else own, folder)
            print(f"turn {turn + 1}  {name:10} a step again after {seconds:5.1f} s, {lost} steps taken again", flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
