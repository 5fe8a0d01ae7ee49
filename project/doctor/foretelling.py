"""A Trainer, a model and its data, put together as far as a dry run needs them."""

from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from project.data import ImageData
from project.doctor.dry_run import Row, about, numbers, rows, show
from project.errors import UserError
from project.train.batching import accumulation
from project.train.first_batch import first_batch
from project.train.foretold import Foretold, held_by_others, room
from project.train.held import Sharing
from project.train.micro_batch import samples_of
from project.train.on_paper import made_on_paper
from project.train.sharded import Sharded

Made = TypeVar("Made")


def foretell(
    trainer: Trainer,
    module: LightningModule,
    data: LightningDataModule | None,
    ranks: str,
    global_batch: int | None,
    wanted: Any,
    exact: bool,
) -> list[Row]:
    """Shows the table, and returns its rows. The Trainer has been attached to both, as for a fit on one rank."""

    def batch() -> Any:
        if data is not None:
            data.prepare_data()
            data.setup("fit")
        return first_batch(module, data, streams=True)

    made_on_paper(lambda: _as_in_a_fit(module))
    strategy, settings = trainer.strategy, trainer.configuration.get("trainer", {})  # type: ignore[attr-defined]
    devices, nodes = _devices(settings.get("devices"), strategy.root_device.type), int(settings.get("num_nodes") or 1)
    foretold = Foretold(trainer, module, strategy.blocks if isinstance(strategy, Sharded) else None, batch)
    sharing, samples = sharing_of(strategy, exact), samples_of(foretold.batch)

    def many(count: int) -> int:
        if count % sharing.shared_by:
            raise UserError(f"{count} ranks are no multiple of tensor_parallel={sharing.shared_by}. HINT: take one.")
        count //= sharing.shared_by
        if isinstance(data, ImageData):
            sizes = data.global_batch_size, data.batch_size
            return accumulation(*sizes, count, wanted, "data.global_batch_size data.batch_size")
        return accumulation(global_batch, samples, count, wanted, "trainer.global_batch_size batch_size") if samples else 1

    table = rows(foretold, sharing, numbers(ranks, devices * nodes), devices, many)
    named = settings.get("strategy")
    notes = about(foretold, samples, sharing, named if isinstance(named, str) else strategy, str(trainer.precision))
    notes += [f"Of the device here, {others}."] if (others := held_by_others(strategy.root_device)) else []
    show(foretold, table, sharing, notes, lambda here: room(strategy.root_device, here))
    return table


def sharing_of(strategy: Strategy, exact: bool) -> Sharing:
    """Returns how ranks share a network with this strategy."""
    if isinstance(strategy, Sharded):
        return strategy.sharing(ranks=1)
    return Sharing(exact=exact, on_gpu=strategy.root_device.type != "cpu")


def _devices(wanted: Any, kind: str) -> int:
    """Returns the number of devices of each host, as `trainer.devices` gives it."""
    if isinstance(wanted, (list, tuple)):
        return len(wanted)
    if str(wanted).isdigit():
        return int(wanted)
    return torch.cuda.device_count() if kind == "cuda" else 1


def _as_in_a_fit(module: LightningModule) -> None:
    module.configure_model()
    module.setup("fit")


def modules_on_paper(class_type: type[Made], *args: Any, **kwargs: Any) -> Made:
    """Makes what a YAML names, without memory."""
    return made_on_paper(lambda: class_type(*args, **kwargs))
