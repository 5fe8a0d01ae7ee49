"""Computes the accumulation: micro-batch x ranks x accumulation = global batch."""

import os
from typing import Literal

from lightning.pytorch.callbacks import GradientAccumulationScheduler

from project.errors import UserError
from project.typed import TypedTrainer

_CLUSTER = 1024
"""The global batch of configs/ddp_cluster.yaml and configs/gpt_cluster.yaml."""


def accumulates_by_epoch(trainer: TypedTrainer) -> bool:
    """Returns whether a callback sets another accumulation for each epoch."""
    return any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)


def accumulation(global_batch: int | None, micro_batch: int, ranks: int, wanted: int | Literal["auto"], where: str) -> int:
    """Returns the micro-batches that each rank takes in a step, from the global batch, the micro-batch and the ranks.

    `where`: the keys of the global batch and of the micro-batch, for messages.
    """
    if global_batch is None:
        return 1 if wanted == "auto" else wanted
    name, size = where.split()
    at_once = micro_batch * ranks
    count, rest = divmod(global_batch, at_once)
    if rest or not count:
        fitting = [n for n in range(1, global_batch // micro_batch + 1) if global_batch % (micro_batch * n) == 0]
        sizes = f"ranks that fit: {', '.join(map(str, fitting))}; " if fitting else ""
        nearest = max(1, round(global_batch / at_once)) * at_once
        raise UserError(
            f"{ranks} rank(s) with micro-batches of {micro_batch} can't make a global batch of "
            f"{global_batch} ({sizes}nearest global batch for {ranks} rank(s): {nearest}). "
            f"HINT: set {name}={nearest}, or change {size}{_cluster_config(name, at_once)}."
        )
    if wanted not in ("auto", count):
        raise UserError(
            f"{name}={global_batch} on {ranks} rank(s) with micro-batches of "
            f"{micro_batch} takes accumulate_grad_batches={count}, not {wanted}. "
            f"HINT: set trainer.accumulate_grad_batches=auto, or leave out {name}."
        )
    return count


def check_elastic(global_batch: int | None, micro_batch: int, ranks: int, where: str) -> None:
    """Raises an error where a number of nodes that scripts/launch.sh may start again with, as when one is lost or comes back,
    can't make the global batch: the run would end hours later, when it is met. `ranks`: those of now.
    """
    least, _, most = (nodes := os.environ.get("PROJECT_NODES", "")).partition(":")
    now = int(os.environ.get("GROUP_WORLD_SIZE", "0"))
    for count in range(int(least), int(most) + 1) if nodes and now else ():
        try:
            accumulation(global_batch, micro_batch, ranks * count // now, "auto", where)
        except UserError as error:
            raise UserError(f"NNODES={nodes} may start this run on {count} node(s), and {error}") from None


def _cluster_config(name: str, at_once: int) -> str:
    """Names the config for clusters, where the number of ranks divides its global batch."""
    if _CLUSTER % at_once:
        return ""
    config = "ddp_cluster.yaml" if name.startswith("data.") else "gpt_cluster.yaml"
    return f"; configs/{config} takes 1 to 64 ranks (a global batch of {_CLUSTER:,})"
