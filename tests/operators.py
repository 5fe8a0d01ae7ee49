"""What the device is asked to do, counted."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {
    "unsqueeze",
    "unbind",
    "permute",
    "view",
    "_unsafe_view",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "expand",
    "t",
    "detach",
    "alias",
}
"""They move nothing: no device hears of them."""


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    @property
    def launches(self) -> int:
        """Those that a device would be sent."""
        return sum(count for name, count in self.count.items() if name not in VIEWS)
