"""Fixes for trainer.exact what would make a run another one on another number of ranks, or refuses it by name."""

import logging
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.parameter import is_lazy

from project.errors import UserError
from project.sharded.shards import local
from project.step.batch_norm_layers import batch_norms, is_translated
from project.typed import TypedTrainer, typed

log = logging.getLogger(__name__)

_WARNED: set[str] = set()
_LIBRARIES = ("lightning", "torch", "torchmetrics", "project")
_INSTEAD = {
    "world_size": "what it is needed for can be a setting, in samples or steps",
    "num_training_batches": "trainer.estimated_stepping_batches are the steps of the run, the same on any number of ranks",
}


def refuse_inexact_settings(settings: Mapping[str, object], compression: str, strategy: object) -> None:
    """Raises a UserError for arguments of the Trainer with which sums can't be exact."""
    reasons = {
        "trainer.gradient_compression": "rounds what the ranks send each other" if compression != "none" else None,
        "trainer.sync_batchnorm": "normalises by what the ranks have at once" if settings.get("sync_batchnorm") else None,
        "trainer.benchmark": "picks the fastest algorithm, another one each time" if settings.get("benchmark") else None,
        "trainer.deterministic": "allows the device to add up in any order" if settings.get("deterministic") is False else None,
        "trainer.strategy": None
        if type(strategy).__name__ in ("DDPStrategy", "SingleDeviceStrategy", "Sharded")
        else "adds up by itself",
    }
    for name, why in reasons.items():
        if why:
            raise UserError(f"trainer.exact can't be kept: {name} {why}. HINT: leave {name} as it is by default.")


def warn_of_hash_randomization() -> None:
    """Warns where Python orders the strings of a set by chance; `python -m project` handles that by itself."""
    if sys.flags.hash_randomization and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        log.warning("trainer.exact: the order of a set of strings is another one in each process. HINT: PYTHONHASHSEED=0.")


def guarded_property(name: str) -> property:
    """Returns a property in place of the Trainer's of this name, whose value is another one on another number of ranks.

    With trainer.exact neither the module nor its data may read it; where they read the rank, a warning is logged, and without
    it where they read the number of micro-batches: schedules by hand go by that.
    """
    original: property = getattr(Trainer, name)
    warns_always = name == "num_training_batches"

    def ask(self: TypedTrainer) -> object:
        if (self.exact or warns_always) and (who := _user_code_that_reads(self, sys._getframe(1))):
            why = f"{who} asks for trainer.{name}, which is another one on another number of ranks"
            if name in _INSTEAD and self.exact:
                raise UserError(f"trainer.exact can't be kept: {why}. HINT: {_INSTEAD[name]}.")
            if self.is_global_zero and who not in _WARNED:
                _WARNED.add(who)
                hint = _INSTEAD.get(name, "a file's name or a print may go by it; what is computed may not")
                log.warning("%s%s. HINT: %s.", "trainer.exact: " if self.exact else "", why, hint)
        return original.__get__(self)

    return property(ask, doc=original.__doc__)


def _user_code_that_reads(trainer: TypedTrainer, asks: FrameType) -> str:
    """Returns the method of the module, or of its data, that reads a guarded property; '' where other code reads it."""
    if asks.f_globals.get("__name__") == LightningModule.__module__ and asks.f_back is not None:
        asks = asks.f_back  # self.global_rank
    those = trainer.lightning_module, typed(trainer).datamodule
    who = asks.f_locals.get("self")
    is_library = str(asks.f_globals.get("__name__")).split(".")[0] in _LIBRARIES
    known = who is not None and any(owner is who for owner in those) and not is_library
    return f"{type(who).__name__}.{asks.f_code.co_name}" if known else ""


def refuse_all_gather(*_: object, **__: object) -> NoReturn:
    """Raises a UserError in the place of the strategy's `all_gather`, which LightningModule's calls."""
    raise UserError(
        "trainer.exact can't be kept: self.all_gather brings together what the ranks have at once, another batch on "
        "another number of ranks. HINT: a larger micro-batch, the same on any number of ranks, or a torchmetrics.Metric."
    )


@runtime_checkable
class StaticShapes(Protocol):
    """A module that says whether it has torch.compile translate it for each shape by itself."""

    static_shapes: bool


def check_compiled(module: LightningModule, exact: bool) -> None:
    """Warns of what the module has had torch.compile translate, or refuses it with trainer.exact: kernels become dynamic when a
    shorter micro-batch comes by, and after a restart they are not until one does.

    `static_shapes = True` in the module means that it has set dynamic=False; ImageClassifier has.
    """
    names = [name or type(module).__name__ for name, submodule in module.named_modules() if is_translated(submodule)]
    if "training_step" in vars(module):  # torch.compile of the whole leaves another one there
        names.insert(0, type(module).__name__)
    if not names or (isinstance(module, StaticShapes) and module.static_shapes):
        return
    why = f"torch.compile translates {names[0]} anew as shapes change, and so after a restart sums may be rounded otherwise"
    hint = "torch.compile(..., dynamic=False), and static_shapes = True in the LightningModule."
    if exact:
        raise UserError(f"trainer.exact can't be kept: {why}. HINT: {hint}")
    if module.trainer.is_global_zero:
        log.warning("%s. HINT: %s", why, hint)


@contextmanager
def explain_missing_gradients() -> Iterator[None]:
    """Turns an error of `on_after_backward` into a UserError where `param.grad` is None, as before the end of a step."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        if "NoneType" not in str(error):
            raise
        raise UserError(
            "trainer.exact can't be kept: on_after_backward needs gradients, which are there after the last micro-batch of a "
            f"step, when they have been added up, and not before ({error}). HINT: on_before_optimizer_step, once a step."
        ) from error


class MovedWeights:
    """Detects moved weights: parameters and buffers that a step's micro-batches move (a codebook, a mean teacher, spectral
    norm's buffers) are each rank's own. Between the first forward pass of a step and its last gradient all of them must stay.

    Args:
        module: the network.
        keep: returns what it keeps of a parameter, to compare; None: it does not look at parameters.
        buffers: whether it looks at buffers.
        names: the parameters that it looks at; None: all.
    """

    def __init__(
        self,
        module: nn.Module,
        keep: Callable[[torch.Tensor], torch.Tensor] | None = torch.clone,
        buffers: bool = True,
        names: Container[str] | None = None,
    ) -> None:
        norms = {f"{name}.{buffer}" for name, norm in batch_norms(module) for buffer, _ in norm.named_buffers(recurse=False)}
        self._module, self._keep = module, keep
        # A sharded network has other objects under these names while it computes.
        self._parameters = [
            (name, parameter, keep(local(parameter.detach())))
            for name, parameter in module.named_parameters()
            if keep and (names is None or name in names) and not is_lazy(parameter)
        ]
        self._buffers = {
            name: buffer.clone()
            for name, buffer in module.named_buffers()
            if buffers and name not in norms and not is_lazy(buffer)
        }

    def moved_buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers that have moved, by name. Batch norm's are brought together."""
        buffers, known = self._module.named_buffers(), self._buffers
        return {name: buffer for name, buffer in buffers if name in known and not is_equal(buffer, known[name])}

    def moved_parameters(self) -> dict[str, torch.Tensor]:
        """Returns the parameters that have moved, by name."""
        moved, now, keep = dict[str, torch.Tensor](), dict(self._module.named_parameters()), self._keep or torch.clone
        for name, parameter, before in self._parameters:
            current = now.get(name, parameter) if local(parameter) is parameter else parameter  # it may be made anew
            if not is_equal(keep(local(current.detach())), before):
                moved[name] = current
        return moved

    def refuse(self, where: str = "in its forward pass") -> None:
        """Raises a UserError where a parameter or a buffer has moved."""
        once = "move it once a step, in on_before_optimizer_step, by what all ranks have (weights, gradients)"
        without = "a layer without it (InstanceNorm with track_running_stats=False, say)"
        in_forward = where == "in its forward pass"
        for name in self.moved_buffers():
            raise UserError(
                f"trainer.exact can't be kept: each micro-batch moves the buffer {name} {where}, and ranks have others. "
                f"HINT: {without if in_forward else once}, or trainer.exact=false."
            )
        for name in self.moved_parameters():
            raise UserError(
                f"trainer.exact can't be kept: each micro-batch moves the parameter {name} {where}, outside the optimiser, "
                f"and ranks have other micro-batches. HINT: {once}; or trainer.exact=false."
            )


def is_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if tensor.shape != other.shape:
        return False
    return torch.equal(tensor, other) or bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


def fix_threads(threads: int, exact: bool) -> None:
    """Sets the number of threads of a CPU's operations, which split a sum among their threads."""
    torch.set_num_threads(threads)
    many = f"Every rank computes with {threads} {'thread' if threads == 1 else 'threads'} (trainer.threads)"
    if exact:
        log.info(
            "%s, on any number of ranks: trainer.exact. The run is the same to the last bit wherever that is the same.", many
        )
    else:
        log.info("%s.", many)
