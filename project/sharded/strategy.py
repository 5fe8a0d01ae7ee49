"""`trainer.strategy: sharded`: parameters, gradients and optimiser are spread over the ranks, by torch's `fully_shard` (FSDP2).

A block is gathered when it computes, forwards and backwards, and let go after that. All else is as with DDP: the same loop,
the same micro-batches, the same names in a checkpoint; so it is a DDPStrategy that wraps nothing.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from project.cluster.environment import limits
from project.cluster.group import Group
from project.cluster.memory import keep_freed_memory
from project.data.values import users_class
from project.errors import UserError
from project.parts import Stored
from project.sharded.blocks import Named, blocks_of
from project.sharded.local_step import clip_by_norm
from project.sharded.memory_formats import use_contiguous_order
from project.sharded.meta_build import StayOnMeta, give_memory, refuse_other_network, signature, without_values
from project.sharded.order import Order
from project.sharded.refusals import (
    averages_on_host,
    prepare_optimizers,
    refuse_copies,
    refuse_no_values,
    refuse_own_steps,
    refuse_pruning,
    refuse_unshardable,
    weight_averages,
)
from project.sharded.replaced import Replaced, refuse_hooks, users_types
from project.sharded.root import Root
from project.sharded.shards import any_rank, gather, read_shard, shard_like, skip_overflow_on_all_ranks
from project.sharded.tensor_parallel import Plan, parallelize_layers, plan_of, refuse_settings, refuse_single_rank
from project.step.data_ranks import ByDataRanks
from project.step.ddp import broadcast_from_rank_0, refuse_lazy, refuse_sync_batch_norm_on_cpu
from project.step.optimizers import states_in
from project.typed import StateDict

log = logging.getLogger(__name__)

Shard = Literal["full", "node", "gradients"]
Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SPARE = 12
"""Times a network's parameters: twice of what DDP holds with AdamW, and with what is on its way."""


class Sharded(ByDataRanks):
    """Shards a network over the ranks, so that none holds the whole.

    Args:
        shard: 'full' shards over all ranks. 'node' shards over the ranks of a host, and hosts have copies: hosts exchange
            less, and each rank holds more. 'gradients' gathers the parameters once a step and keeps them until it ends:
            ranks send less, and hold the whole parameters during the step.
        blocks: parts to gather at once: classes (Block), names (network.head) or patterns (network.layers.*); None finds them.
        checkpoint_activations: keep the inputs of a block, and compute the block again in the backward pass.
        cpu_offload: keep parameters, gradients and optimiser in the host's memory.
        param_dtype: the type to gather and compute in, if not the parameters' own: bf16, fp16 or fp32.
        reduce_dtype: the type in which gradients are summed.
        tensor_parallel: number of neighbouring ranks of a host that share the layers in the network's plan
            (`tensor_parallel_plan`) and see the same micro-batches; the network is sharded over the others.
        deferred: only rank 0 builds the network in its host's memory; other ranks get its values block by block. From the
            command line only.
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
        tensor_parallel: int = 1,
        deferred: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        if cpu_offload:  # norms and broadcasts of what is offloaded go by gloo
            process_group_backend = process_group_backend or "cpu:gloo,cuda:nccl"
        super().__init__(tensor_parallel, timeout, process_group_backend=process_group_backend)
        self.shard, self.blocks = shard, blocks
        self.checkpoint_activations, self.cpu_offload = checkpoint_activations, cpu_offload
        self.param_dtype, self.reduce_dtype, self.deferred = param_dtype, reduce_dtype, deferred
        self.exact = False
        """Gradients stay whole on each rank, for sums that are exact (exact/gradients.py)."""
        self.before_sharding: Callable[[], None] | None = None
        """Reports on rank 0 of a fit what each rank will hold, before anything is spread."""
        self.layouts: dict[str, torch.memory_format] = {}
        """The memory format of weights that layers compute with in another order than the default one, by name."""
        self._state: Mapping[str, Tensor] = {}  # the network's, where layers are shared
        self._before_values = ExitStack()
        self._root: Root | None = None  # of a network that is spread
        self._replaced, self._gives_attributes = Replaced(), False
        self._hosts = Group()
        self._state_of_fit: TrainerState | None = None

    @property
    def is_sharded(self) -> bool:
        """Returns whether each rank holds a part. On one rank it has all: only a type, or the host's memory, needs this."""
        return bool(self.world_size > 1 or self.param_dtype or self.reduce_dtype or self.cpu_offload)

    @property
    def _shared_layers(self) -> bool:
        return self.data_ranks.shared_by > 1

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Returns whether a checkpoint is read after the setup: each rank takes its part of it."""
        return self.is_sharded

    def refuse_other_settings(self, compression: str, on_cpu: bool) -> None:
        """Refuses settings of the Trainer that do not go together with these."""
        refuse_settings(self.shared_by, self.world_size, self.num_processes, self.exact)
        rounds = self.param_dtype or self.reduce_dtype
        problems = {
            f"trainer.gradient_compression={compression} is for DistributedDataParallel. HINT: here the strategy's "
            f"reduce_dtype={compression} does it": compression != "none",
            "trainer.exact can't be kept: param_dtype and reduce_dtype round what is computed with and added up, which DDP "
            "does not. HINT: leave them out": self.exact and rounds,
            "trainer.exact adds up gradients on the GPU, and cpu_offload keeps them on the host. HINT: leave out one of the "
            "two": self.exact and self.cpu_offload,
            "cpu_offload is for the memory of a GPU, and there is none. HINT: leave it out": self.cpu_offload and on_cpu,
        }
        for problem, holds in problems.items():
            if holds:
                raise UserError(f"strategy=sharded: {problem}.")

    # Set up ----------------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Connects the ranks. The hooks that follow build on: the module's own, and those of callbacks that copy it."""
        super().setup_environment()
        if self.cpu_offload and "gloo" not in (backend := dist.get_backend()):
            raise UserError(
                f"strategy=sharded: cpu_offload needs gloo beside NCCL, and the ranks are connected by {backend} alone, for an "
                "earlier fit of this process or by process_group_backend. HINT: a process of its own, and no other backend."
            )
        if (module := self.lightning_module) is not None and module.trainer.state.fn == TrainerFn.FITTING:
            refuse_copies(module.trainer)
            if self.is_sharded:
                self._before_values.enter_context(averages_on_host(module.trainer))
        self._before_values.enter_context(StayOnMeta())

    def setup(self, trainer: pl.Trainer) -> None:
        """Sets up as DDP does, but nothing is whole on the device, and the network is spread for an evaluation, too."""
        assert self.accelerator is not None
        assert self.model is not None
        self._before_values.close()
        self._state_of_fit, training = trainer.state, trainer.state.fn == TrainerFn.FITTING
        if training:
            refuse_single_rank(self.shared_by, self.world_size)
        if not self.is_sharded:
            weight_averages(trainer)  # refuses those that keep a whole network
            if self.checkpoint_activations:
                _recompute(blocks_of(self.model, self.blocks))
            super().setup(trainer)
            return
        self.accelerator.setup(trainer)
        if training:
            if self.world_size > 1:
                refuse_lazy(self.model)
            refuse_own_steps(trainer.lightning_module)
            refuse_pruning(trainer)
            refuse_hooks(self.model)
            if self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
                refuse_sync_batch_norm_on_cpu(self.model, self.root_device)
        if not isinstance(self.model, FSDPModule):  # in another fit it is
            averaged = weight_averages(trainer)
            if training and self.is_global_zero and self.before_sharding is not None:
                self.before_sharding()
            self._refuse_unsendable_network(self.model, [average.module for average in averaged])
            plan = plan_of(self.model) if self._shared_layers else {}
            self._replaced = Replaced(self.model)
            self._gives_attributes = any_rank([bool(self._replaced.attributes)])[0]
            blocks = self._shard_network(self.model, plan)
            self._replaced.give_attributes(self.model)
            for average in averaged:
                self._shard_network(average.module, plan)
            kinds, here = sorted({users_class(type(block)).__name__ for _, block in blocks}), self.data_ranks
            ranks = f"{self.world_size} ranks"
            if self._shared_layers:
                ranks += f" ({here.count} x {here.shared_by} tensor parallel)"
            log.info("Sharded over %s: %d block(s) of %s, and the rest.", ranks, len(blocks), ", ".join(kinds) or "-")
            self._keep_freed_memory(self.model)
        else:  # and its end has brought it back to the host
            self._move(self.model)
        gathered_as = DTYPES[self.param_dtype]
        order = None
        if self.world_size > 1:
            self._hosts.make(self.patience)
            order = Order(self._hosts)
        self._root = Root(self.model, self.exact, self.shard == "gradients", gathered_as, self.cpu_offload, order)
        if self._shared_layers:
            self._state = self.model.state_dict()
            self.reduce_over_data_ranks(self.model)
            self.precision_plugin.clip_grad_by_norm = clip_by_norm  # type: ignore[method-assign,assignment]
            if scaler := getattr(self.precision_plugin, "scaler", None):
                skip_overflow_on_all_ranks(scaler)
        if training:
            with users_types(self.model):
                self.setup_optimizers(trainer)
            prepare_optimizers(self.optimizers, self.exact)
            self._replaced.refuse_optimizers(self.optimizers)
            self._replaced.refuse_holders(trainer)
        self.setup_precision_plugin()

    def _refuse_unsendable_network(self, model: nn.Module, copies: list[nn.Module]) -> None:
        """Refuses a network whose values rank 0 can't send: it has none, or another rank's differs."""
        if self.is_global_zero:
            refuse_no_values(model)
        elif any(parameter.is_meta for parameter in model.parameters()) and (problem := without_values(model, *copies)):
            raise UserError(
                "strategy=sharded: hooks before the first step read the network's parameters, which this rank does not have "
                f"yet: {problem}. HINT: set the strategy's deferred: false, and every rank builds the whole network."
            )
        refuse_other_network(model, self.broadcast(signature(model)))

    def _shard_network(self, model: nn.Module, plan: Plan) -> Named:
        """Shards a network block by block, so that the device has one of them whole at a time. Each gets rank 0's values."""
        blocks = blocks_of(model, self.blocks)
        if self.checkpoint_activations:
            _recompute(blocks)
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[self.param_dtype], reduce_dtype=DTYPES[self.reduce_dtype])
        offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()
        for name, block in [*blocks, ("", model)]:
            refuse_unshardable(name, block)
            give_memory(block, torch.device("cpu") if self.cpu_offload else self.root_device)
            of_block = use_contiguous_order(block)
            self.layouts |= {f"{name}.{at}" if name else at: layout for at, layout in of_block.items()}
            self.precision_plugin.convert_module(block)
            self._move(block)
            tensors = (*block.parameters(), *block.buffers())
            broadcast_from_rank_0(tensor for tensor in tensors if not isinstance(tensor, DTensor))
            if self._shared_layers:
                parallelize_layers(name, block, plan, self._mesh["tensor"])
            releases = block is not model and self.shard != "gradients"
            fully_shard(block, mesh=self._data_mesh, reshard_after_forward=releases, mp_policy=policy, offload_policy=offload)
        return blocks

    def _keep_freed_memory(self, model: nn.Module) -> None:
        """Keeps freed memory on a CPU, where there is room for as much as DDP holds: steps are faster by a quarter."""
        if self.root_device.type == "cpu" and (left := limits(Path("."))["memory"]) is not None:
            whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
            keep_freed_memory(large=_SPARE * whole <= left // self.num_processes)

    def _move(self, module: nn.Module) -> None:
        if self.cpu_offload:
            _move_all_but_parameters(module, self.root_device)
        else:
            module.to(self.root_device)

    def configure_ddp(self) -> None:
        """Wraps nothing."""

    @cached_property
    def _mesh(self) -> DeviceMesh:
        """Returns the mesh of all ranks: copies, shards and tensor parallelism, where there are such."""
        share = self.data_ranks.shared_by
        sizes = {"shard": self.world_size // share}
        if self.shard == "node":
            if self.num_nodes < 2 or self.num_processes < 2:
                log.info("shard=node: %d host(s) with %d rank(s) each.", self.num_nodes, self.num_processes)
            sizes = {"copies": self.num_nodes, "shard": self.num_processes // share}
        if share > 1:
            sizes["tensor"] = share
        return init_device_mesh(self.root_device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @cached_property
    def _data_mesh(self) -> DeviceMesh:
        """Returns the mesh of the ranks that see other data."""
        names = self._mesh.mesh_dim_names or ()
        return self._mesh[names[:-1]] if self._shared_layers else self._mesh

    def gathered_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that blocks compute with: their memory is there while a block is gathered, and their gradients
        are whole. They have the names, and the order, of the network's own."""
        module = self.lightning_module
        assert module is not None
        gathered: dict[str, nn.Parameter] = {}
        for prefix, part in module.named_modules() if self._root is not None else ():
            if isinstance(part, FSDPModule):
                part.unshard()
                of_part = part.named_parameters(prefix=prefix)  # type: ignore[attr-defined]
                gathered |= {name: parameter for name, parameter in of_part if not isinstance(parameter, DTensor)}
                part.reshard()
        return {name: gathered[name] for name, _ in module.named_parameters() if name in gathered}

    def teardown(self) -> None:
        """Lightning brings the network back to the host. After an error it may have no values yet, or what is gathered is in
        use in what is left of a step, and can't be moved."""
        module = self.lightning_module
        state = self._state_of_fit
        left = self._root is not None and state is not None and state.status == TrainerStatus.INTERRUPTED
        if module is not None and (left or any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))):
            module.__dict__["cpu"] = lambda: module
        self._before_values.close()  # where an error came before the setup
        super().teardown()

    def on_train_start(self) -> None:
        """Refuses hooks that those of callbacks and of the module have hung on shards since."""
        super().on_train_start()
        if self._root is not None and self.model is not None:
            refuse_hooks(self.model)

    # A step ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Runs a micro-batch whose step continues: its gradients wait for those of the last one."""
        with nullcontext() if self._root is None else self._root.accumulating():
            yield

    def post_backward(self, closure_loss: Tensor) -> None:
        """Refuses gradients of other parameters than those of the other ranks."""
        super().post_backward(closure_loss)
        if self._root is not None:
            self._root.note_gradients()

    def training_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        with self.precision_plugin.train_step_context():
            return cast(STEP_OUTPUT, self._call("training_step", *args, **kwargs))

    def validation_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        with self.precision_plugin.val_step_context():
            return cast(STEP_OUTPUT, self._call("validation_step", *args, **kwargs))

    def test_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        with self.precision_plugin.test_step_context():
            return cast(STEP_OUTPUT, self._call("test_step", *args, **kwargs))

    def predict_step(self, *args: object, **kwargs: object) -> object:
        with self.precision_plugin.predict_step_context():
            return self._call("predict_step", *args, **kwargs)

    def _call(self, name: str, *args: object, **kwargs: object) -> object:
        if self._root is None:
            return getattr(self.lightning_module, name)(*args, **kwargs)
        if self._gives_attributes:
            self._root.give_attributes(self._replaced)
            self._replaced.attributes.clear()
            self._gives_attributes = False
        return self._root.run_step(name, *args, **kwargs)

    # A checkpoint ----------------------------------------------------------------------------------------------------

    def slice_of(self, stored: Stored) -> DTensor:
        """Reads this rank's shard of a tensor that lies in parts."""
        return read_shard(stored, self._data_mesh, self._parameter_like(stored.name) if self._shared_layers else None)

    def _parameter_like(self, name: str) -> Tensor | None:
        """Returns the parameter that a tensor of this name in a checkpoint will be placed like."""
        kind, *place = name.split("/")[1:]
        if kind != "optimizer_states":
            return self._state.get(place[-1]) if place else None
        optimizer, number = int(place[0]), place[2]
        if place[1] != "state" or optimizer >= len(self.optimizers):
            return None
        parameters = _parameters(self.optimizers[optimizer])
        return parameters[int(number)] if number.isdigit() and int(number) < len(parameters) else None

    def shards_of(self, checkpoint: StateDict) -> StateDict:
        """Returns a checkpoint with this rank's shards of all states that are named and shaped like the parameters."""
        own = self.lightning_module.state_dict()  # type: ignore[union-attr]

        def shards_of(state: object) -> object:
            if not isinstance(state, Mapping) or not any(name in own and isinstance(state[name], Tensor) for name in state):
                return state
            # Another shape is left for the error that names another network.
            return {
                **state,
                **{name: shard_like(value, own[name]) for name, value in state.items() if _fits(value, own.get(name))},
            }

        return {name: shards_of(state) for name, state in checkpoint.items()}

    def save_checkpoint(self, checkpoint: StateDict, filepath: str | Path, storage_options: object = None) -> None:
        """Writes what trainer.save_checkpoint, a ModelCheckpoint and tuners save: one file, whole. Called by all ranks."""

        def gathered(shard: DTensor) -> Tensor:
            tensor = gather(shard, self.root_device)
            return tensor.cpu() if self.is_global_zero else tensor.new_empty(0)

        if self.is_sharded:
            checkpoint = apply_to_collection(checkpoint, DTensor, gathered)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.is_sharded:
            own = self.lightning_module.state_dict()  # type: ignore[union-attr]
            saved = checkpoint["state_dict"]
            fitting = {name: shard_like(value, own[name]) for name, value in saved.items() if _fits(value, own.get(name))}
            checkpoint = {**checkpoint, "state_dict": {**saved, **fitting}}
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.is_sharded:
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
                for like, values in states_in(state, optimizer):
                    fitting = [name for name, value in values.items() if like.ndim > 0 and _fits(value, like)]
                    values.update({name: shard_like(values[name], like) for name in fitting})
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:  # Lightning has moved its state to the GPU, where an offloaded parameter is not
            for parameter, state in optimizer.state.items():
                if isinstance(parameter, Tensor) and parameter.device != self.root_device:
                    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
                    state.update({name: tensor.to(parameter.device) for name, tensor in tensors.items()})


def _recompute(blocks: Named) -> None:
    """Has blocks keep their input alone, and compute the rest again when their gradients are computed."""
    for _, block in blocks:
        if "forward" not in vars(block):  # in another fit it is so already
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _move_all_but_parameters(module: nn.Module, device: torch.device) -> None:
    """Moves buffers, and modules without parameters, which may hold other tensors, as metrics do."""
    for part in module.modules():
        if next(part.parameters(), None) is None:
            part.to(device)
        for buffer in part.buffers(recurse=False):
            buffer.data = buffer.data.to(device)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _fits(value: object, like: object) -> bool:
    return isinstance(value, Tensor) and isinstance(like, Tensor) and value.shape == like.shape


StrategyRegistry.register("sharded", Sharded, description="Spreads parameters, gradients and optimiser over all ranks")
StrategyRegistry.register("sharded_node", Sharded, shard="node", description="Spreads them over the ranks of each host")
StrategyRegistry.register("sharded_gradients", Sharded, shard="gradients", description="Keeps parameters gathered for a step")


def is_sharded(trainer: pl.Trainer) -> bool:
    """Returns whether each rank holds only its shards of the weights."""
    return isinstance(trainer.strategy, Sharded) and trainer.strategy.is_sharded


def replicates_weights(trainer: pl.Trainer) -> bool:
    """Returns whether all ranks have the same weights after each step."""
    return (
        isinstance(trainer.strategy, DDPStrategy)
        and not is_sharded(trainer)
        and getattr(trainer.strategy, "_model_averager", None) is None
    )
