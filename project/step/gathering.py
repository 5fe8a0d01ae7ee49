"""Replaces an abort by a message: `self.all_gather` where the ranks' micro-batches are not of one size."""

from collections.abc import Callable
from typing import NoReturn, TypeVar

from lightning.pytorch import Trainer
from torch import Tensor

from project.errors import UserError
from project.step.data_ranks import data_ranks
from project.step.state import micro_batch, step_state

T = TypeVar("T")


def gather_evenly(trainer: Trainer, gather: Callable[..., T], tensor: Tensor, *args: object, **kwargs: object) -> T:
    """Gathers in the place of the strategy's `all_gather`, which `self.all_gather` calls: given tensors of different sizes gloo
    aborts the process, and NCCL waits. All ranks know when their micro-batches differ by a sample, and so all of them end
    alike.
    """
    at = micro_batch(trainer)
    if step_state(trainer).uneven:
        refuse_uneven("self.all_gather")
    if trainer.training and at.order is not None and tensor.ndim and len(tensor) == at.size:
        many = trainer.accumulate_grad_batches
        spans = [at.order.micro_span(at.key[1], rank * many + at.key[2] % many) for rank in range(data_ranks(trainer).count)]
        sizes = sorted({high - low for low, high in spans})
        if len(sizes) > 1:
            raise UserError(
                f"self.all_gather in step {trainer.global_step + 1}: the ranks have micro-batches of {sizes[0]} and "
                f"{sizes[-1]} samples, and tensors of different sizes can't be gathered. HINT: drop_last=True leaves out the "
                "shorter last step of an epoch; or fill the tensors up to one size before."
            )
    return gather(tensor, *args, **kwargs)


def refuse_uneven(what: str) -> NoReturn:
    """Raises a UserError that names what the ranks do together for each batch, where some have a batch more than others."""
    raise UserError(
        f"{what} in an evaluation that reads several loaders at the same time: the ranks meet for each batch, and some have "
        "one more than others, as the micro-batches do not divide among them. HINT: meet once, at the end of the epoch; or a "
        "number of ranks that divides the micro-batches."
    )
