"""In place of CUDA's graphs, on a CPU: what a step asks for is recorded, operator by operator, and done again.

As with a graph, only operators are repeated, with the same memory. What Python decided or computed in between stays as it was.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "equal"):
            raise RuntimeError(f"{name} waits for the device, which is not possible in a graph")
        made = func(*args, **(kwargs or {}))
        self.asked.append((func, args, kwargs or {}, made))
        return made


class OnCpu:
    """Has what a graph would do done again."""

    def __init__(self, steps: int = 3) -> None:
        self.steps, self.recorded, self.replayed = steps, 0, 0

    def warm_up(self, shared: bool) -> int:
        return self.steps

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        with Record() as record:
            made = work()
        return lambda: self._replay(record.asked), made

    @torch.no_grad()
    def _replay(self, asked: Any) -> None:
        self.replayed += 1
        for func, args, kwargs, made in asked:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
                elif not isinstance(old, torch.Tensor) and hasattr(new, "wait"):
                    new.wait()
