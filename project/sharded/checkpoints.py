"""Reads and writes a rank's shards of a checkpoint."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from project.parts import Stored
from project.sharded.shards import gather, read_shard, shard_like
from project.step.data_ranks import ByDataRanks
from project.typed import StateDict


class ShardedCheckpoints(ByDataRanks):
    """A strategy that gives each rank its shards of a checkpoint, whoever has written it."""

    _state: Mapping[str, Tensor] = MappingProxyType({})
    """The network's, where layers are shared."""

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Returns whether each rank holds a shard."""

    @cached_property
    @abstractmethod
    def _data_mesh(self) -> DeviceMesh: ...

    @property
    def _shared_layers(self) -> bool:
        return self.data_ranks.shared_by > 1

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
            shards = {name: shard_like(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
            checkpoint = {**checkpoint, "state_dict": shards}
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.is_sharded:
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
                parameters = _parameters(optimizer)
                for number, values in state["state"].items():
                    like = parameters[number]
                    fitting = [name for name, value in values.items() if like.ndim > 0 and _fits(value, like)]
                    values.update({name: shard_like(values[name], like) for name in fitting})
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:  # Lightning has moved its state to the GPU, where an offloaded parameter is not
            for parameter, state in optimizer.state.items():
                if parameter.device != self.root_device:
                    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
                    state.update({name: tensor.to(parameter.device) for name, tensor in tensors.items()})


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _fits(value: object, like: object) -> bool:
    return isinstance(value, Tensor) and isinstance(like, Tensor) and value.shape == like.shape
