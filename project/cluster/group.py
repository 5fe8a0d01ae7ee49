"""A process group of all ranks for control messages between the hosts, separate from that of the gradients."""

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch.distributed as dist


class Group:
    """A process group that all ranks make at once; torch owns it, and it ends with the connections. A copy must be made
    again."""

    def __init__(self) -> None:
        self._reference: Callable[[], dist.ProcessGroup | None] | None = None

    def make(self, timeout: timedelta | None = None, members: list[list[int]] | None = None) -> None:
        """Makes the group. `timeout`: how long it waits for a rank; None: as long as torch waits. `members`: not all ranks at
        once, but each of these groups."""
        if self() is not None:
            return
        if members is None:
            group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))
        else:
            group, _ = cast(
                tuple[dist.ProcessGroup, object], dist.new_subgroups_by_enumeration(members, timeout=timeout, backend="gloo")
            )
        self._reference = weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup | None:
        """Returns torch's group; None where there is none yet, or none any more."""
        return None if self._reference is None else self._reference()

    def __reduce__(self) -> tuple[type["Group"], tuple[()]]:
        return Group, ()
