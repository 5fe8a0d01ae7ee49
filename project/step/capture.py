"""Takes steps as CUDA graphs: recorded once, and from then on sent to the device as a whole, without the Python in between.

A graph holds all that a micro-batch has the device do: the data module's work on a batch there, the forward and the backward
pass, and at the end of a step the check, clipping, the optimiser, batch norm's statistics and the checksums. The micro-batches
of a step are of up to three kinds, each a graph of its own: the first clears the gradients, the last takes the step.

A graph repeats operators, with the same memory, and calls nobody. So what is in it (`capturable = True`, see docs/own.md)
leaves everything on the host as it is, and has the device work on tensors that stay where they are. What the host has to do
for a step it does in `on_train_batch_start` and `on_train_batch_end`, which are called around every micro-batch.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from project.errors import UserError
from project.step.optimizers import is_fused
from project.step.runner import Outputs, Runner, Train, Transfer
from project.step.state import step_state
from project.typed import Batch, typed

log = logging.getLogger(__name__)

Capture = Literal["auto", "none"]
Kind = Literal["only", "first", "middle", "last"]
"""A micro-batch's place in its step."""

T = TypeVar("T")
Taken: TypeAlias = tuple[Outputs, Batch, Tensor, Tensor | None]
"""A micro-batch that was taken: its outputs, the batch on the device, the loss, and the gradient's norm, if it was clipped."""
Shapes: TypeAlias = list[tuple[torch.Size, torch.dtype]]

HOOKS_WITHIN_STEP = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Lightning's hooks within a step."""
_BY_GRAPH = ("lr", "capturable")  # settings of an optimiser that are others in a graph


@runtime_checkable
class Capturable(Protocol):
    """A part of a step that says whether it can be in a graph."""

    capturable: bool


def is_capturable(part: object, *methods: str) -> bool:
    """Returns whether a part of a step can be in a graph. A class that gives one of `methods` anew says so anew, too."""
    if not isinstance(part, Capturable) or not part.capturable:
        return False
    classes = type(part).__mro__
    declared = next(at for at, kind in enumerate(classes) if "capturable" in vars(kind) or kind is object)
    return not any(method in vars(kind) for kind in classes[:declared] for method in methods)


@dataclass
class _Graph:
    """A micro-batch that was recorded: where its batch is copied to, and what comes out."""

    replay: Callable[[], None]
    outputs: Taken
    inputs: list[Tensor]
    shapes: Shapes | None
    gradients: list[Tensor | None]


def _record_graph(work: Callable[[], T], pool: Any = None) -> tuple[Callable[[], None], T]:
    """Records work as a CUDA graph; returns a function that replays it, and its outputs, which are not computed yet."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may use the device meanwhile
        made = work()
    return graph.replay, made


class StepGraphs(Runner):
    """Runs the micro-batches of a fit as graphs, where that is possible. `transfer_owner` changes a batch on the device."""

    keeps_norm = True

    def __init__(self, trainer: Trainer, transfer_owner: object) -> None:
        self._trainer, self._transfer_owner = trainer, transfer_owner
        self.module, self._optimizer = trainer.lightning_module, trainer.optimizers[0]
        self._rates: list[Tensor] = []
        self._known_rates: list[float | None] = []
        self._wrapped: nn.Module | None = None  # what the strategy has made of the module
        self._eager_steps = 0
        self._began_as_graph = False  # the step at hand began as a graph
        self._kind: Kind | None = None  # of the micro-batch at hand; None: it is taken eagerly
        self._graphs: dict[Kind, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._refusal: str | None = None
        self._has_refused = False
        self._signature: tuple[object, ...] = ()
        self._settings: list[dict[str, bool | int | float | str]] = []

    def begin_epoch(self) -> None:
        """Checks again what takes part in a step, and notes the numbers that graphs hold fixed."""
        self.change_callbacks()
        parts = [part for part in self.module.modules() if part is not self.module and not isinstance(part, Metric)]
        self._settings = [
            {name: value for name, value in vars(part).items() if isinstance(value, (bool, int, float, str))} for part in parts
        ]

    def change_callbacks(self) -> None:
        """Finds out whether steps can be recorded."""
        self._tensors = [*self.module.parameters(), *self.module.buffers()]
        self._parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        self._refuse(self._why_not_recordable())

    def _refuse(self, reason: str | None) -> None:
        """Keeps why steps can't be recorded (None: they can), and logs the first reason."""
        self._refusal = reason
        if reason and not self._has_refused:
            self._has_refused = True
            _log_refusal(self._trainer, reason)

    def _why_not_recordable(self) -> str | None:
        """Returns why steps can't be recorded; None where they can."""
        module, hook = self.module, "on_after_batch_transfer"
        for part, methods in ((module, ("training_step", "forward", *HOOKS_WITHIN_STEP)), (self._transfer_owner, (hook,))):
            if not is_capturable(part, *methods):
                return f"{type(part).__name__} is not capturable (see docs/own.md)"
        if not is_fused(self._optimizer):
            return f"{type(self._optimizer).__name__} is not fused"
        for callback in typed(self._trainer).callbacks:
            home = type(callback).__module__.partition(".")[0]
            within = [name for name in HOOKS_WITHIN_STEP if is_overridden(name, callback, Callback)]
            if (
                within and home != "project" and not is_capturable(callback, *HOOKS_WITHIN_STEP)
            ):  # of ours, the others only look on
                return f"{type(callback).__name__} has a hook within the step ({within[0]})"
            if home not in ("project", "lightning") and is_overridden("on_train_batch_start", callback, Callback):
                return f"{type(callback).__name__} may look at a batch before the step (on_train_batch_start)"
        for name, part in module.named_modules():
            if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
                return f"there is a hook on {name or 'the module'}"
        return None

    def prepare(self, batch: Batch, number: int, accumulates: bool, transfer: Transfer) -> Batch:
        """Chooses how the micro-batch is taken: eagerly, as all of a step are if its first is, or as a graph, which holds the
        data module's work on it, too.
        """
        kind: Kind = ("middle" if number else "first") if accumulates else ("last" if number else "only")
        shapes, known = _shapes(batch), self._graphs.get(kind)
        if shapes is None:
            self._refuse("a batch is not only tensors")
        if not number:
            self._began_as_graph = self._begin_step_as_graph()
        fits = self._began_as_graph and shapes and (known is None or known.shapes == shapes)
        self._kind = kind if fits else None
        return batch if fits else transfer(batch, 0)

    def _begin_step_as_graph(self) -> bool:
        """Returns whether the step at hand is taken by graphs: after enough eager steps, and where nothing that they hold fixed
        has changed.
        """
        if self._refusal or step_state(self._trainer).micro_batch.weight != 1.0:
            return False
        if (wrapped := self._trainer.strategy.model) is not self._wrapped:
            # Steps before the first graph, as PyTorch's notes on CUDA graphs ask for; a new DistributedDataParallel, too.
            self._wrapped, self._eager_steps = wrapped, 11 if isinstance(wrapped, DistributedDataParallel) else 3
        if (signature := self._recorded_constants()) != self._signature:
            self._signature, self._graphs = signature, {}
            self._eager_steps = max(1, self._eager_steps)  # in which everybody finds what has changed
        self._set_rates()
        self._eager_steps -= 1
        return self._eager_steps < 0

    def _recorded_constants(self) -> tuple[object, ...]:
        """Returns what graphs hold fixed: where tensors lie, and numbers that are no tensors. Where one changes, graphs are
        recorded anew.
        """
        groups = [
            [value for name, value in group.items() if name not in ("params", *_BY_GRAPH)]
            for group in self._optimizer.param_groups
        ]
        learning = [id(parameter) for parameter in self._parameters if parameter.requires_grad]
        trainer = self._trainer
        modes = self.module.training, trainer.accumulate_grad_batches, trainer.gradient_clip_val, id(trainer.strategy.model)
        states = chain.from_iterable(map(dict.values, self._optimizer.state.values()))
        kept = [value.data_ptr() for value in states if isinstance(value, Tensor)]
        return [*map(Tensor.data_ptr, self._tensors)], kept, groups, learning, modes, self._settings

    def run(self, batch: Batch, transfer: Transfer, train: Train) -> tuple[Outputs, Batch]:
        state = step_state(self._trainer)
        if self._kind is None:
            outputs = train(batch)
            for name, value in outputs.items():  # a graph would return it as recorded
                if not all(isinstance(element, Tensor) for element in _elements(value)):
                    self._refuse(f"training_step gives {name!r}, which is not only tensors ({type(value).__name__})")
            return outputs, batch

        def work(batch: Batch) -> Taken:
            state.recording = True
            try:
                batch = transfer(batch, 0)
                outputs = train(batch)
            finally:
                state.recording = False
            assert state.loss is not None
            return outputs, batch, state.loss, state.clipped_norm

        outputs, batch, loss, state.clipped_norm = self._replay(self._kind, batch, work)
        state.has_loss, state.loss = True, loss.clone()  # the next micro-batch of its kind overwrites it
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in outputs.items()}, batch

    def _replay(self, kind: Kind, batch: Batch, work: Callable[[Batch], Taken]) -> Taken:
        """Returns what `work` makes of the batch, by its graph, which is recorded where there is none."""
        graph = self._graphs.get(kind)
        if graph is None:
            graph = self._graphs[kind] = self._record(batch, work)
        else:
            for place, tensor in zip(graph.inputs, _tensors(batch), strict=True):
                place.copy_(tensor, non_blocking=True)
        graph.replay()
        for parameter, gradient in zip(self._parameters, graph.gradients, strict=True):
            parameter.grad = gradient  # another kind, or an eager step, has left others
        return graph.outputs

    def _record(self, batch: Batch, work: Callable[[Batch], Taken]) -> _Graph:
        """Records a micro-batch as a graph, with a copy of its batch as input."""
        own = apply_to_collection(batch, Tensor, torch.clone)
        inputs = _tensors(own)  # `work` may take them out of the batch
        try:
            replay, made = _record_graph(lambda: work(own), self._pool)
            return _Graph(replay, made, inputs, _shapes(batch), [parameter.grad for parameter in self._parameters])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UserError(
                f"The step can't be recorded as a graph: {' '.join(str(error).split())[:500]} HINT: set trainer.capture=none."
            ) from error

    def _set_rates(self) -> None:
        """Writes the optimiser's learning rates into the tensors that graphs read."""
        groups = self._optimizer.param_groups
        if len(self._rates) != len(groups):  # layers were unfrozen, or frozen: graphs are recorded anew
            self._rates = [torch.zeros((), device=self._trainer.strategy.root_device) for _ in groups]
            self._known_rates = [None for _ in groups]
        for at, group in enumerate(groups):
            rate = group["lr"]
            if isinstance(rate, Tensor) and rate.is_cuda:  # which a schedule changes in place
                self._rates[at].copy_(rate)
            elif (number := float(rate)) != self._known_rates[at]:
                self._known_rates[at] = number
                self._rates[at].fill_(number)

    @contextmanager
    def rates(self) -> Iterator[None]:
        """Gives the optimiser learning rates that a graph can read, as tensors: in an eager step, too, for the same bits."""
        if self._refusal:
            yield
            return
        if not step_state(self._trainer).recording:
            self._set_rates()
        groups = self._optimizer.param_groups
        before = [{name: group[name] for name in _BY_GRAPH if name in group} for group in groups]
        for group, rate, known in zip(groups, self._rates, before, strict=True):
            group.update(dict.fromkeys(known, True), lr=rate)
        try:
            yield
        finally:
            for group, known in zip(groups, before, strict=True):
                group.update(known)

    def repeated(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return _RecordedWork(work)


class _RecordedWork:
    """Work that always does the same with the same memory: replayed as a CUDA graph from the second call on."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self._work, self._is_warm = work, False
        self._graph: tuple[Callable[[], None], Tensor] | None = None

    def __call__(self) -> Tensor:
        if not self._is_warm:
            self._is_warm = True
            return self._work()
        replay, made = self._graph = self._graph or _record_graph(self._work)
        replay()
        return made.clone()


def choose_runner(trainer: Trainer, transfer_owner: object, why_not: str | None) -> Runner:
    """Returns the runner of an epoch's micro-batches, with trainer.capture. `why_not`: why Lightning's own loop takes the
    steps, or None.
    """
    before = step_state(trainer).runner
    why_not = why_not or typed(trainer).gradients.why_no_graph
    if torch.is_anomaly_enabled():
        why_not = why_not or "trainer.detect_anomaly has the host look at each gradient"
    if why_not is None:
        same = isinstance(before, StepGraphs) and before.module is trainer.lightning_module
        return before if same else StepGraphs(trainer, transfer_owner)
    if not isinstance(before, _NoGraphs):
        _log_refusal(trainer, why_not)
    return _NoGraphs()


class _NoGraphs(Runner):
    """Runs the micro-batches of a fit of which no step can be a graph, as the log says."""


def _log_refusal(trainer: Trainer, reason: str) -> None:
    if trainer.is_global_zero:
        log.info("trainer.capture: steps are taken one operation after the other, as %s.", reason)


def _shapes(batch: Batch) -> Shapes | None:
    """Returns what tells a batch from one of another size; None if it holds more than tensors."""
    if not all(isinstance(element, Tensor) for element in _elements(batch)):
        return None
    return [(tensor.shape, tensor.dtype) for tensor in _tensors(batch)]


def _tensors(batch: Batch) -> list[Tensor]:
    return [element for element in _elements(batch) if isinstance(element, Tensor)]


def _elements(batch: object) -> Iterator[object]:
    """Yields all tensors of a batch, and everything else in it."""
    if isinstance(batch, (dict, list, tuple)):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _elements(part)
    else:
        yield batch
