"""The verb `bench`: a config measured against the plain loop. Only a checkout has it."""

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from rich.console import Console

from project.cli.main import main as run
from project.cli.project_cli import ProjectCLI
from project.cluster.cores import cores
from project.data import ImageData
from project.errors import UserError
from project.step.loaders import attached_for_fit
from project.trainer import Trainer
from project.untrusted import write_text
from project.watch.flops import flops
from scripts.bench import report
from scripts.bench.bench import PLAIN_LOOP, Comparison, framework, loading, results, training
from scripts.bench.worker import load

log = logging.getLogger(__name__)


class BenchTrainer(Trainer):
    """The Trainer with the verb `bench`."""

    def bench(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ranks: list[int] | None = None,
        turns: int = 5,
        steps: int = 5,
    ) -> dict[str, Any]:
        """Measures this training against a plain PyTorch loop, in turns; bench.json has it all.

        Args:
            model: the model of the run; it must be MiniResNet, which is what the plain loop trains.
            datamodule: its data.
            ranks: the numbers of processes to measure with; by default 1 and, where there are as many cores or GPUs, 2.
            turns: of each program, after one that is left out.
            steps: optimiser steps in a turn.
        """
        if not isinstance(datamodule, ImageData):
            raise UserError("bench compares with a plain loop that trains MiniResNet. HINT: try --config configs/bench.yaml.")
        if self.world_size > 1:
            raise UserError("bench starts its processes by itself. HINT: start it with plain Python, and see --ranks.")
        if turns < 1 or steps < 1:
            raise UserError("bench takes at least one turn of one step.")
        with attached_for_fit(self, model, datamodule):
            return self._measure(model, datamodule, ranks, turns, steps)

    def _measure(
        self, model: LightningModule, datamodule: ImageData, ranks: list[int] | None, turns: int, steps: int
    ) -> dict[str, Any]:
        plain = sum(parameter.numel() for parameter in load(str(PLAIN_LOOP)).MiniResNet().parameters())
        if plain != sum(parameter.numel() for parameter in model.parameters()):
            raise UserError(
                "bench compares with a plain loop that trains MiniResNet on ten classes, and this config has another network. "
                "HINT: leave model.network as it is in configs/bench.yaml."
            )
        datamodule.setup("fit")
        comparison = Comparison(
            config=self._saved_config(),
            folder=Path(self.default_root_dir),
            batch_size=datamodule.batch_size,
            images=datamodule.train_order().size,
            workers=lambda count: _workers(datamodule, count),
            threads=cores,
            flops=flops(model.network, datamodule.sample_shape()),
            turns=turns,
            steps=steps,
        )
        dtypes = [torch.float32]
        if "16" in self.precision:
            dtypes.append(torch.bfloat16 if "bf16" in self.precision else torch.float16)
        devices = torch.cuda.device_count() or cores()
        chosen = ranks or [count for count in (1, 2) if count <= devices]
        log.info("The data alone ...")
        loaders = loading(comparison, lambda: self._batches(datamodule))
        log.info("The framework alone, on %d processes ...", chosen[-1])
        alone = framework(comparison, chosen[-1])
        rounds = []
        for count in chosen:
            log.info("Training on %d process(es): the plain loop and ours, in turns ...", count)
            rounds.append(training(comparison, count, dtypes))
        return results(rounds, alone, loaders, comparison)

    def _saved_config(self) -> Path:
        """The config that the measured programs get."""
        folder = Path(self.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        given = {key: value for key, value in self.configuration.items() if key not in ("ranks", "turns", "steps", "run")}
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(given, sort_keys=False))
        return config

    def _batches(self, data: ImageData) -> Iterator[int]:
        data.deal(replace(data.dealing, spare_cores=0))  # on one core, also where the config asks for processes
        workers, data.num_workers = data.num_workers, "auto" if data.num_workers == "auto" else 0
        loader = data.train_dataloader()
        data.num_workers = workers
        for batch in loader:
            moved = data.transfer_batch_to_device(batch, self.strategy.root_device, 0)
            yield len(data.on_after_batch_transfer(moved, 0)["label"])


def _workers(data: ImageData, ranks: int) -> int:
    data.deal(replace(data.dealing, spare_cores=cores(ranks) - 1))
    return data.loader_processes()


class BenchCLI(ProjectCLI):
    """The command line with the verb `bench`."""

    trainer: BenchTrainer

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"bench": {"model", "datamodule"}}

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return super().instantiate_trainer(**kwargs, devices=1, num_nodes=1)  # its programs have as many as it says

    def bench(self, model: LightningModule, datamodule: LightningDataModule, **settings: Any) -> None:
        measured = self.trainer.bench(model, datamodule, **settings)
        write_text(self.folder / "bench.json", json.dumps(measured, indent=1))
        report.draw(measured, self.folder / "bench.svg")
        report.show(measured, Console(width=None if sys.stdout.isatty() else 130))
        log.info("The figures: %s, the picture: bench.svg beside it", self.folder / "bench.json")


def main() -> None:
    run(BenchCLI, BenchTrainer)
