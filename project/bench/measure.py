"""A run as the benchmark sees it: the config that its programs get, and the data that its loaders are measured with."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningModule, Trainer

from project.bench.bench import PLAIN_LOOP, Comparison, framework, loading, results, training
from project.bench.worker import load
from project.cluster.cores import cores
from project.data import ImageData
from project.errors import UserError
from project.watch.flops import flops

log = logging.getLogger(__name__)


def _workers(data: ImageData, ranks: int) -> int:
    data.spare_cores = cores(ranks) - 1
    return data.workers


def measure(
    trainer: Trainer, model: LightningModule, data: ImageData, ranks: Sequence[int] | None, turns: int, steps: int
) -> dict[str, Any]:
    """Measures, with programs of their own; nothing is trained in this process."""
    if trainer.world_size > 1:
        raise UserError("bench starts its processes by itself. HINT: start it with plain Python, and see --ranks.")
    if turns < 1 or steps < 1:
        raise UserError("bench takes at least one turn of one step.")
    folder = Path(trainer.default_root_dir)
    folder.mkdir(parents=True, exist_ok=True)
    given = {key: value for key, value in trainer.configuration.items() if key not in ("ranks", "turns", "steps", "run")}  # type: ignore[attr-defined]
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(given, sort_keys=False))

    theirs = sum(parameter.numel() for parameter in load(str(PLAIN_LOOP)).MiniResNet().parameters())
    if theirs != sum(parameter.numel() for parameter in model.parameters()):
        raise UserError(
            "bench compares with a plain loop that trains MiniResNet on ten classes, and this config has another network. "
            "HINT: leave model.network as it is in configs/bench.yaml."
        )
    data.setup("fit")
    devices = torch.cuda.device_count() or cores()
    chosen = ranks or [count for count in (1, 2) if count <= devices]
    made = Comparison(
        config=config,
        folder=folder,
        batch_size=data.batch_size,
        images=data.train_order().size,
        workers=lambda count: _workers(data, count),
        threads=cores,
        flops=flops(model.network, data.shape),
        turns=turns,
        steps=steps,
    )
    dtypes = [torch.float32]
    if "16" in trainer.precision:
        dtypes.append(torch.bfloat16 if "bf16" in trainer.precision else torch.float16)

    def batches() -> Iterator[int]:
        data.spare_cores = 0  # on one core, also where the config asks for processes
        workers, data.num_workers = data.num_workers, "auto" if data.num_workers == "auto" else 0
        loader = data.train_dataloader()
        data.num_workers = workers
        for batch in loader:
            moved = data.transfer_batch_to_device(batch, trainer.strategy.root_device, 0)
            yield len(data.on_after_batch_transfer(moved, 0)["label"])

    log.info("The data alone ...")
    loaders = loading(made, batches)
    log.info("The framework alone, on %d processes ...", chosen[-1])
    alone = framework(made, chosen[-1])
    rounds = []
    for count in chosen:
        log.info("Training on %d process(es): the plain loop and ours, in turns ...", count)
        rounds.append(training(made, count, dtypes))
    return results(rounds, alone, loaders, made)
