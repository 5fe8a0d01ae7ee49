"""The order in which the ranks gather blocks and add up gradients: torch pairs what they send by this order alone.

Where a rank calls another block than the others, it would get the weights of theirs, and give them its gradients. So each rank
looks at what it is about to send: what has followed once, on all ranks, may follow again. Only where something new follows do
the ranks compare, on their hosts; a rank that does so alone reports that, and waits for the others.
"""

import hashlib
import logging
import time
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from project.cluster.group import Group
from project.errors import UserError, listed

log = logging.getLogger(__name__)

Op: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"

_PATIENCE = 20.0
"""Seconds that a rank waits, without a word, for the others where it goes another way than before: less than a watchdog's."""
_LONGEST, _DIGEST = 240, 16  # bytes of a text, and of its digest
_MOST = 100_000  # places that are kept: a network may go ever new ways, the same ones on all ranks
_END = "ends its forward and backward pass"
_RULE = (
    "All ranks must call the same blocks in the same order, and get gradients of the same parameters, since each has a "
    "shard of all. HINT: call every block in every micro-batch, and multiply by 0 what is not to count; or "
    "trainer.strategy=ddp_find_unused_parameters_true, where each rank has the whole network."
)


class Order:
    """Follows what this rank sends, one after the other: it is the same on all ranks, or there is a UserError.

    Args:
        group: of the hosts of all ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._next: dict[int, str] = {}
        """What followed last, on all ranks, by what came before it in the micro-batch."""
        self._place, self._count = 0, 0

    def begin(self, what: object) -> None:
        """Begins a micro-batch. `what` it is: what follows differs by that."""
        if self._place:
            self.note(_END)
        self._place = hash(what)

    def note(self, event: str) -> None:
        """Notes what this rank is about to do; raises a UserError where another rank does something else."""
        known = self._next.get(self._place)
        if known != event:
            self._compare(event, known)
            if len(self._next) >= _MOST:
                self._next.clear()
            self._next[self._place] = event
        self._place, self._count = hash((self._place, event)), self._count + 1

    def note_gradients(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        """Notes which parameters have a gradient after a backward pass."""
        if missing := [name for name, parameter in parameters if parameter.grad is None and parameter.requires_grad]:
            digest = hashlib.md5(" ".join(missing).encode(), usedforsecurity=False).hexdigest()
            self.note(f"has no gradient of {listed(missing, 3)} ({digest[:6]})")
        else:
            self.note(_END)

    def _compare(self, event: str, known: str | None) -> None:
        """Compares what all ranks do next. Where nothing is known to follow, all of them compare."""
        digest = hashlib.md5(f"{self._count} {event}".encode(), usedforsecurity=False).digest()
        own = torch.frombuffer(bytearray((digest + event.encode()[:_LONGEST]).ljust(_DIGEST + _LONGEST)), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        rank, until = dist.get_rank(), time.monotonic() + _PATIENCE
        work = dist.all_gather(rows, own, group=self._group(), async_op=True)
        while known and not work.is_completed() and time.monotonic() < until:
            time.sleep(0.001)
        if known and not work.is_completed():  # the watchdog ends the run, unless they are only late
            log.error(
                "strategy=sharded: rank %d %s, where until now it %s, and waits for all ranks to do so. %s",
                *(rank, event, known, _RULE),
            )
        work.wait()
        for other, row in enumerate(rows):
            if not torch.equal(row, own):
                text = bytes(row[_DIGEST:].tolist()).decode(errors="replace").strip()
                raise UserError(f"strategy=sharded: rank {rank} {event}, where rank {other} {text}. {_RULE}")


class Buffers:
    """Takes memory as `fully_shard` does by itself."""

    def __init__(self, order: Order, part: str) -> None:
        self.order, self.part = order, part

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(Buffers):
    """Gathers a part as `fully_shard` does by itself, in its place in the order."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.order.note(f"gathers {self.part}")
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class AddUp(Buffers):
    """Adds up the gradients of a part as `fully_shard` does by itself, in its place in the order."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Op, async_op: bool = False
    ) -> dist.Work | None:
        self.order.note(f"adds up {input_tensor.numel():,} gradients of {self.part}")
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
