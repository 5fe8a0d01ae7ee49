"""Optimisers: which are fused, which evaluate the loss by themselves, and what is to be done about either."""

from collections.abc import Callable, Iterator, Mapping

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer

from project.errors import UserError
from project.typed import StateDict


def all_evaluate_once(trainer: Trainer) -> bool:
    """Returns whether each optimiser needs one gradient for a step. LBFGS evaluates the loss repeatedly; of others than torch's
    nothing is known.
    """
    return all(map(evaluates_once, trainer.optimizers))


def evaluates_once(optimizer: Optimizer) -> bool:
    return f"{type(optimizer).__module__}.".startswith("torch.optim.") and not isinstance(optimizer, LBFGS)


def refuse_accumulation_of_lbfgs(trainer: Trainer) -> None:
    """Refuses LBFGS where a step has several micro-batches: Lightning evaluates the last of them anew, and adds its gradient to
    those before, which are of other weights.

    Raises:
        UserError: names the batch_size with which a step has one micro-batch.
    """
    many = trainer.accumulate_grad_batches
    if many > 1 and any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        raise UserError(
            f"LBFGS evaluates the loss of a step again and again, and a step has {many} micro-batches on each rank, of which "
            f"only the last is there then. HINT: set the loader's batch_size {many} times as large, or take another optimiser."
        )


def learning_rates(trainer: Trainer, name: str = "lr") -> list[float]:
    """Returns the learning rates of all groups of parameters that have one: Adafactor finds its own, and has None."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return [rate for group in groups if (rate := group.get(name)) is not None]


def states_in(saved: object, optimizer: Optimizer) -> Iterator[tuple[Tensor, StateDict]]:
    """Yields the states of an optimiser's parameters in its state_dict; none of one that has another layout than torch's."""
    states = saved.get("state") if isinstance(saved, Mapping) else None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        if isinstance(states, Mapping) and isinstance(state := states.get(number), dict):
            yield parameter, state


def restore_dtypes(
    optimizer: Optimizer, saved: object, in_same_precision: Callable[[Tensor], bool] = lambda parameter: True
) -> None:
    """Restores the dtypes of an optimiser's states after it has loaded `saved`. torch gives all of them the dtype of the
    parameters, which rounds NAdam's products and ASGD's rates in bf16, and an optimiser's own float32 beside weights in 16
    bits.
    """
    for parameter, values in states_in(saved, optimizer):
        restored = optimizer.state[parameter]
        for name, value in values.items():
            now = restored.get(name)
            if not isinstance(now, Tensor) or not isinstance(value, Tensor) or now.dtype == value.dtype:
                continue
            if value.shape != parameter.shape or in_same_precision(parameter):
                restored[name] = value.to(now.device)


def is_fused(optimizer: Optimizer) -> bool:
    """Returns whether the optimiser itself, on the device, skips a step whose gradient is flagged as not finite: the host need
    not wait.
    """
    return isinstance(optimizer, (SGD, Adam, AdamW, Adagrad)) and bool(optimizer.defaults.get("fused"))


def give_zero_momentum(optimizer: Optimizer) -> None:
    """Gives the parameters of a fused SGD a momentum of zeros, from which its first step computes the same values.

    torch leaves the momentum uninitialised until the first step; where loss scaling skips that step, the second one reads
    garbage, and weights become NaN. Other fused optimisers begin with zeros by themselves (docs/dev/upstream.md).

    Raises:
        UserError: the first step would compute something else, as it has a dampening.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        if not group["fused"] or not group["momentum"]:
            continue
        if group["dampening"]:
            raise UserError(
                "SGD with fused=true and a dampening keeps an undefined momentum where its first step is skipped. HINT: set "
                "fused=false, or dampening=0."
            )
        for parameter in group["params"]:
            if parameter.requires_grad and "momentum_buffer" not in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
