"""The default learning-rate schedule: linear warm-up, then half a cosine down to zero, a new value every step."""

from math import cos, pi

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from project.errors import UserError


class WarmupCosine(LRScheduler):
    """Linear warm-up over `warmup_steps` optimiser steps, then cosine decay to zero at `total_steps`.

    Args:
        optimizer: the optimiser whose learning rates are scaled.
        warmup_steps: optimiser steps until the full learning rate is reached.
        total_steps: optimiser steps of the whole run; None takes it from the Trainer.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0, total_steps: int | None = None) -> None:
        if warmup_steps < 0:
            raise UserError(f"warmup_steps can't be negative, and is {warmup_steps}.")
        if total_steps is not None and total_steps < 1:
            raise UserError(f"total_steps is 1 at least, and not {total_steps}.")
        self.warmup_steps, self.total_steps = warmup_steps, total_steps
        self.steps_per_move = 1  # more, where it moves once an epoch
        super().__init__(optimizer)

    def factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.total_steps is None:
            return 1.0
        after = max(1, self.total_steps - self.warmup_steps)
        return (1 + cos(pi * min(1.0, (step - self.warmup_steps) / after))) / 2

    def get_lr(self) -> list[float | Tensor]:
        factor = self.factor(self.last_epoch * self.steps_per_move)  # torch's word for the number of calls
        return [base * factor for base in self.base_lrs]

    _get_closed_form_lr = get_lr  # PyTorch's word for a schedule whose rates follow from the step alone
