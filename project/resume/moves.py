"""Warns of weights and buffers that micro-batches move outside of the optimiser: they depend on the number of ranks."""

import logging
from collections.abc import Set

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from project.data.self_dealing import SelfDealing
from project.errors import listed
from project.exact.checks import MovedWeights
from project.sharded.strategy import is_sharded
from project.step.bits import sum_of_bits
from project.step.evaluation import loaders_of
from project.typed import typed

log = logging.getLogger(__name__)

_SHOWN = 12  # names
_STEPS = 3  # in the first one a teacher is what the network is, and in the second one, too, if the rate begins at 0


class MicroBatchMoves(Callback):
    """Warns, in the first steps of a run and in the first of each epoch, of what micro-batches move outside of the optimiser.

    It looks before users' callbacks do: what these move in `on_before_zero_grad` or `on_before_optimizer_step` moves once a
    step. In a step of several micro-batches parameters are looked at from the first backward pass to the last, so that what
    moves as the step begins, or after it, moves once as well.
    """

    _watches = _first = False  # before the first step, and in other verbs, whose backward passes call these hooks, too
    _kept: MovedWeights | None = None
    _untrained: Set[str] = frozenset()
    """The parameters that the first step's optimisers did not train: the host waits for no others."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._moved: dict[str, Tensor] = {}
        self._untrained = frozenset()  # of another fit
        self._steps, self._first_step, self._named = _STEPS, trainer.global_step, False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch & (trainer.current_epoch - 1) == 0:  # 1, 2, 4, 8 ...: the host waits for the device
            self._steps = max(self._steps, 1)

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watches = self._steps > 0 and not self._named and trainer.is_global_zero and not typed(trainer).exact
        self._steps -= 1
        self._first = trainer.global_step == self._first_step
        self._kept, self._moved = None, {}
        self._keep(trainer, pl_module, trainer.accumulate_grad_batches == 1)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._look()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._kept is None:
            self._keep(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._watches:
            return
        self._look()
        self._watches = False
        if not (self._first or self._moved):
            return
        groups = [group for each in trainer.optimizers for group in each.param_groups]
        trained = {id(weight) for group in groups for weight in group["params"] if weight.grad is not None}
        if self._first:
            self._untrained = {name for name, weight in pl_module.named_parameters() if id(weight) not in trained}
        names = [name for name, tensor in self._moved.items() if id(tensor) not in trained]
        if names:
            self._named = not self._first
            log.warning(
                "%s: the network moves it with each micro-batch of a rank, and on several ranks it is rank 0's: on another "
                "number of ranks it is another one. HINT: move it once a step, in on_before_optimizer_step, by what all ranks "
                "have.",
                listed(names, _SHOWN),
            )

    def _keep(self, trainer: Trainer, module: LightningModule, parameters: bool = True) -> None:
        """Keeps what the buffers are, in the first step, or the parameters: a schedule may move a buffer in a later one."""
        if self._watches:
            looks_at_parameters = (
                parameters and self._untrained and not is_sharded(trainer) and _has_several_micro_batches(trainer)
            )
            keep = sum_of_bits if looks_at_parameters else None
            self._kept = MovedWeights(module, keep, self._first, self._untrained)

    def _look(self) -> None:
        """Notes what has moved since `_keep`."""
        if self._kept is not None:
            self._moved |= self._kept.moved_buffers() | self._kept.moved_parameters()
            self._kept = None


def _has_several_micro_batches(trainer: Trainer) -> bool:
    """Returns whether a step has several micro-batches, over all ranks, or would have on fewer of them."""
    if not trainer.lightning_module.automatic_optimization:
        return False
    loaders = loaders_of(trainer)
    stays = loaders.global_batch is not None or isinstance(loaders.attached, SelfDealing)  # on any number of ranks
    return trainer.accumulate_grad_batches > 1 or (trainer.world_size > 1 and stays)
