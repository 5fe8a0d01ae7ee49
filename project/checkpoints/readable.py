"""Checks that a checkpoint can be read again before a run depends on it, and names what can't.

Checkpoints are read with PyTorch's `weights_only`, because anything else runs code from the file. That takes tensors, plain
values, and here numpy's arrays and numbers, and paths, too.
"""

import io
import pickle
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from project.errors import UserError
from project.plain_values import plain_values


def check(checkpoint: dict[str, Any]) -> None:
    """Raises a UserError that names the part of a checkpoint that could not be read again. Skips tensors, which can."""
    if _problem(checkpoint) is None:
        return
    states = checkpoint.get("callbacks") or {}
    parts = {
        **{f"the state of the callback {str(name).partition('{')[0]}": state for name, state in states.items()},
        **{f"{key!r} of the checkpoint": part for key, part in checkpoint.items() if key != "callbacks"},
    }
    problems = {name: problem for name, part in parts.items() if (problem := _problem(part))}
    name, problem = next(iter(problems.items()), ("the checkpoint", _problem(checkpoint) or ""))
    raise UserError(
        f"A run could not go on from this checkpoint: {name} holds what can't be read again ({problem}). HINT: keep tensors, "
        "arrays, numbers, strings, lists and dicts in what is saved (state_dict, get_extra_state, on_save_checkpoint)."
    )


def _problem(part: Any) -> str | None:
    """Returns PyTorch's complaint about reading a part, or None."""
    file = io.BytesIO()
    try:
        torch.save(apply_to_collection(part, torch.Tensor, lambda tensor: torch.empty(0, dtype=tensor.dtype)), file)
        file.seek(0)
        with plain_values():
            torch.load(file, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        return _torch_reason(str(error))
    return None


def _torch_reason(text: str) -> str:
    """Returns PyTorch's reason, without its page of advice."""
    _, separator, reason = text.partition("WeightsUnpickler error: ")
    return (reason if separator else text).strip().splitlines()[0].partition(" was not an allowed global")[0]
