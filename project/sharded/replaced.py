"""The parameters that `fully_shard` replaces by others: what hangs on them, and who still holds them."""

import gc
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from weakref import ref

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from project.data.generators import held
from project.data.values import users_class
from project.errors import UserError
from project.typed import callbacks_of

_WHY = "which is not in the network any more: sharding has put another in its place, which trains"
_HINT = "HINT: take parameters from self.parameters() where they are needed, an optimiser's in configure_optimizers"


class Replaced:
    """The parameters of a network that is not sharded yet, by name.

    Holds none of them: a device may have no room for a whole network. None: one that an earlier fit has sharded.
    """

    def __init__(self, network: nn.Module | None = None) -> None:
        named = dict(network.named_parameters()) if network is not None else {}
        plain = {name: parameter for name, parameter in named.items() if type(parameter) is nn.Parameter}
        kept = {name: _without_tensors(vars(parameter)) for name, parameter in plain.items()}
        self.attributes = {name: attributes for name, attributes in kept.items() if attributes}
        self._references = {name: ref(parameter) for name, parameter in named.items()}

    def give_attributes(self, network: nn.Module) -> None:
        """Gives the parameters that the network has now the attributes of those that it had; users choose groups by them."""
        for name, parameter in network.named_parameters():
            give_attributes(parameter, self.attributes.get(name, {}))

    def _left(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Returns the parameters that something still holds, with their names, by their `id`."""
        living = ((name, reference()) for name, reference in self._references.items())
        return {id(parameter): (name, parameter) for name, parameter in living if parameter is not None}

    def refuse_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuses an optimiser with a parameter of before: its gradients are added up nowhere."""
        left = self._left()
        for optimizer in optimizers:
            for parameter in (each for group in optimizer.param_groups for each in group["params"] if id(each) in left):
                raise UserError(f"strategy=sharded: {type(optimizer).__name__} has {left[id(parameter)][0]}, {_WHY}. {_HINT}.")

    def refuse_holders(self, trainer: pl.Trainer) -> None:
        """Refuses an attribute of the network or of a callback that holds a parameter of before: it never changes again."""
        if not (left := self._left()):
            return
        module = trainer.lightning_module
        name = users_class(type(module)).__name__
        parts = [(f"{name}{'.' if path else ''}{path}", part) for path, part in module.named_modules()]
        callbacks = [(type(callback).__name__, callback) for callback in callbacks_of(trainer, pl.Callback)]
        for place, parameter in held([*parts, *callbacks], lambda value: id(value) in left):
            raise UserError(f"strategy=sharded: {place} holds {left[id(parameter)][0]}, {_WHY}. {_HINT}.")


def _without_tensors(attributes: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in attributes.items() if not isinstance(value, Tensor)}


def give_attributes(parameter: nn.Parameter, attributes: Mapping[str, object]) -> None:
    """Gives a parameter the attributes of the one in whose place it is, but for those that it has."""
    kept = vars(parameter)
    kept.update({name: value for name, value in attributes.items() if name not in kept})


def refuse_hooks(network: nn.Module) -> None:
    """Refuses hooks on parameters: gradients come to what is gathered from them, and to shards once they are summed."""
    for name, parameter in network.named_parameters():
        kept = {id(value) for value in vars(parameter).values()}
        # No others are called for a shard; those for what is added up are, and have no public attribute.
        hooks = [parameter._backward_hooks] if isinstance(parameter, DTensor) else gc.get_referents(parameter)
        if any(each and type(each) is OrderedDict and id(each) not in kept for each in hooks):
            raise UserError(
                f"strategy=sharded: {name} has a hook for its gradient, which comes to a gathered copy of it. HINT: change its "
                "grad in on_before_optimizer_step, where it is this rank's shard of the sum, or strategy: ddp."
            )


@contextmanager
def users_types(network: nn.Module) -> Iterator[None]:
    """Gives modules the classes back of which `fully_shard` has made others: users choose groups by `type(module) is Block`."""
    sharded = [(part, type(part)) for part in network.modules() if isinstance(part, FSDPModule)]
    for part, kind in sharded:
        part.__class__ = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
    try:
        yield
    finally:
        for part, kind in sharded:
            part.__class__ = kind
