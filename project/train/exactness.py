"""trainer.exact: what would make a run another one on another number of ranks is fixed here, or refused by name."""

import logging
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from project.errors import UserError

log = logging.getLogger(__name__)

_LIBRARIES = ("lightning", "torch", "torchmetrics", "project")


def refuse_what_rounds(settings: Mapping[str, Any], compression: str, strategy: object) -> None:
    """The Trainer's arguments with which sums can't be exact."""
    found = {
        "trainer.gradient_compression": "rounds what the ranks send each other" if compression != "none" else None,
        "trainer.sync_batchnorm": "normalises by what the ranks have at once" if settings.get("sync_batchnorm") else None,
        "trainer.benchmark": "picks the fastest algorithm, another one each time" if settings.get("benchmark") else None,
        "trainer.deterministic": "allows the device to add up in any order" if settings.get("deterministic") is False else None,
        "trainer.strategy": None if type(strategy).__name__ in ("DDPStrategy", "SingleDeviceStrategy") else "adds up by itself",
    }
    for name, why in found.items():
        if why:
            raise UserError(f"trainer.exact can't be kept: {name} {why}. HINT: leave {name} as it is by default.")


def refuse_other_loop(why: str | None) -> None:
    """`why`: the steps are left to Lightning's own loop."""
    if why is not None:
        raise UserError(
            f"trainer.exact can't be kept: {why}, and so Lightning's own loop takes the steps (docs/own.md). "
            "HINT: change that, or set trainer.exact to false."
        )


def refuse_to_tell(module: object, asks: FrameType, name: str) -> None:
    """A module that asks how many ranks there are does something else on another number of them."""
    if asks.f_locals.get("self") is not module or str(asks.f_globals.get("__name__")).split(".")[0] in _LIBRARIES:
        return
    raise UserError(
        f"trainer.exact can't be kept: {type(module).__name__}.{asks.f_code.co_name} asks for trainer.{name}, which is another "
        "one on another number of ranks. HINT: what it is needed for can be a setting of the module, in samples or steps."
    )


def fix_threads(threads: int) -> None:
    """Of a CPU's operations, which split a sum among their threads."""
    torch.set_num_threads(threads)
    log.info(
        "trainer.exact: every rank computes with %d thread(s), on any number of ranks (trainer.threads). %s", threads,
        "The run is the same to the last bit wherever that is the same.",
    )  # fmt: skip
