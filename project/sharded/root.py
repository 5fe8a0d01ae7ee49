"""The root of a network that is spread: it gathers what is in no block before each of its steps, as before its `forward`."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from project.errors import UserError, listed
from project.sharded.order import AddUp, Gather, Order
from project.sharded.replaced import Replaced
from project.step.bits import sum_of_bits
from project.step.ddp import broadcast_together, left_to_ranks
from project.step.state import step_state

T = TypeVar("T")
Hooks: TypeAlias = OrderedDict[int, Callable[..., object]]

_STEP = "step_of_root"
_STEPS = 3  # in the first one what is written may be what is there: a teacher's average with itself

if TYPE_CHECKING:

    class Part(FSDPModule, nn.Module):
        """A module that `fully_shard` was applied to."""

        def set_custom_all_gather(self, comm: object) -> None: ...

        def set_custom_reduce_scatter(self, comm: object) -> None: ...

    class RootPart(Part, LightningModule):
        """The LightningModule that it was applied to."""


def _call(step: Callable[..., T], *args: object, **kwargs: object) -> T:
    return step(*args, **kwargs)


class Root:
    """A LightningModule that `fully_shard` was applied to, after its blocks.

    Args:
        module: the root.
        exact: gradients are added up elsewhere (exact/gradients.py).
        keeps_gathered: blocks stay gathered from the forward pass to the backward pass.
        gathered_as: the type that parameters are gathered in, if it is another, and that what floats a batch has are to be of.
        offloaded: parameters lie in the host's memory.
        order: what the ranks send, where there are several.
    """

    def __init__(
        self,
        module: nn.Module,
        exact: bool,
        keeps_gathered: bool,
        gathered_as: torch.dtype | None,
        offloaded: bool,
        order: Order | None,
    ) -> None:
        assert isinstance(module, FSDPModule)
        self._root = cast("RootPart", module)
        self._exact, self._keeps_gathered, self._gathered_as, self._offloaded = exact, keeps_gathered, gathered_as, offloaded
        self._parts = [cast("Part", part) for part in module.modules() if isinstance(part, FSDPModule)]
        self._left_to_ranks = left_to_ranks(module)
        sends = not exact and any(name not in self._left_to_ranks for name, _ in module.named_buffers())
        self._sends_buffers = sends and dist.get_world_size() > 1  # exact refuses buffers that a forward pass moves
        self._buffers_are_due = dict.fromkeys((True, False), self._sends_buffers)
        self._accumulates = False  # the step continues after this micro-batch
        self._stays_gathered = False  # gathered, from one micro-batch of a step to the next
        self._looked_at: set[int] = set()
        self._sent = order
        self._named = [*module.named_parameters()]  # shards, while nothing is gathered
        names = {id(part): name for name, part in module.named_modules()}
        if order is not None:
            for part in self._parts:
                name = names[id(part)] or "what is in no block"
                part.set_custom_all_gather(Gather(order, name))
                part.set_custom_reduce_scatter(AddUp(order, name))
        self._order: list[Part] = []
        module.set_requires_gradient_sync(not exact)
        setattr(module, _STEP, _call)
        register_fsdp_forward_method(module, _STEP)

    def give_attributes(self, replaced: Replaced) -> None:
        """Gives what parts compute with the attributes of the parameters that were there before: a layer may read them."""
        for part in self._parts:
            part.unshard()
            replaced.give_attributes(self._root)
            part.reshard()

    # The backward pass -----------------------------------------------------------------------------------------------

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Runs a micro-batch whose step continues: its gradients wait for those of the last one."""
        self._set_accumulating(True)
        try:
            yield
        finally:
            self._set_accumulating(False)
            self._stays_gathered = self._keeps_gathered

    def note_gradients(self) -> None:
        """Notes, after a backward pass, which parameters have a gradient."""
        if self._sent:
            self._sent.note_gradients([] if self._accumulates or self._exact else self._named)

    def _set_accumulating(self, on: bool) -> None:
        self._accumulates = on
        for part in self._parts:
            # Not recursive: it would walk through all modules, for each micro-batch.
            if not self._exact:
                part.set_requires_gradient_sync(not on, recurse=False)
            if self._keeps_gathered:
                part.set_reshard_after_backward(not on, recurse=False)

    # The forward pass ------------------------------------------------------------------------------------------------

    def run_step(self, name: str, *args: object, **kwargs: object) -> object:
        """Runs a step of the module (`training_step`, say) between what `fully_shard` does before and after a `forward`."""
        module = self._root
        step, training = getattr(module, name), name == "training_step"
        if self._gathered_as is None:
            # Else what a batch holds would be brought to the device once more, and what holds it be copied.
            step, args, kwargs = partial(step, *args, **kwargs), (), {}
        if training and not self._stays_gathered:
            self._reshard()
        self._begin_order(name)
        self._stays_gathered = False
        if self._buffers_are_due[training]:
            self._send_buffers()
            self._buffers_are_due[training] = False
        if training and not self._accumulates:
            self._buffers_are_due = dict.fromkeys((True, False), self._sends_buffers)
        within = partial(self._run_without_root_hooks, partial(self._keep_writes, step) if self._is_early(training) else step)
        if training:
            return getattr(module, _STEP)(within, *args, **kwargs)
        with self._record_gather_order():
            output = getattr(module, _STEP)(within, *args, **kwargs)
        self._reshard()
        if step_state(module.trainer).peers_evaluate_more:
            self._begin_order(name)
            self._gather_like_peers()
        if self._offloaded:  # they may still be on their way, and an average of weights is about to exchange them on the host
            torch.cuda.current_stream().synchronize()
        return output

    def _send_buffers(self) -> None:
        """Gives all ranks rank 0's buffers, with a step's first forward pass, as DistributedDataParallel does."""
        named = ((name, buffer) for name, buffer in self._root.named_buffers() if not isinstance(buffer, DTensor))
        buffers = [buffer for name, buffer in named if name not in self._left_to_ranks]
        if self._sent:  # one that grows with a rank's own batches would have another size there
            self._sent.note(f"sends {sum(buffer.numel() for buffer in buffers):,} values of buffers")
        broadcast_together(buffers)

    def _is_early(self, training: bool) -> bool:
        """Returns whether this is the first micro-batch of one of the first steps: the host waits for the device there."""
        step = self._root.trainer.global_step
        if not training or step in self._looked_at or len(self._looked_at) == _STEPS:
            return False
        self._looked_at.add(step)
        return True

    def _keep_writes(self, step: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Runs a step; raises a UserError where it has written into a gathered copy, which is freed, and not into a shard."""
        copies = [(name, each) for name, each in self._root.named_parameters() if not isinstance(each, DTensor)]
        before = [sum_of_bits(each.detach()) for _, each in copies]
        output = step(*args, **kwargs)
        changed = [
            name
            for (name, each), bits in zip(copies, before, strict=True)
            if each.untyped_storage().nbytes()  # else the step has had it freed, as state_dict() does
            and not torch.equal(sum_of_bits(each.detach()), bits)
        ]
        if changed:
            raise UserError(
                f"strategy=sharded: training_step writes into {listed(changed)}, which is gathered for the step, and the "
                "shards stay as they were: what is written is lost. HINT: write in on_before_optimizer_step or "
                "on_train_batch_end."
            )
        return output

    def _begin_order(self, name: str) -> None:
        if self._sent:
            self._sent.begin((name, self._accumulates, self._stays_gathered))

    def _run_without_root_hooks(self, step: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Runs a step without the hooks of `fully_shard` around the module's own `forward`, which most steps call."""
        # Entered once more, it would let go after that of what the backward pass needs, and gather it again.
        module = self._root
        first, second = cast(Hooks, module._forward_pre_hooks), cast(Hooks, module._forward_hooks)
        places = [(hooks, key, hook) for hooks in (first, second) for key, hook in hooks.items()]
        taken = [place for place in places if "fully_shard" in getattr(place[-1], "__module__", "")]
        for hooks, key, _ in taken:
            del hooks[key]
        casts = [module.register_forward_pre_hook(self._cast, with_kwargs=True)] if self._gathered_as else []
        try:
            return step(*args, **kwargs)
        finally:
            for handle in casts:
                handle.remove()
            for hooks, key, hook in taken:
                hooks[key] = hook
                hooks.move_to_end(key, last=hooks is not first)

    def _cast(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Casts floating-point inputs to the dtype that parameters are gathered in."""

        def converted(tensor: Tensor) -> Tensor:
            return tensor.to(self._gathered_as) if tensor.is_floating_point() else tensor

        made: tuple[tuple[object, ...], dict[str, object]] = apply_to_collection((args, kwargs), Tensor, converted)
        return made

    def _reshard(self) -> None:
        """Frees what is gathered: a copy, which is outdated when the shards are changed, by an average of weights, say."""
        for part in self._parts if self._keeps_gathered else (self._root,):
            part.reshard()

    @contextmanager
    def _record_gather_order(self) -> Iterator[None]:
        """Records which parts a forward pass gathers, and in which order."""
        self._order = [self._root]

        def note(part: "Part", _: object) -> None:
            if not self._keeps_gathered or part not in self._order:
                self._order.append(part)

        blocks = [part for part in self._parts if part is not self._root]
        hooks = [part.register_forward_pre_hook(note, prepend=True) for part in blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _gather_like_peers(self) -> None:
        """Gathers each part once more: other ranks evaluate one more micro-batch, and gather their blocks from all ranks."""
        for part in self._order:
            part.unshard()
            if part is not self._root and not self._keeps_gathered:
                part.reshard()
        self._reshard()
