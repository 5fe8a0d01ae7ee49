"""trainer.exact: what would make a run another one on another number of ranks is fixed here, or refused by name."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from project.errors import UserError

log = logging.getLogger(__name__)


def refuse_what_rounds(settings: Mapping[str, Any], compression: str, strategy: object) -> None:
    """The Trainer's arguments with which sums can't be exact."""
    found = {
        "trainer.gradient_compression": "rounds what the ranks send each other" if compression != "none" else None,
        "trainer.sync_batchnorm": "normalises by what the ranks have at once" if settings.get("sync_batchnorm") else None,
        "trainer.strategy": None if type(strategy).__name__ in ("DDPStrategy", "SingleDeviceStrategy") else "adds up by itself",
    }
    for name, why in found.items():
        if why:
            raise UserError(f"trainer.exact can't be kept: {name} {why}. HINT: leave {name} as it is by default.")


def fix_threads(threads: int) -> None:
    """Of a CPU's operations, which split a sum among their threads."""
    torch.set_num_threads(threads)
    log.info(
        "trainer.exact: every rank computes with %d thread(s), on any number of ranks (trainer.threads). %s", threads,
        "The run is the same to the last bit wherever that is the same.",
    )  # fmt: skip
