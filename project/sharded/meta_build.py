"""Builds a network in the memory of rank 0 alone. On other ranks its parameters lie on the meta device until values come.

What is drawn at random for a parameter is drawn on these ranks, too, and dropped at once: all ranks draw the same afterwards.
"""

import gc
import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Protocol, TypeGuard, TypeVar
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from project.data.dealing import restore_generators
from project.errors import UserError

log = logging.getLogger(__name__)

Built = TypeVar("Built")

SMALL = 16_384
"""Bytes of a parameter that keeps its values: Python often reads them."""


class _Operator(Protocol):
    """An operator of torch."""

    @property
    def tags(self) -> Collection[torch.Tag]: ...

    def __call__(self, *args: object, **kwargs: object) -> object: ...


class _DrawsOnMeta(TorchDispatchMode):
    """Draws for a tensor on the meta device as many random numbers as for one with values."""

    def __torch_dispatch__(
        self, function: _Operator, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags or not any(map(_on_meta, (*args, *kwargs.values()))):
            return function(*args, **kwargs)
        function(*map(_with_memory, args), **{name: _with_memory(value) for name, value in kwargs.items()})
        kwargs = {name: value for name, value in kwargs.items() if not isinstance(value, torch.Generator)}
        return function(*args, **kwargs)


def _on_meta(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_meta


def _with_memory(value: object) -> object:
    return torch.empty_like(value, device="cpu") if _on_meta(value) else value


def _replace(tensor: Tensor, values: Tensor) -> None:
    """Gives a tensor other values on another device. It stays the same object, with its attributes."""
    torch._C._swap_tensor_impl(tensor, values.detach().requires_grad_(tensor.requires_grad))


_SKIP_META = {
    name: function
    for name, function in vars(nn.init).items()
    if "is_meta" in getattr(getattr(function, "__code__", None), "co_names", ())
}
"""Functions of torch.nn.init that draw nothing for a tensor on the meta device, by name."""


def _initialize_twin(function: Callable[..., Tensor], tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Initializes a tensor as large as one on the meta device: how much is drawn may depend on the values."""
    function(_with_memory(tensor), *args, **kwargs)
    return tensor


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Moves each parameter to the meta device as soon as a module has it, unless it is small."""

    def move(module: nn.Module, name: str, parameter: object) -> None:
        if type(parameter) is nn.Parameter and parameter.device.type == "cpu" and parameter.nbytes > SMALL:
            _replace(parameter, parameter.to("meta"))

    hook = register_module_parameter_registration_hook(move)
    vars(nn.init).update({name: partial(_initialize_twin, function) for name, function in _SKIP_META.items()})
    try:
        with _DrawsOnMeta(), warnings.catch_warnings():  # type: ignore[no-untyped-call]
            warnings.filterwarnings("ignore", ".*copying from a non-meta parameter")  # a checkpoint is read in a constructor
            yield
    finally:
        vars(nn.init).update(_SKIP_META)
        hook.remove()


def build_once(build: Callable[[], Built], network_of: Callable[[Built], nn.Module], rank: int) -> Built:
    """Builds something whose network has values on rank 0 alone; on another rank, too, where its code reads them."""
    built = build() if rank == 0 else _build_on_meta(build, network_of)
    _GENERATORS[network_of(built)] = crc32(torch.default_generator.get_state().numpy().tobytes())
    return built


def _build_on_meta(build: Callable[[], Built], network_of: Callable[[Built], nn.Module]) -> Built:
    restore = restore_generators()
    try:
        with parameters_on_meta():
            built = build()
        if not (reason := without_values(network_of(built))):
            return built
    except Exception as error:  # may be the user's own, which comes again
        reason = str(error).partition("\n")[0]
    restore()
    log.info("This rank builds the whole network, as its code reads parameters: %s", reason)
    return build()


_GENERATORS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The state of torch's generator after a network was built."""


def without_values(*networks: nn.Module) -> str:
    """Describes a tensor on the meta device that gets no values from rank 0, because none of these networks holds it."""
    gc.collect()
    hparams = [getattr(network, name, {}) for network in networks for name in ("hparams", "hparams_initial")]
    copies = (value for saved in hparams for value in saved.values() if isinstance(value, nn.Module))
    get_values = {id(tensor) for module in (*networks, *copies) for tensor in (*module.parameters(), *module.buffers())}
    for value in gc.get_objects():
        if issubclass(type(value), Tensor) and value.is_meta and id(value) not in get_values:
            return f"a tensor of {tuple(value.shape)} was computed from them"
    return ""


class StayOnMeta(TorchFunctionMode):
    """Leaves tensors on the meta device where code moves a copy of the network to another one, before there are values."""

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if function is Tensor.to and _on_meta(args[0]):
            args = tuple("meta" if isinstance(value, (str, torch.device)) else value for value in args)
            kwargs = {name: "meta" if name == "device" else value for name, value in kwargs.items()}
        return function(*args, **kwargs)


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Gives memory, whose values are undefined, to each tensor on the meta device; other parameters move to the device, too."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_meta:
            _replace(tensor, torch.empty_like(tensor, device=device))
        elif isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor) and tensor.device != device:
            tensor.data = tensor.data.to(device)


Signature = list[tuple[str, tuple[int, ...], str]]


def signature(network: nn.Module) -> Signature:
    """Returns the name, shape and type of each parameter and buffer, and the generator's state, all the same on all ranks."""
    tensors = (*network.named_parameters(), *network.named_buffers())
    return [
        *((name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors),
        ("state of torch's generator", (_GENERATORS.get(network, 0),), ""),
    ]


def refuse_other_network(network: nn.Module, of_rank_0: Signature) -> None:
    """Refuses a network that differs from rank 0's, whose values it can't take."""
    for own, expected in zip_longest(signature(network), of_rank_0):
        if own != expected:
            raise UserError(
                f"strategy=sharded: the ranks have built different networks: {expected} on rank 0, and {own} here. HINT: the "
                "network may depend on nothing but its arguments; or set the strategy's deferred: false, if it reads values."
            )
