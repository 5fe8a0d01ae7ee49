"""A step as a graph: recorded once, and from then on sent to the device as a whole, without the Python in between.

What is recorded is all that a micro-batch has the device do: what the data module does to a batch there, the forward and the
backward pass, and at the end of a step the check, clipping, the optimiser and batch norm's statistics. Micro-batches of
a step are of up to three kinds, each a graph of its own: the first clears the gradients, the last takes the step. Around them
the loop goes on as ever: it fetches batches, draws random numbers, and calls the hooks of a batch's start and end.

A graph repeats what it was recorded from, with the same memory. So only what says of itself that it can be recorded is:
modules, callbacks and data modules that are `InGraph`. Batches of another size, the first steps, those at which somebody
wants to look at the gradient, and everything that does not say so are taken one operation after the other.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchmetrics import Metric

from project.errors import UserError
from project.train.micro_batch import micro_batch

log = logging.getLogger(__name__)

Capture = Literal["auto", "none"]
Kind = Literal["only", "first", "middle", "last"]
"""Of a micro-batch, by its place in the step."""
FIRST: tuple[Kind, ...] = ("only", "first")
LAST: tuple[Kind, ...] = ("only", "last")

WITHIN = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""The hooks within a step."""


@runtime_checkable
class InGraph(Protocol):
    """What can be part of a graph. Its other hooks within a step are left out there."""

    recorded: frozenset[str]
    """Hooks that have the device do what belongs to the graph. They are called while it is recorded, and never again."""


@runtime_checkable
class ToldOfGraphs(Protocol):
    """What has something to do in place of the hooks that are left out."""

    def on_captured(self, trainer: Trainer, kind: Kind, replayed: bool) -> None:
        """After each micro-batch that was taken as a graph. `replayed`: and not recorded just now."""


class Recorder(Protocol):
    """Records what a device is asked to do."""

    def warm_up(self, shared: bool) -> int:
        """Steps that are to be taken before. `shared`: gradients are added up by DistributedDataParallel."""

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """How to have it done again, and what came out, which lies where it will lie then. It is done once here, too."""


class CudaGraphs:
    """Records with CUDA graphs, which share their memory: they run one after the other."""

    _pool: Any = None

    def warm_up(self, shared: bool) -> int:
        return 11 if shared else 3  # as PyTorch's notes on CUDA graphs ask for

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's, a checkpoint's) may go on using the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            made = work()
        graph.replay()  # nothing of it was done yet
        return graph.replay, made


@dataclass
class _Graph:
    """A micro-batch that was recorded: where its batch goes, and what comes out."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    made: Any


def one_by_one_next(trainer: Trainer) -> None:
    """The next step is taken one operation after the other, by all: somebody wants to look at it from within."""
    loop: Any = trainer.fit_loop.epoch_loop
    if loop.graphs is not None:
        loop.graphs.one_by_one = True


def is_recording(trainer: Trainer) -> bool:
    """Whether what the device is asked to do now is recorded, and will be done again without a word to anybody."""
    loop: Any = trainer.fit_loop.epoch_loop
    return loop.graphs is not None and loop.graphs.recording


def captures(trainer: Trainer) -> bool:
    """Whether steps of this fit may be taken as a graph."""
    loop: Any = trainer.fit_loop.epoch_loop
    return loop.recorder is not None


def say_why_not(trainer: Trainer, why: str) -> None:
    if trainer.is_global_zero:
        log.info("trainer.capture: steps are taken one operation after the other, as %s.", why)


def records(one: Any, hook: str) -> bool:
    """Whether what somebody does in this hook is part of the graph."""
    return declares(one, hook) and hook in one.recorded


def declares(one: Any, *methods: str) -> bool:
    """Whether somebody is `InGraph`, and not only a class that it was made from and whose methods it has exchanged."""
    if not isinstance(one, InGraph):
        return False
    said = next(at for at, kind in enumerate(type(one).__mro__) if "recorded" in vars(kind) or kind is object)
    return not any(method in vars(kind) for kind in type(one).__mro__[:said] for method in methods)


class Captured:
    """The steps of an epoch, as graphs.

    Args:
        mover: who brings a batch to the device, and changes it there.
    """

    one_by_one = recording = False

    def __init__(self, trainer: Trainer, recorder: Recorder, mover: Any, optimizer: Optimizer, is_fused: bool) -> None:
        self._trainer, self._recorder, self._optimizer, self._is_fused = trainer, recorder, optimizer, is_fused
        self.module = trainer.lightning_module
        self.with_transfer = records(mover, "on_after_batch_transfer")
        device = trainer.strategy.root_device
        self._rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self._known: list[float | None] = [None for _ in self._rates]
        shared = isinstance(trainer.strategy.model, DistributedDataParallel)
        self._left = recorder.warm_up(shared)
        self._said = self._goes_on = False
        self.ask_again()
        self._graphs: dict[Kind, _Graph] = {}
        self._gradients: list[Tensor | None] = []
        self._signature: Any = None
        self._set_up: Any = None

    def begin_epoch(self) -> None:
        """What a callback changes at its start may be part of the graphs."""
        self.ask_again()
        if (found := self._settings()) != self._set_up:
            self._graphs, self._set_up = {}, found

    def _settings(self) -> Any:
        """Of all parts of the network: the numbers and words that are no tensors."""
        parts = [one for one in self.module.modules() if one is not self.module and not isinstance(one, Metric)]
        kinds = (bool, int, float, str)
        settings = [{name: one for name, one in vars(part).items() if isinstance(one, kinds)} for part in parts]
        return id(self._trainer.strategy.model), settings

    def ask_again(self) -> None:
        """The callbacks are others now."""
        self._why_not: str | None = ""  # not asked yet
        self._tensors = [*self.module.parameters(), *self.module.buffers()]
        everybody = (*self._trainer.callbacks, self.module)  # type: ignore[attr-defined]
        self.told = [one for one in everybody if isinstance(one, ToldOfGraphs)]
        """Those that are told of each micro-batch that was taken as a graph."""

    # Which micro-batches ---------------------------------------------------------------------------------------------

    def takes(self, batch: Any, number: int, accumulates: bool) -> bool:
        """Whether the micro-batch at hand is taken as a graph: only where the first of its step was."""
        if number:
            return self._goes_on and self._fits(batch, self._kind(number, accumulates))
        self._goes_on = False
        if not self._may():
            self._left -= 1
            return False
        if _tensors(batch) is None:
            self._why_not = "a batch is not only tensors"
            self._say()
            return False
        self._set_rates()
        self._goes_on = self._fits(batch, self._kind(0, accumulates))
        return self._goes_on

    def _may(self) -> bool:
        wanted, self.one_by_one = self.one_by_one, False
        if self._left > 0 or wanted or micro_batch(self._trainer).weight != 1.0:
            return False
        if self._why_not == "":
            self._why_not = self._reason()
        if self._why_not:
            self._say()
            return False
        if (found := self._baked_in()) != self._signature:
            self._graphs, self._signature = {}, found
        return True

    def _say(self) -> None:
        if not self._said and self._why_not:
            say_why_not(self._trainer, self._why_not)
        self._said = True

    def _fits(self, batch: Any, kind: Kind) -> bool:
        known, found = self._graphs.get(kind), _tensors(batch)
        return found is not None and (known is None or list(map(_shape, known.inputs)) == list(map(_shape, found)))

    @staticmethod
    def _kind(number: int, accumulates: bool) -> Kind:
        if accumulates:
            return "middle" if number else "first"
        return "last" if number else "only"

    def _reason(self) -> str | None:
        """Why nothing can be recorded, if so."""
        module = self.module
        if not declares(module, "training_step", "forward", *WITHIN):
            return f"{type(module).__name__} does not say that it can be recorded (see docs/own.md)"
        if not self._is_fused:
            return f"{type(self._optimizer).__name__} is not fused"
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            name, home = type(callback).__name__, type(callback).__module__
            within = [hook for hook in WITHIN if is_overridden(hook, callback, Callback)]
            if within and not declares(callback, *WITHIN):
                return f"{name} has a hook within the step ({within[0]})"
            sees = is_overridden("on_train_batch_start", callback, Callback)
            if sees and self.with_transfer and not home.startswith(("project.", "lightning.")):
                return f"{name} may look at a batch before the step (on_train_batch_start)"
        for name, part in module.named_modules():
            if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
                return f"somebody has put a hook on {name or 'the module'}"
        return None

    def _baked_in(self) -> Any:
        """Where the tensors lie, and the numbers that are no tensors: another one is another graph."""
        groups = [
            [value for name, value in group.items() if name not in ("params", "lr", "capturable")]
            for group in self._optimizer.param_groups
        ]
        learning = [id(one) for group in self._optimizer.param_groups for one in group["params"] if one.requires_grad]
        modes = self.module.training, self._trainer.accumulate_grad_batches, self._trainer.gradient_clip_val
        return [one.data_ptr() for one in self._tensors], groups, learning, modes

    # A micro-batch ---------------------------------------------------------------------------------------------------

    def take(self, batch: Any, number: int, accumulates: bool, work: Callable[[Any], Any]) -> tuple[Any, Kind, bool]:
        """What `work` makes of the batch, which the next one of its kind overwrites; and whether it was but repeated."""
        kind = self._kind(number, accumulates)
        if graph := self._graphs.get(kind):
            if kind in FIRST:
                self._put_back_gradients()
            for place, tensor in zip(graph.inputs, _tensors(batch) or (), strict=True):
                place.copy_(tensor, non_blocking=True)
            graph.replay()
            return graph.made, kind, True
        own = apply_to_collection(batch, Tensor, _like)
        inputs = _tensors(own) or []  # `work` may take them out of the batch
        self.recording = True
        try:
            replay, made = self._recorder.record(lambda: work(own))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UserError(
                f"The step can't be recorded as a graph: {' '.join(str(error).split())[:500]} HINT: set trainer.capture=none."
            ) from error
        finally:
            self.recording = False
        self._graphs[kind] = _Graph(inputs, replay, made)
        if kind in FIRST:
            self._gradients = [one.grad for one in self._parameters()]
        return made, kind, False

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (one for group in self._optimizer.param_groups for one in group["params"])

    def _put_back_gradients(self) -> None:
        """A step that was taken otherwise has left others."""
        for one, gradient in zip(self._parameters(), self._gradients, strict=True):
            one.grad = gradient

    # Learning rates --------------------------------------------------------------------------------------------------

    def _set_rates(self) -> None:
        """Those of this step, where the graph looks for them."""
        for at, group in enumerate(self._optimizer.param_groups):
            if group["lr"] != self._known[at]:
                self._known[at] = group["lr"]
                self._rates[at].fill_(group["lr"])

    @contextmanager
    def rates(self) -> Iterator[None]:
        """The optimiser finds its learning rates on the device; in a step that is not recorded, too, for the same result."""
        if not self._is_fused:  # it would have to look at them; nor can it be recorded
            yield
            return
        groups: Sequence[dict[str, Any]] = self._optimizer.param_groups
        if not self.recording:
            self._set_rates()
        before = [(group["lr"], group.get("capturable")) for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if rate.is_cuda and "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, (rate_before, capturable) in zip(groups, before, strict=True):
                group["lr"] = rate_before
                if capturable is not None:
                    group["capturable"] = capturable


def _tensors(batch: Any) -> list[Tensor] | None:
    """All of a batch; None if there is something else in it."""
    if isinstance(batch, Tensor):
        return [batch]
    if not isinstance(batch, (dict, list, tuple)):
        return None
    parts = [_tensors(one) for one in (batch.values() if isinstance(batch, dict) else batch)]
    return None if None in parts else [tensor for part in parts if part is not None for tensor in part]


def _like(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as it does: a part of another tensor may have gaps."""
    made = tensor.clone()
    if made.stride() != tensor.stride() and 0 not in tensor.stride():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return made


def _shape(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.stride()
