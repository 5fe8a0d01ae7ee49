"""The root of a network that is spread: it gathers what is in no block, and its steps are taken from within its `forward`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from project.step.state import step_state


class Root:
    """A LightningModule that `fully_shard` was applied to, after its blocks.

    Args:
        module: the root.
        keeps_gathered: blocks stay gathered from the forward pass to the backward pass.
        gathered_as: the type that parameters are gathered in, if it is another, and that what floats a batch has are to be of.
        offloaded: parameters lie in the host's memory.
    """

    def __init__(
        self, module: nn.Module, keeps_gathered: bool, gathered_as: torch.dtype | None = None, offloaded: bool = False
    ) -> None:
        assert isinstance(module, FSDPModule)
        self._root: Any = module
        self._keeps_gathered, self._gathered_as, self._offloaded = keeps_gathered, gathered_as, offloaded
        self._parts: list[Any] = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._stays_gathered = False  # gathered, from one micro-batch of a step to the next
        self._order: list[Any] = []

    # The backward pass -----------------------------------------------------------------------------------------------

    def set_gradient_sync(self, on: bool) -> None:
        """Sets whether a backward pass adds up the gradients of all ranks."""
        for part in self._parts:
            # Not recursive: it would walk through all modules, for each micro-batch.
            part.set_requires_gradient_sync(on, recurse=False)

    def begin_accumulating(self, exact: bool) -> None:
        """Begins a micro-batch whose step continues: its gradients wait for those of the last one."""
        if not exact:
            self.set_gradient_sync(False)
        self._set_reshard_after_backward(False)

    def end_accumulating(self, exact: bool) -> None:
        """Ends a micro-batch whose step continues."""
        if not exact:
            self.set_gradient_sync(True)
        self._set_reshard_after_backward(True)
        self._stays_gathered = self._keeps_gathered

    def _set_reshard_after_backward(self, on: bool) -> None:
        for part in self._parts if self._keeps_gathered else ():
            part.set_reshard_after_backward(on, recurse=False)

    # The forward pass ------------------------------------------------------------------------------------------------

    def run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a step of the module (`training_step`, say) as its `forward`: the hooks of `fully_shard` around that gather the
        root's parameters.
        """
        module = self._root
        step, training = getattr(module, name), name == "training_step"
        # Else the hooks would bring what a batch holds to the device once more, and copy what holds it.
        # They get the name alone: from torch 2.11 to 2.14 they fail where there is nothing to bring.
        if self._gathered_as is None:
            bound = partial(step, *args, **kwargs)
            step, args, kwargs = (lambda _: bound()), (name,), {}
        if training and not self._stays_gathered:
            self._reshard()
        self._stays_gathered = False
        before = module.__dict__.get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            put_back()
            with self._without_root_hooks():
                return step(*args, **kwargs)

        def put_back() -> None:
            module.__dict__.pop("forward", None)
            if before is not None:
                module.forward = before

        module.forward = forward
        try:
            if training:
                return module(*args, **kwargs)
            with self._record_gather_order():
                output = module(*args, **kwargs)
        finally:
            put_back()
        self._reshard()
        if step_state(module.trainer).peers_evaluate_more:
            self._gather_like_peers()
        if self._offloaded:  # they may still be on their way, and an average of weights is about to exchange them on the host
            torch.cuda.current_stream().synchronize()
        return output

    @contextmanager
    def _without_root_hooks(self) -> Iterator[None]:
        """Takes off the hooks of `fully_shard` within: a step that calls the module itself, as most do, is in its `forward`
        already. Entered once more, `fully_shard` would let go after that of what the backward pass needs, and gather it again.
        """
        module = self._root
        places = module._forward_pre_hooks, module._forward_hooks
        before = [dict(hooks) for hooks in places]
        shards = [key for hooks in places for key, hook in hooks.items() if "fully_shard" in getattr(hook, "__module__", "")]
        for hooks in places:
            for key in shards:
                hooks.pop(key, None)
        casts = [module.register_forward_pre_hook(self._cast, with_kwargs=True)] if self._gathered_as else []
        try:
            yield
        finally:
            for handle in casts:
                handle.remove()
            for hooks, were in zip(places, before, strict=True):  # in their order, and with what the step itself has changed
                now = dict(hooks)
                hooks.clear()
                hooks.update({key: hook for key, hook in were.items() if key in shards or key in now} | now)

    def _cast(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Casts floating-point inputs to the dtype that parameters are gathered in."""

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self._gathered_as) if tensor.is_floating_point() else tensor

        return apply_to_collection((args, kwargs), Tensor, cast)

    def _reshard(self) -> None:
        """Frees what is gathered: a copy, which is outdated when the shards are changed, by an average of weights, say."""
        for part in self._parts if self._keeps_gathered else (self._root,):
            part.reshard()

    @contextmanager
    def _record_gather_order(self) -> Iterator[None]:
        """Records which parts a forward pass gathers, and in which order."""
        self._order = []

        def note(part: Any, _: Any) -> None:
            if not (self._keeps_gathered or part is self._root) or part not in self._order:
                self._order.append(part)

        hooks = [part.register_forward_pre_hook(note, prepend=True) for part in self._parts]
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
