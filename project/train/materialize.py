"""Weights for a model that was built without memory for them (train/deferred.py): block by block, on a device."""

import gc
import logging

import torch
from torch import Tensor, nn

from project.errors import UserError
from project.train.replayed import HINT, Piece, Record, waiting

log = logging.getLogger(__name__)

Device = torch.device | str


def become(tensor: Tensor, other: Tensor) -> None:
    """The object stays what it is to all that refer to it, tied, with attributes and hooks. What it holds is the other's."""
    if tensor.is_leaf and tensor.grad is not None:
        raise UserError(f"A gradient was computed while the model was built, which can't be deferred. {HINT}")
    torch._C._swap_tensor_impl(tensor, other.detach().requires_grad_(tensor.requires_grad))
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks):
            setattr(tensor, hooks, getattr(tensor, hooks))  # torch hangs them on what the object holds


def materialize(module: nn.Module, device: Device, name: str = "") -> None:
    """Gives all that the module and its submodules hold the values that it would have, had nothing been deferred.

    Parameters and buffers come to lie on the device, other attributes on the CPU. The objects stay the same. What has values
    already keeps them, and is moved to the device where it lies on the CPU. Random generators are left as they are.

    Args:
        module: any part of the model.
        device: where it will compute.
        name: of the module, for errors.

    Raises:
        UserError: what was done to a tensor can't be done again. Or a tensor shares memory with a parameter that got its
            values in an earlier call, and is not the same parameter: the two would go on apart.
    """
    device = torch.device(device)
    for record in waiting:
        making = _Making(record)
        for path, part in module.named_modules(prefix=name):
            for key, tensor in _attributes(part):
                if record.knows(tensor):
                    making.real(f"{path}.{key}".lstrip("."), tensor, torch.device("cpu"))
            for key, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                if record.knows(tensor):
                    making.real(f"{path}.{key}".lstrip("."), tensor, device)
    for one in _held(module):
        if one.device.type == "cpu" != device.type:
            one.data = one.data.to(device)


def _held(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def finish(module: nn.Module, device: Device) -> None:
    """Gives values to what has none yet, here and wherever else tensors are kept that were made with the model; then what was
    noted is forgotten. Parameters that are not the module's, and buffers of modules that are not its, are left without."""
    materialize(module, device)
    gc.collect()
    for record in waiting:
        making = _Making(record)
        for tensor in _elsewhere(record, module):
            try:
                making.real("a tensor that is no parameter or buffer", tensor, torch.device("cpu"))
            except UserError as error:
                log.warning("%s Whoever uses it gets an error of torch's about the meta device.", error)
    waiting.clear()


def _attributes(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Tensors that a module holds by the way. Those that were computed from parameters come first, as they refer to them."""
    found = [(name, one) for name, one in vars(module).items() if isinstance(one, Tensor)]
    return sorted(found, key=lambda one: one[1].is_leaf)


def _elsewhere(record: Record, module: nn.Module) -> list[Tensor]:
    """Tensors that no module is known to hold: in lists, closures, objects of one's own."""
    found = [one for one in gc.get_objects() if issubclass(type(one), (Tensor, nn.Module))]
    ours = {id(one) for one in module.modules()}
    others = [one for one in found if isinstance(one, nn.Module) and id(one) not in ours]
    theirs = {id(buffer) for one in others for buffer in one.buffers(recurse=False)}
    return [one for one in found if record.knows(one) and id(one) not in theirs and not isinstance(one, nn.Parameter)]


class _Making:
    """One call: what shares memory in it shares it again."""

    def __init__(self, record: Record) -> None:
        self.record, self.made = record, dict[tuple[int, torch.device], torch.UntypedStorage]()
        self.before = {storage: [*pieces] for storage, pieces in record.given.items()}

    def real(self, name: str, tensor: Tensor, device: torch.device) -> None:
        piece = self.record.piece(tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        kept = self.record.kept.get((piece.storage, device))
        storage = kept or self.made.get((piece.storage, device))
        if storage is None or (kept and is_parameter):
            self._refuse_shared(name, piece, is_parameter)
        if storage is None:
            storage = _moved(self.record.replay([piece.storage])[piece.storage], device)
            self.made[piece.storage, device] = storage
        if not is_parameter:
            self.record.kept[piece.storage, device] = storage  # as it stays with the module, too
        self.record.given[piece.storage].append((*piece.bytes(), name, is_parameter))
        try:
            become(tensor, piece.of(storage))
        except RuntimeError as error:
            raise UserError(f"{name} can't be given its values: {error}. {HINT}") from error

    def _refuse_shared(self, name: str, piece: Piece, is_parameter: bool) -> None:
        start, end = piece.bytes()
        for first, last, other, other_is in self.before.get(piece.storage, ()):
            if first < end and start < last and (is_parameter or other_is):
                raise UserError(
                    f"{name} and {other} share memory, and are not the same parameter: sharded, they would go on apart. "
                    "HINT: let both modules hold the same parameter (a.weight = b.weight)."
                )


def _moved(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    if device.type == "cpu":
        return storage
    return torch.empty(0, dtype=torch.uint8).set_(storage).to(device).untyped_storage()
