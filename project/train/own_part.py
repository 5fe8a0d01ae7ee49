"""What a rank takes of a checkpoint, where the network is spread over the ranks."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from project.parts import Stored
from project.train.data_ranks import ByDataRanks
from project.train.spread import part_of_stored, parts_like, whole


class OwnPart(ByDataRanks):
    """A strategy that gives each rank its part of a checkpoint, whoever has written it.

    Args:
        settings: as in ByDataRanks.
    """

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        self._state: dict[str, Any] = {}  # the network's, where layers are shared

    @property
    def spread(self) -> bool:
        """Whether each rank holds a part."""
        raise NotImplementedError

    @cached_property
    def _data_mesh(self) -> DeviceMesh:
        raise NotImplementedError

    @property
    def _shared_layers(self) -> bool:
        return self.data_ranks.shared_by > 1

    def slice_of(self, stored: Stored) -> DTensor:
        """Of a tensor that lies in parts, what this rank holds."""
        return part_of_stored(stored, self._data_mesh, self._like(stored.name) if self._shared_layers else None)

    def _like(self, name: str) -> Any:
        """The parameter that a tensor of this name in a checkpoint will be spread like."""
        kind, *place = name.split("/")[1:]
        if kind != "optimizer_states":
            return self._state.get(place[-1]) if place else None
        optimizer, number = int(place[0]), place[2]
        if place[1] != "state" or optimizer >= len(self.optimizers):
            return None
        parameters = [one for group in self.optimizers[optimizer].param_groups for one in group["params"]]
        return parameters[int(number)] if number.isdigit() and int(number) < len(parameters) else None

    def cut(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Of all that is named and shaped as the network's parameters (weights, averages of them), this rank's parts."""
        mine = self.lightning_module.state_dict()  # type: ignore[union-attr]
        states = {name: one for name, one in checkpoint.items() if isinstance(one, Mapping)}
        return checkpoint | {name: _cut(state, mine) for name, state in states.items() if _same_names(state, mine)}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Writes what trainer.save_checkpoint, a ModelCheckpoint and tuners save: one file, whole. Called by all ranks."""

        def gathered(part: DTensor) -> Tensor:
            found = whole(part, self.root_device)
            return found.cpu() if self.is_global_zero else found.new_empty(0)

        if self.spread:
            checkpoint = apply_to_collection(checkpoint, DTensor, gathered)
        super().save_checkpoint(checkpoint, filepath, storage_options)

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
        for optimizer in self.optimizers:  # Lightning has moved its state to the GPU, where an offloaded parameter is not
            for parameter, state in optimizer.state.items():
                if parameter.device != self.root_device:
                    moved = {name: one for name, one in state.items() if isinstance(one, Tensor) and name != "step"}
                    state.update({name: one.to(parameter.device) for name, one in moved.items()})


def _same_names(state: Mapping[Any, Any], mine: Mapping[str, Any]) -> bool:
    return any(isinstance(one, Tensor) and name in mine for name, one in state.items())


def _cut(state: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """What has another shape is left for whoever says that it is another network."""
    fitting = {name: one for name, one in state.items() if name in mine and getattr(one, "shape", ()) == mine[name].shape}
    return {**state, **parts_like(fitting, mine)}


def _of_shape(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and parameter.ndim > 0
