"""Where the time of a step goes, seen from outside: the same marks in our training and in the plain loop."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from project.data.dealing import DealtLoader
from scripts.bench.clock import Clock, clock

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


class LastGradient:
    """Finds out in one step which parameter's gradient comes last, so that in all others only that one is heard."""

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._hooks: list[Any] = []
        self._hooks.append(nn.modules.module.register_module_forward_pre_hook(self._begins))

    def _begins(self, module: nn.Module, inputs: Any) -> None:
        """The first module that learns is the whole network. A metric is a module, too, and so is the twin without values by
        which operations are counted."""
        learning = [parameter for parameter in module.parameters() if parameter.requires_grad and not parameter.is_meta]
        if learning:
            self.end()
            self._hooks = [parameter.register_post_accumulate_grad_hook(self._note) for parameter in learning]

    def _note(self, parameter: Tensor) -> None:
        self._last = parameter

    def end(self) -> Tensor | None:
        """The parameter, after that step."""
        while self._hooks:
            self._hooks.pop().remove()
        return self._last


class Phases:
    """Seconds that this process spends in each phase, from now until `end`; on a GPU, that the GPU does.

    A phase lasts from one mark to the next: the loader is asked and answers (data), the network begins (copy, which is the
    way to the device and what is done there first), the backward pass begins (forward, with the loss), the last gradient is
    there (backward), DDP has summed it up (sync), the optimiser is through (optimiser); the rest, until the loader is asked
    again, is for logging, metrics and whatever a framework does. A step that is replayed from a CUDA graph calls nothing that
    could be marked: all of it is in the last phase.

    Args:
        last_gradient: the parameter whose gradient comes last, from `LastGradient`.
        clock_: what a mark notes; nobody waits for the device before `end`.
    """

    def __init__(self, last_gradient: Tensor | None, clock_: Clock | None = None) -> None:
        self._clock = clock_ or clock()
        self._marks: list[tuple[str, Any]] = []
        self._undo: list[Callable[[], None]] = []
        self._deep = 0
        self._watch(last_gradient)
        self.mark("")

    def end(self) -> dict[str, float]:
        self.mark("logging")
        for undo in reversed(self._undo):
            undo()
        self._clock.wait(self._marks[-1][1])  # the only time, and the turn is over
        spent: dict[str, float] = defaultdict(float)
        for (_, start), (phase, end) in pairwise(self._marks):
            spent[phase] += self._clock.seconds(start, end)
        return {name: spent[name] for name in NAMES}

    def mark(self, phase: str) -> None:
        """What was since the last mark was this."""
        self._marks.append((phase, self._clock.now()))

    def _watch(self, last_gradient: Tensor | None) -> None:
        _measuring.append(self)
        self._around(Tensor, "backward", "forward", "sync")
        networks = nn.modules.module
        self._undo += [
            partial(_measuring.remove, self),
            networks.register_module_forward_pre_hook(self._begin_forward).remove,
            networks.register_module_forward_hook(self._end_forward, always_call=True).remove,
            register_optimizer_step_post_hook(lambda *_: self.mark("optimiser")).remove,
        ]
        if last_gradient is not None:
            hook = last_gradient.register_post_accumulate_grad_hook(lambda _: self.mark("backward"))
            self._undo.append(hook.remove)

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
        self._deep += 1

    def _end_forward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self._deep -= 1
