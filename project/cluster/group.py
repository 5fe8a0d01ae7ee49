"""A group of all ranks for what the hosts tell each other, beside the gradients."""

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class Group:
    """Made by all ranks at once; torch owns it, and it ends with the connections. A copy has to be made again."""

    def __init__(self) -> None:
        self._found: Callable[[], Any] | None = None

    def make(self, timeout: timedelta | None = None) -> None:
        """`timeout`: how long a rank is waited for; None: as long as torch waits."""
        if self() is None:
            self._found = weakref.ref(dist.new_group(backend="gloo", timeout=timeout))

    def __call__(self) -> Any:
        """torch's group; None where there is none, or no more."""
        return None if self._found is None else self._found()

    def __reduce__(self) -> tuple[type["Group"], tuple[()]]:
        return Group, ()
