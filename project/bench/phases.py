"""Where the time of a step goes, seen from outside: the same marks in our training and in the plain loop."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from project.data.dealing import DealtLoader

NAMES = ("data", "copy", "forward", "backward", "sync", "optimiser", "logging")


_measuring: list["Phases"] = []  # what is told of the loaders; one at most


def watch_loaders() -> None:
    """Whoever begins to iterate over a loader from now on can be measured. Called before training begins, once."""
    for kind in (DataLoader, DealtLoader):  # ours may get its batches without DataLoader's own iterator
        _watch(kind)


def _watch(kind: Any) -> None:
    begin = kind.__iter__

    def begin_watched(loader: Any) -> Iterator[Any]:
        return _answers(begin(loader))  # the loader's processes start now, and not with the first batch

    kind.__iter__ = begin_watched


def _answers(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        for phases in _measuring:
            phases.mark("logging")
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            for phases in _measuring:
                phases.mark("data")
        yield batch


class Phases:
    """Seconds that this process spends in each phase, from now until `end`.

    A phase lasts from one mark to the next: the loader is asked and answers (data), the network begins (copy, which is the
    way to the device and what is done there first), the backward pass begins (forward, with the loss), the last gradient is
    there (backward), DDP has summed it up (sync), the optimiser is through (optimiser); the rest, until the loader is asked
    again, is for logging, metrics and whatever a framework does. On a GPU every mark waits for the device.
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._now = time.perf_counter()
        self._undo: list[Callable[[], None]] = []
        self._deep, self._hooked = 0, False
        self._watch()

    def end(self) -> dict[str, float]:
        self.mark("logging")
        for undo in reversed(self._undo):
            undo()
        return {name: self._spent[name] for name in NAMES}

    def mark(self, phase: str) -> None:
        """What was since the last mark was this."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._spent[phase] += now - self._now
        self._now = now

    def _watch(self) -> None:
        _measuring.append(self)
        self._around(torch.Tensor, "backward", "forward", "sync")
        networks = nn.modules.module
        self._undo += [
            partial(_measuring.remove, self),
            networks.register_module_forward_pre_hook(self._begin_forward).remove,
            networks.register_module_forward_hook(self._end_forward, always_call=True).remove,
            register_optimizer_step_post_hook(lambda *_: self.mark("optimiser")).remove,
        ]

    def _around(self, owner: Any, name: str, before: str, after: str) -> None:
        """Marks where a method begins and ends."""
        inner = getattr(owner, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            self.mark(before)
            try:
                return inner(*args, **kwargs)
            finally:
                self.mark(after)

        setattr(owner, name, marked)
        self._undo.append(lambda: setattr(owner, name, inner))

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        if not self._deep:
            self.mark("copy")
            if not self._hooked:
                self._hooked = True
                for parameter in module.parameters():  # whichever gradient comes last
                    hook = parameter.register_post_accumulate_grad_hook(lambda _: self.mark("backward"))  # type: ignore[no-untyped-call]
                    self._undo.append(hook.remove)
        self._deep += 1

    def _end_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._deep -= 1
