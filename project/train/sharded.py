"""`trainer.strategy: sharded`: parameters, gradients and optimiser are spread over the ranks, by torch's `fully_shard` (FSDP2).

A block is gathered when it computes, forwards and backwards, and let go after that. All else is as with DDP: the same loop,
the same micro-batches, the same names in a checkpoint; so it is a DDPStrategy that wraps nothing.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from project.errors import UserError
from project.train.blocks import Named, blocks_of
from project.train.micro_batch import joins
from project.train.spread import parts_like

log = logging.getLogger(__name__)

Shard = Literal["full", "node", "gradients"]
Dtype = Literal["fp32", "bf16", "fp16"]
_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Sharded(DDPStrategy):
    """Spreads a network over the ranks, so that none holds the whole.

    Args:
        shard: 'full' spreads over all ranks. 'node' spreads over the ranks of a host, and hosts have copies: less goes between
            hosts, and each rank holds more. 'gradients' gathers the parameters once a step and keeps them until it ends:
            less is sent, and each rank holds them whole meanwhile.
        blocks: what is gathered at once: classes (Block), names (network.head) or patterns (network.layers.*); None finds them.
        checkpoint_activations: keep what goes into a block, and compute the block again in the backward pass.
        cpu_offload: parameters, gradients and optimiser lie in the host's memory.
        param_dtype: what is gathered and computed in, if not in the parameters' own: bf16, fp16 or fp32.
        reduce_dtype: what gradients are added up in.
        process_group_backend: as in DDPStrategy.
        timeout: as in DDPStrategy.
    """

    def __init__(
        self,
        shard: Shard = "full",
        blocks: Sequence[str] | None = None,
        checkpoint_activations: bool = False,
        cpu_offload: bool = False,
        param_dtype: Dtype | None = None,
        reduce_dtype: Dtype | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.shard, self.blocks = shard, blocks
        self.checkpoint_activations, self.cpu_offload = checkpoint_activations, cpu_offload
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.exact = False
        """Gradients stay whole on each rank, for sums that are exact (train/exact_gradients.py)."""
        self.parts: list[FSDPModule] = []
        """The root and its blocks, once the network is spread."""
        self._kept = False  # from one micro-batch of a step to the next: what was gathered

    @property
    def spread(self) -> bool:
        """Whether each rank holds a part: on one rank it has all."""
        return bool(self.world_size > 1)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Each rank takes its part of a checkpoint."""
        return self.spread

    # Set up ----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """As DDP's, but that the network is spread for an evaluation, too."""
        assert self.accelerator is not None
        assert self.model is not None
        if self._layer_sync and trainer.state.fn == TrainerFn.FITTING:
            self.model = self._layer_sync.apply(self.model)
        self._averages = _averages(trainer)
        Strategy.setup(self, trainer)

    def _setup_model(self, model: nn.Module) -> Any:
        if self.spread:
            self._tell(self._spread(model))
            self.parts = [one for one in model.modules() if isinstance(one, FSDPModule)]
            self.parts[0].set_requires_gradient_sync(not self.exact)
            for one in self._averages:
                self._spread(one.module)
        return model

    def configure_ddp(self) -> None:
        """There is nothing to wrap."""

    def _spread(self, model: nn.Module) -> Named:
        mesh, settings = self._mesh, self._settings()
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        found = blocks_of(model, self.blocks)
        for name, block in found:
            _refuse_mixed(name, block)
            fully_shard(block, mesh=mesh, reshard_after_forward=self.shard != "gradients", **settings)
        fully_shard(model, mesh=mesh, reshard_after_forward=False, **settings)
        return found

    @cached_property
    def _mesh(self) -> DeviceMesh:
        if self.shard != "node":
            return init_device_mesh(self.root_device.type, (self.world_size,), mesh_dim_names=("shard",))
        here = self.num_processes
        if self.num_nodes < 2 or here < 2:
            log.info("shard=node: %d host(s) with %d rank(s) each.", self.num_nodes, here)
        return init_device_mesh(self.root_device.type, (self.num_nodes, here), mesh_dim_names=("copies", "shard"))

    def _settings(self) -> dict[str, Any]:
        param, reduce = _DTYPES[self.param_dtype], _DTYPES[self.reduce_dtype]
        return {
            "mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce),
            "offload_policy": CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy(),
        }

    def _tell(self, blocks: Named) -> None:
        kinds = sorted({type(one).__name__.removeprefix("FSDP") for _, one in blocks})
        log.info(
            "Sharded over %d ranks: %d block(s) of %s, and the rest.", self.world_size, len(blocks), ", ".join(kinds) or "-"
        )

    def gathered_parameters(self) -> dict[str, nn.Parameter]:
        """What blocks compute with: parameters whose memory is there while a block is gathered, and whose gradients are whole.
        By the names, and in the order, of the network's own."""
        module = self.lightning_module
        assert module is not None
        found: dict[str, nn.Parameter] = {}
        for prefix, part in module.named_modules():
            if isinstance(part, FSDPModule):
                part.unshard()
                of_part = part.named_parameters(prefix=prefix)  # type: ignore[attr-defined]
                found |= {name: one for name, one in of_part if not isinstance(one, DTensor)}
                part.reshard()
        return {name: found[name] for name, _ in module.named_parameters() if name in found}

    # A step ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A micro-batch whose step goes on: its gradients wait for those of the last one."""
        self._goes_on(True)
        try:
            yield
        finally:
            self._goes_on(False)

    def _goes_on(self, step_goes_on: bool) -> None:
        for root in self.parts[:1]:
            if not self.exact:
                root.set_requires_gradient_sync(not step_goes_on)
            if self.shard == "gradients":
                self._kept = step_goes_on or self._kept
                root.set_reshard_after_backward(not step_goes_on)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._through_root("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._through_root("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._through_root("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._through_root("predict_step", *args, **kwargs)

    def _through_root(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A module's hooks gather what it holds itself, and they are around `forward`: in there the step is taken."""
        module: Any = self.lightning_module
        step = getattr(module, name)
        if not self.spread:
            return step(*args, **kwargs)
        training = name == "training_step"
        if training and not self._kept:
            self.let_go()
        self._kept = False
        before = module.__dict__.get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            put_back()
            return step(*args, **kwargs)

        def put_back() -> None:
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = before

        module.forward = forward
        try:
            if training:
                return module(*args, **kwargs)
            with self._noting_what_is_gathered():
                output = module(*args, **kwargs)
        finally:
            put_back()
        self.let_go()
        if joins(module.trainer):
            self._gather_as_others()
        return output

    @contextmanager
    def _noting_what_is_gathered(self) -> Iterator[None]:
        """Of a forward pass: which parts, and in which order."""
        self._order: list[FSDPModule] = []
        root, modules = self.parts[0], [one for one in self.parts if isinstance(one, nn.Module)]
        kept = {id(root)} if self.shard != "gradients" else {id(one) for one in modules}

        def note(module: Any, _: Any) -> None:
            if id(module) not in kept or module not in self._order:
                self._order.append(module)

        hooks = [one.register_forward_pre_hook(note, prepend=True) for one in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _gather_as_others(self) -> None:
        """Other ranks have one micro-batch more to evaluate, and their blocks are gathered from all ranks."""
        for one in self._order:
            one.unshard()
            if one is not self._order[0] and self.shard != "gradients":
                one.reshard()
        self.let_go()

    def let_go(self) -> None:
        """What is gathered is a copy: when the parts are changed, by an average of weights, say, it would not be."""
        for one in self.parts if self.shard == "gradients" else self.parts[:1]:
            one.reshard()

    # A checkpoint ----------------------------------------------------------------------------------------------------

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if self.spread:
            parts = parts_like(checkpoint["state_dict"], self.lightning_module.state_dict())  # type: ignore[union-attr]
            checkpoint = {**checkpoint, "state_dict": parts}
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if self.spread:
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
                parameters = [one for group in optimizer.param_groups for one in group["params"]]
                for number, values in state["state"].items():
                    like = {name: parameters[number] for name, one in values.items() if _of_shape(one, parameters[number])}
                    values.update(parts_like({name: values[name] for name in like}, like))
        super().load_optimizer_state_dict(checkpoint)


def _of_shape(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and parameter.ndim > 0


def _averages(trainer: pl.Trainer) -> list[AveragedModel]:
    """The averages of the weights that callbacks keep: copies of a network that is not spread yet."""
    found = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging):
            raise UserError(
                "StochasticWeightAveraging keeps a whole network on each rank, and strategy=sharded has none. HINT: "
                "lightning.pytorch.callbacks.WeightAveraging or EMAWeightAveraging."
            )
        found += [one for one in vars(callback).values() if isinstance(one, AveragedModel)]
    return found


def _refuse_mixed(name: str, block: nn.Module) -> None:
    kinds = sorted({str(one.dtype) for one in block.parameters() if one.requires_grad})
    if len(kinds) > 1:
        raise UserError(
            f"strategy=sharded: the parameters of {name} are {' and '.join(kinds)}, and what is gathered at once has one type. "
            "HINT: name smaller blocks, or give the module one type."
        )


StrategyRegistry.register("sharded", Sharded, description="Spreads parameters, gradients and optimiser over the ranks")
