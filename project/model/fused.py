"""An optimiser that takes its step in one launch on a GPU, and skips one that is not finite without a look by the host."""

from collections.abc import Collection

from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer


def fused(optimizer: Optimizer, devices: Collection[str] = ("cuda",)) -> Optimizer:
    """Returns the same optimiser, which has not taken a step yet, fused on the `devices` on which that pays, if it is possible
    and its settings don't choose an implementation."""
    given = optimizer.defaults
    chosen = given.get("fused") is not None or any(given.get(option) for option in ("foreach", "differentiable"))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    fits = all(parameter.device.type in devices and parameter.is_floating_point() for parameter in parameters)
    if chosen or not fits or type(optimizer) not in (SGD, Adam, AdamW):
        return optimizer
    if isinstance(optimizer, SGD) and (any(isinstance(parameter, DTensor) for parameter in parameters) or given["dampening"]):
        return optimizer  # torch has no such kernel for a shard; and see `give_zero_momentum`
    groups = [{name: value for name, value in group.items() if name != "fused"} for group in optimizer.param_groups]
    made: Optimizer = type(optimizer)(groups, fused=True)  # type: ignore[call-arg]
    made.defaults.update({**optimizer.defaults, "fused": True})
    return made
