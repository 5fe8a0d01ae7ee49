"""Initialises a network's weights from a file: another run's checkpoint, or any state_dict."""

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from project.errors import UserError
from project.parts import Parted, Stored
from project.plain_values import load

log = logging.getLogger(__name__)

_NAMES = ("state_dict", "model_state_dict", "model", "network", "net", "weights")  # of the weights in others' files
_SHOWN = 5


def start_from(network: nn.Module, path: Path, prefix: str = "", say: bool = True) -> None:
    """Loads the weights that fit, by name and shape, and reports the others, if it is to `say` so. Raises an error where none
    fits. The names in the file begin with `prefix`, and the network's own don't."""
    file_weights, state = _read(path), network.state_dict()
    named = {name[len(prefix) :]: value for name, value in file_weights.items() if name.startswith(prefix)}
    fitting = {name: value for name, value in named.items() if name in state and value.shape == state[name].shape}
    if not any(name in fitting for name, _ in network.named_parameters()):
        wanted, first_name = next(iter(state), "none"), next(iter(file_weights))
        raise UserError(
            f"Nothing in {path} fits the network: its first name is {first_name!r}, the network's is {wanted!r}."
            f"{_better_prefix(file_weights, state, prefix)}"
        )
    network.load_state_dict({name: _spread_like(state[name], value) for name, value in fitting.items()}, strict=False)
    if not say:
        return
    log.info("%d of the network's %d tensors begin as in %s.", len(fitting), len(state), path)
    left = {
        "Of another shape": [
            f"{name} ({tuple(value.shape)} there, {tuple(state[name].shape)} here)"
            for name, value in named.items()
            if name in state and name not in fitting
        ],
        "not in the file": [name for name in state if name not in named],
        "not in the network": [
            name for name in file_weights if not name.startswith(prefix) or name[len(prefix) :] not in state
        ],
    }
    if text := "; ".join(f"{what}: {_listed(names)}" for what, names in left.items() if names):
        log.warning("What did not fit was left as it is. %s", text[:1].upper() + text[1:])


def _spread_like(like: Tensor, given: Tensor | Stored) -> Tensor:
    """Returns this rank's shard of a value, where the network is sharded, without communication."""
    value = given.read() if isinstance(given, Stored) else given
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _read(path: Path) -> dict[str, Tensor | Stored]:
    if not path.exists():
        raise UserError(f"There is no file {path}. HINT: model.init_from is the path of a state_dict or a checkpoint.")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        # Of a folder of parts, tensors are read later, when it is known which of them are the weights.
        content: object = load(path) if path.is_file() else Parted(path, load).checkpoint(lambda stored: stored)
    except UserError:
        raise
    except Exception as error:  # whatever a file that is none makes of the reader
        raise UserError(
            f"{path} can't be read: it is not a file of torch.save, or it holds more than weights and plain values, and "
            "reading that could run code. HINT: where it comes from, save the weights alone: torch.save(model.state_dict(), "
            "path)."
        ) from error
    keys = f"a {type(content).__name__}"
    if isinstance(content, Mapping):
        for value in (*(content[name] for name in _NAMES if name in content), content):
            weights = value if isinstance(value, Mapping) else {}
            if tensors := {str(name): tensor for name, tensor in weights.items() if isinstance(tensor, (Tensor, Stored))}:
                return tensors
        keys = f"the keys {', '.join(map(str, list(content)[:8]))}"
    raise UserError(f"There are no weights in {path}, but {keys}. HINT: a state_dict, alone or under {', '.join(_NAMES)}.")


def _read_safetensors(path: Path) -> dict[str, Tensor | Stored]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise UserError(f"{path} needs safetensors. HINT: pip install 'samerun[export]'") from error
    try:
        tensors: dict[str, Tensor | Stored] = {**load_file(path)}
    except Exception as error:  # whatever a file that is none makes of the reader
        raise UserError(f"{path} can't be read as safetensors: {error}") from error
    if not tensors:
        raise UserError(f"There are no weights in {path}.")
    return tensors


def _better_prefix(file_weights: Mapping[str, Tensor | Stored], state: Mapping[str, Tensor], given: str) -> str:
    """Returns a hint with the prefix with which the most would fit."""
    name = next((name for name, value in state.items() if value.ndim), "")
    prefixes = {other[: -len(name)] for other in file_weights if name and other.endswith(name)} - {given}
    shapes = {name: value.shape for name, value in file_weights.items()}
    counts = {prefix: sum(shapes.get(prefix + name) == value.shape for name, value in state.items()) for prefix in prefixes}
    best = max(counts, key=counts.__getitem__, default=None)
    if best is None or not counts[best]:
        return " HINT: is it of the same kind of network?"
    return f" HINT: with model.init_prefix={best!r} {counts[best]} of {len(state)} would fit."


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
