"""Tensor parallelism: the layers that a plan names are cut, and neighbouring ranks compute a part of them each, torch's way.

The plan is the network's. What it does not name stays whole on each of these ranks, which compute the same with it: their
dropout, too, as random numbers follow from the micro-batch.
"""

from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from project.errors import UserError

Plan = dict[str, ParallelStyle]
"""By the names of modules."""

_METHOD = "tensor_parallel_plan"


def refuse_settings(tensor: int, ranks: int, here: int, exact: bool) -> None:
    """Refuses settings that do not go with so many ranks for a layer. `here`: the ranks of a host."""
    if tensor < 1:
        raise UserError(f"strategy=sharded: tensor_parallel={tensor}. HINT: 1 is none, 2 shares layers between two ranks.")
    if tensor == 1:
        return
    if exact:
        raise UserError(
            f"strategy=sharded: trainer.exact can't be kept: with tensor_parallel={tensor} a layer's own sums are added up "
            "over the ranks, in an order that depends on their number. HINT: leave out tensor_parallel."
        )
    if ranks > 1 and here % tensor:
        raise UserError(
            f"strategy=sharded: tensor_parallel={tensor} takes so many ranks of a host for each micro-batch, and {here} are no "
            f"multiple of it. HINT: set trainer.devices={-(-here // tensor) * tensor}, or another tensor_parallel."
        )


def refuse_single_rank(tensor: int, ranks: int) -> None:
    """Refuses a fit on one rank. An evaluation there has the network whole, and gives the same."""
    if tensor > 1 and ranks == 1:
        raise UserError(
            f"strategy=sharded: tensor_parallel={tensor} takes so many ranks for each micro-batch, and there is one. HINT: set "
            f"trainer.devices={tensor}, or tensor_parallel=1."
        )


def plan_of(module: nn.Module) -> Plan:
    """Returns the plan of a module, or of its `network`, with the names of all modules that its patterns mean."""
    owners = {"": module, "network.": dict(module.named_modules(remove_duplicate=False)).get("network")}
    prefix = next((prefix for prefix, owner in owners.items() if callable(getattr(owner, _METHOD, None))), None)
    if prefix is None:
        raise UserError(
            f"strategy=sharded: tensor_parallel needs a plan, and {type(module).__name__} has none. HINT: give it, or its "
            f"network, a method {_METHOD}() that returns what torch's parallelize_module takes: "
            "{'layers.*.mlp.0': ColwiseParallel()}."
        )
    owner = owners[prefix]
    assert isinstance(owner, nn.Module)
    plan: Plan = {}
    for pattern, style in getattr(owner, _METHOD)().items():
        if not isinstance(style, ParallelStyle):
            raise UserError(
                f"{type(owner).__name__}.{_METHOD}: {pattern} has {style!r}, which is no style. HINT: ColwiseParallel() and "
                "others of torch.distributed.tensor.parallel."
            )
        names = [name for name, _ in owner.named_modules() if name and _matches(name, pattern)]
        if not names:
            raise UserError(
                f"{type(owner).__name__}.{_METHOD}: there is no module {pattern}. HINT: names as in named_modules(), with * "
                "for a part of one: layers.*.mlp.0."
            )
        plan |= {f"{prefix}{name}": style for name in names}
    _refuse_tied(module, plan)
    return plan


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _refuse_tied(module: nn.Module, plan: Plan) -> None:
    """Refuses to cut a layer that shares a weight: a layer that is cut gets parameters of its own."""
    holders: dict[int, set[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        for parameter in part.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(name)
    for name in plan:
        for parameter in module.get_submodule(name).parameters():
            outside = [holder for holder in holders[id(parameter)] if not f"{holder}.".startswith(f"{name}.")]
            if outside:
                raise UserError(
                    f"strategy=sharded: the plan cuts {name}, and {min(outside) or 'the module itself'} has the same weight, "
                    f"which would be another one then. HINT: leave {name} out of the plan."
                )


def parallelize_layers(name: str, block: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Cuts what the plan names in a block, of which all ranks have the same values. `name`: the block's."""
    for at, style in plan.items():
        if name and not f"{at}.".startswith(f"{name}."):
            continue
        layer = block.get_submodule(at[len(name) + 1 :] if name else at)
        if any(isinstance(parameter, DTensor) for parameter in layer.parameters()):
            continue  # in a block that is done
        parallelize_module(layer, mesh, style, src_data_rank=None)
        _refuse_odd_parts(at, layer, mesh)


def _refuse_odd_parts(name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
    """Raises a UserError where a layer's width is no multiple of the ranks that share it."""
    for at, part in layer.named_parameters():
        for placement in part.placements if isinstance(part, DTensor) else ():
            dimension = getattr(placement, "dim", None)
            if dimension is not None and part.shape[dimension] % mesh.size():
                raise UserError(
                    f"strategy=sharded: {name}.{at} has {part.shape[dimension]} of what is cut, and {mesh.size()} ranks can't "
                    "have the same share each. HINT: another width, or another tensor_parallel."
                )
