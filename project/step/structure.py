"""Notes which parameters learn, and in which of their optimisers' groups: by name, so that it can be saved and set up again.

Callbacks and modules may freeze, unfreeze and add groups during a run. PyTorch saves none of that: an optimiser's state
does not fit one with fewer groups, and a parameter that was unfrozen is frozen again in the process that resumes.
"""

import logging
from collections.abc import Iterable
from typing import TypedDict

from lightning.pytorch import Trainer
from torch import Tensor, nn

log = logging.getLogger(__name__)

_PRUNED = "_orig"  # torch calls a weight so as long as a mask lies over it


class Structure(TypedDict):
    """A plain record, as it lies in a checkpoint."""

    trainable: list[str]
    groups: list[list[list[str]] | None]
    """For each optimiser, the names in each of its groups; None where it holds parameters that are not the module's."""


Holder = tuple[dict[str, Tensor | None], str]
"""The place of a parameter or a buffer that a module has itself: in which dictionary, and under which name."""


def tensor_holders(module: nn.Module, names: Iterable[str]) -> list[Holder]:
    """Returns for each name the dict and the key that hold the tensor: `getattr` on a module takes ten times as long."""
    split = [(module.get_submodule(owner), name) for owner, _, name in (path.rpartition(".") for path in names)]
    return [(owner._parameters if name in owner._parameters else owner._buffers, name) for owner, name in split]  # type: ignore[misc]


def current_structure(trainer: Trainer) -> Structure:
    """Returns which parameters learn, and in which groups of their optimisers, by name."""
    named = dict(trainer.lightning_module.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    groups: list[list[list[str]] | None] = []
    for optimizer in trainer.optimizers:
        ids = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        known = all(key in names for group in ids for key in group)
        groups.append([[names[key] for key in group] for group in ids] if known else None)
    return {"trainable": [name for name, parameter in named.items() if parameter.requires_grad], "groups": groups}


def apply_structure(trainer: Trainer, wanted: Structure) -> None:
    """Freezes, unfreezes and groups the parameters as in `wanted`. A new group has its optimiser's defaults, until its state is
    loaded.
    """
    named = dict(trainer.lightning_module.named_parameters())
    learning = {name.removesuffix(_PRUNED) if name not in named else name for name in wanted["trainable"]}
    if any(name.endswith(_PRUNED) for name in set(wanted["trainable"]) - set(named)):
        log.warning(
            "A checkpoint has the weights that ModelPruning made 0, and not its masks: until the next pruning they learn "
            "again, and this run is not to the last bit what it would have been."
        )
    for name, parameter in named.items():
        if parameter.is_floating_point() and parameter.requires_grad != (name in learning):
            parameter.requires_grad_(name in learning)
    if len(wanted["groups"]) != len(trainer.optimizers):
        return
    now = current_structure(trainer)["groups"]
    for optimizer, groups, current in zip(trainer.optimizers, wanted["groups"], now, strict=True):
        if (
            groups is None
            or current is None
            or groups == current
            or any(name not in named for group in groups for name in group)
        ):
            continue
        before = optimizer.param_groups
        optimizer.param_groups = [
            {**(before[at] if at < len(before) else optimizer.defaults), "params": [named[name] for name in group]}
            for at, group in enumerate(groups)
        ]
