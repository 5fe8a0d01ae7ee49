"""Adds up gradients over the ranks: by DistributedDataParallel, always in the same order, also after a restart.

A ring adds up the ranks' values in an order that depends on where in its bucket a gradient lies, and with three ranks and more
the order shows in the last bit. DistributedDataParallel fills its buckets anew in the second iteration, in the order in which
gradients came; so the first step after a restart would be added up in another order than the same step of a run that was not
interrupted. Here the buckets are filled once, before the first step, in the reversed order of the parameters, which is about
the order in which their gradients come.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from project.errors import UserError
from project.step.batch_norm_layers import batch_norms

T = TypeVar("T")

_NEW, _OLD = "forward_sync_buffers", "broadcast_buffers"  # since torch 2.15, and before
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # where torch looks for names that a module wants left to each rank
_SYNC_BUFFERS = _NEW if _NEW in inspect.signature(DistributedDataParallel).parameters else _OLD


def all_gather_objects(value: T, ranks: int, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the objects of all ranks, or of a group's, by rank. Called by all of them together."""
    brought = [value] * max(1, ranks)
    if ranks > 1:
        dist.all_gather_object(brought, value, group=group)
    return brought


def all_gather_numbers(numbers: list[float], ranks: int) -> list[list[float]]:
    """Returns the numbers of all ranks, by rank; each rank has as many. Takes a tenth of the time of `all_gather_objects`."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    brought = torch.empty(ranks * len(numbers), dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(brought, torch.tensor(numbers, dtype=torch.float64, device=device))
    rows: list[list[float]] = brought.view(ranks, -1).tolist()
    return rows


def _trainable(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


@contextmanager
def own_stream() -> Iterator[None]:
    """Runs the device's work within on another stream: after what was queued before, and before what follows."""
    before, own = torch.cuda.current_stream(), torch.cuda.Stream()
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield
    before.wait_stream(own)


def ignored_by_ddp(module: nn.Module) -> set[str]:
    """Returns the names of the parameters and buffers that a module has torch's DistributedDataParallel ignore."""
    return {*module.__dict__.get(_IGNORED, ())}


def left_to_ranks(module: nn.Module) -> set[str]:
    """Returns the names of what no rank sends in a step: what a module has ignored, and batch norm's, equal on all ranks."""
    norms = batch_norms(module)
    return ignored_by_ddp(module) | {f"{name}.{at}" for name, norm in norms for at, _ in norm.named_buffers(recurse=False)}


class OrderedDDP(DistributedDataParallel):
    """DistributedDataParallel whose buckets never change.

    Buffers that a network moves by itself are rank 0's, as DistributedDataParallel has it; batch norm's are all ranks'.
    """

    def __init__(self, module: nn.Module, for_graphs: bool = False, **settings: Any) -> None:
        ignored = left_to_ranks(module)
        self._set_params_and_buffers_to_ignore_for_model(module, [*ignored])  # type: ignore[no-untyped-call]
        others = [name for name, _ in module.named_buffers() if name not in ignored]
        defaults = {_SYNC_BUFFERS: bool(others)} if _OLD not in settings else {}
        on_gpu = bool(settings.get("device_ids"))
        if on_gpu:  # what has been added up need not be copied back to the gradients; a CPU gains nothing by it
            defaults["gradient_as_bucket_view"] = True
        # A graph needs a stream of its own here; elsewhere every gradient would then have to wait for that stream.
        with own_stream() if on_gpu and for_graphs else nullcontext():
            super().__init__(module, **{**defaults, **settings})
            # What is rebuilt once is never rebuilt again. Two kinds are never rebuilt, or not until they know their graph.
            if not self.find_unused_parameters and not self.static_graph:
                self.reducer._push_all_rebuilt_params()
                self.reducer._rebuild_buckets()
        self.trainable_at_start, self._for_graphs, self._settings = _trainable(module), for_graphs, settings
        """`trainable_at_start`: the `id` of each parameter whose gradient it adds up."""
        self._known = [*module.parameters()]
        self._learned_at_start = [parameter.requires_grad for parameter in self._known]
        self._hooks: list[tuple[object, Callable[..., object]]] = []

    @property
    def outdated(self) -> bool:
        """Returns whether other parameters learn than when it was made. Read at each step, and so only of the parameters of
        that time.
        """
        return [parameter.requires_grad for parameter in self._known] != self._learned_at_start

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves gradients to each rank within. Those of a static graph are added up nevertheless: torch learns the graph in
        the first backward pass, and fails where it adds up nothing in it; and a step after a restart must be as any other.
        """
        with nullcontext() if self.static_graph else super().no_sync():
            yield

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        super().register_comm_hook(state, hook)
        self._hooks.append((state, hook))

    def wrapped_again(self, module: nn.Module, sends_weights: bool) -> "OrderedDDP":
        """Returns a new wrapper of the module, for the parameters that learn now. This one is of no use any more.

        `sends_weights`: all ranks get rank 0's, which would count as a change of what a forward pass has read.
        """
        del self.reducer, self.logger  # what they have hooked to the parameters goes with them
        new = OrderedDDP(module, self._for_graphs, **{**self._settings, "init_sync": sends_weights})
        for state, hook in self._hooks:
            new.register_comm_hook(state, hook)
        return new

    def _build_params_for_reducer(self) -> tuple[list[Tensor], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]


def use_ordered_ddp(strategy: DDPStrategy, for_graphs: bool = False) -> None:
    """Makes Lightning's strategy wrap the module in OrderedDDP; on a single rank in nothing, as it need not copy gradients into
    buckets.
    """
    if strategy.world_size == 1:
        strategy.configure_ddp = _wrap_in_nothing  # type: ignore[method-assign]
    else:
        strategy._setup_model = partial(_ordered_ddp, strategy, for_graphs)  # type: ignore[method-assign]
        strategy.on_train_batch_start = partial(_wrap_again_before_step, strategy)  # type: ignore[method-assign]


def _wrap_in_nothing() -> None:
    """Leaves the module as it is. A function of the file, as ddp_spawn pickles the strategy."""


def use_exact_gradients(strategy: DDPStrategy) -> None:
    """Makes Lightning's strategy only send rank 0's weights at the start: gradients are added up elsewhere
    (exact/gradients.py).
    """
    strategy.configure_ddp = partial(_broadcast_module, strategy)  # type: ignore[method-assign]


def _broadcast_module(strategy: DDPStrategy) -> None:
    if strategy.world_size > 1 and strategy.model is not None:
        refuse_lazy(strategy.model)
        broadcast_from_rank_0((*strategy.model.parameters(), *strategy.model.buffers()))


def refuse_lazy(module: nn.Module) -> None:
    """Raises a UserError where a tensor has no shape yet. Ranks begin with rank 0's weights; exact sums go by the shapes."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                f"{name} has no shape before the first batch; several ranks, and trainer.exact, need it from the beginning. "
                "HINT: compute a batch of zeros, once, at the end of __init__ or in configure_model."
            )


def broadcast_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Gives all ranks rank 0's values, to the bit, of any type and layout: NCCL sends no gaps, and not all types."""
    for tensor in tensors:
        values = tensor.detach().contiguous()
        dist.broadcast(values.flatten().view(torch.uint8), 0)
        if not tensor.is_contiguous():
            tensor.detach().copy_(values)


def broadcast_together(tensors: Iterable[Tensor]) -> None:
    """Gives all ranks rank 0's values, with one message for each type."""
    of_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        of_type.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    for same in of_type.values():
        flat = torch.cat([tensor.flatten() for tensor in same])
        broadcast_from_rank_0([flat])
        for tensor, values in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def refuse_sync_batch_norm_on_cpu(module: nn.Module, device: torch.device) -> None:
    """Raises a UserError for layers that trainer.sync_batchnorm has made, where ranks compute on CPUs."""
    if device.type == "cpu" and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        raise UserError(
            "torch's SyncBatchNorm, which trainer.sync_batchnorm=true puts into a network, works on GPUs alone. HINT: "
            "trainer.sync_batchnorm=false, and BatchNorm in its place, which a larger batch_size shows more samples at a time."
        )


def _ordered_ddp(strategy: DDPStrategy, for_graphs: bool, module: nn.Module) -> OrderedDDP:
    """Wraps the module with the settings that the user gave the strategy, as Lightning does with torch's own class."""
    refuse_lazy(module)
    refuse_sync_batch_norm_on_cpu(module, strategy.root_device)
    return OrderedDDP(module, for_graphs, device_ids=strategy.determine_ddp_device_ids(), **strategy._ddp_kwargs)


def _wrap_again_before_step(strategy: DDPStrategy, batch: object, batch_idx: int) -> None:
    """Wraps the module again if needed, before a step; within it gradients are there already. Called after all hooks of that
    name, which may have unfrozen a layer.
    """
    module = strategy.lightning_module
    assert module is not None
    if (
        batch_idx % module.trainer.accumulate_grad_batches == 0
        and isinstance(strategy.model, OrderedDDP)
        and strategy.model.outdated
    ):
        wrap_again_if_outdated(strategy, module)


def wrap_again_before_backward(strategy: Strategy, loss: Tensor) -> None:
    """Wraps the module again if its forward pass has frozen or unfrozen layers: the wrapper of before would wait for gradients
    that never come, and sum none. One that looks for unused parameters, or has a static graph, knows them by that.
    """
    module, model = strategy.lightning_module, strategy.model
    if (
        isinstance(strategy, DDPStrategy)
        and isinstance(model, OrderedDDP)
        and module is not None
        and module.automatic_optimization
        and model.require_backward_grad_sync
        and not (model.find_unused_parameters or model.static_graph)
        and model.outdated
    ):
        wrap_again_if_outdated(strategy, module, sends_weights=False)
        assert isinstance(strategy.model, OrderedDDP)
        prepare_for_backward(strategy.model, loss)


def wrap_again_if_outdated(strategy: DDPStrategy, module: nn.Module, sends_weights: bool = True) -> None:
    """Wraps the module again if other parameters learn than before: DistributedDataParallel knows those that it began with, and
    would leave the gradients of the others to each rank.
    """
    before = strategy.model
    if isinstance(before, OrderedDDP) and before.trainable_at_start != _trainable(module):
        strategy.model = before.wrapped_again(module, sends_weights)
