"""Captures weights and inputs from within an evaluation, because callbacks may exchange the weights for it, and a data module's
hooks make of a batch what the network gets."""

import inspect
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from project.errors import UserError
from project.survive.signals import EXIT_CODES, SIGNALS
from project.typed import TypedTrainer

BATCHES = 4  # of the validation set, that are looked at

Inputs = tuple[Tensor, ...]
"""The arguments of one call of `forward`."""

_BY_POSITION = inspect.Parameter.POSITIONAL_OR_KEYWORD

HOW = (
    "HINT: forward takes the batch if that is a tensor, its first part if it is a tuple or a list, and of a dict what its "
    "arguments are called (all tensors, if it is forward(**batch)), or 'image'; otherwise give the module an "
    "example_input_array."
)


class Capture(Callback):
    """A callback that keeps the weights and the batches of an evaluation; it stands behind all other callbacks."""

    def __init__(self) -> None:
        self.weights: dict[str, object] = {}
        self.batches: list[object] = []

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if dataloader_idx:
            return
        if not self.weights:
            state = pl_module.state_dict()
            self.weights = {
                name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                for name, value in state.items()
            }
        self.batches.append(batch)

    on_test_batch_start = on_validation_batch_start


def captured(
    trainer: TypedTrainer,
    model: LightningModule,
    datamodule: LightningDataModule | None,
    ckpt_path: str | Path | None,
    weights_only: bool | None,
) -> tuple[Capture, str]:
    """Returns weights and batches from within an evaluation of the validation set, else of the test set, and which it was."""
    capture, limits = Capture(), (trainer.limit_val_batches, trainer.limit_test_batches)
    trainer.limit_val_batches = trainer.limit_test_batches = BATCHES
    trainer.callbacks.append(capture)
    try:
        for verb, step, of in (
            (trainer.validate, "validation_step", "validation"),
            (trainer.test, "test_step", "test"),
        ):
            if is_overridden(step, model, LightningModule):
                verb(model, datamodule=datamodule, ckpt_path=ckpt_path, verbose=False, weights_only=weights_only)
                if SIGNALS.noted:
                    raise SystemExit(EXIT_CODES[SIGNALS.noted])
            if capture.weights:
                return capture, f"the {of} set"
    finally:
        trainer.callbacks.remove(capture)
        trainer.limit_val_batches, trainer.limit_test_batches = limits
    raise UserError(
        "There is nothing to check the export on. HINT: it takes a validation or a test set, and a module with "
        "validation_step or test_step."
    )


class Samples(NamedTuple):
    """The real inputs of `forward`, by the names of its arguments, in batches; and their origin."""

    names: list[str]
    batches: list[Inputs]
    origin: str


def samples(module: LightningModule, batches: Sequence[object], origin: str) -> Samples:
    """Returns the inputs of the module's `forward`, from batches; raises a UserError where they are ambiguous."""
    named = [arguments for batch in batches if (arguments := _inputs(module, batch)) is not None]
    if not named or len(named) < len(batches):
        named, origin = [_example(module)], "the module's example_input_array"
    names = list(named[0])
    made = [tuple(_plain(arguments[name]) for name in names) for arguments in named]
    if any(not part.ndim or len(part) != len(batch[0]) or not len(part) for batch in made for part in batch):
        raise UserError(f"The inputs of {type(module).__name__}.forward have no first dimension of samples in common. {HOW}")
    if _takes_any_name(module):
        _take_by_position(module, names)
    ranks = [[part.ndim for part in batch] for batch in made]
    return Samples(names, [batch for batch, rank in zip(made, ranks, strict=True) if rank == ranks[0]], origin)


def _plain(tensor: Tensor) -> Tensor:
    """Returns a copy on the CPU, in fp32 if it is floats, and outside of an evaluation's inference mode."""
    return tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


def _arguments(module: LightningModule) -> list[inspect.Parameter]:
    parameters = inspect.signature(module.forward).parameters.values()
    return [parameter for parameter in parameters if parameter.kind in (parameter.POSITIONAL_ONLY, _BY_POSITION)]


def _takes_any_name(module: LightningModule) -> bool:
    """Returns whether the signature is `forward(**batch)`."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [parameter.kind for parameter in parameters] == [inspect.Parameter.VAR_KEYWORD]


def _take_by_position(module: LightningModule, names: Sequence[str]) -> None:
    """Gives such a forward arguments with names: the exporters read its signature."""
    forward = module.forward

    def named(*args: Tensor) -> object:
        return forward(**dict(zip(names, args, strict=True)))

    parameters = [inspect.Parameter(name, _BY_POSITION) for name in names]
    named.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    module.forward = named  # type: ignore[method-assign]


def _inputs(module: LightningModule, batch: object) -> dict[str, Tensor] | None:
    """Returns the arguments of `forward` in a batch, or None where they are ambiguous."""
    arguments = _arguments(module)
    needed = {argument.name for argument in arguments if argument.default is inspect.Parameter.empty}
    first = arguments[0].name if arguments else "input"
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if isinstance(batch, Mapping):
        tensors = {str(name): value for name, value in batch.items() if isinstance(value, Tensor)}
        if _takes_any_name(module):
            return tensors if tensors and all(name.isidentifier() for name in tensors) else None
        names = [*takewhile(tensors.__contains__, (argument.name for argument in arguments))]
        if names and needed <= {*names}:
            return {name: tensors[name] for name in names}
        batch = tensors.get("image")
    return {first: batch} if isinstance(batch, Tensor) and len(needed) <= 1 else None


def _example(module: LightningModule) -> dict[str, Tensor]:
    example: object = module.example_input_array
    names = [argument.name for argument in _arguments(module)]
    if isinstance(example, Tensor):
        example = (example,)
    if isinstance(example, tuple) and len(example) <= len(names):
        example = dict(zip(names, example, strict=False))
    if isinstance(example, dict) and example and list(example) == names[: len(example)]:
        parts = {name: part for name, part in example.items() if isinstance(part, Tensor)}
        if len(parts) == len(example):
            return parts
    raise UserError(f"What {type(module).__name__}.forward takes of a batch can't be told. {HOW}")


def pieces(batches: list[Inputs], size: int | None) -> list[Inputs]:
    """Returns the batches to check with: `size` samples each, or (None) any number: also one, and more than one."""
    if size is None:
        single = tuple(part[:1] for part in batches[0])
        more = [] if any(len(batch[0]) > 1 for batch in batches) else [tuple(part.repeat_interleave(2, 0) for part in single)]
        return [*more, *batches, single]
    cut = []
    for batch in batches:
        repeats = -(-size // len(batch[0]))
        filled = [torch.cat([part] * repeats) for part in batch]  # a batch that is too small is filled up with itself
        for start in range(0, max(len(batch[0]) - size + 1, 1), size):
            cut.append(tuple(part[start : start + size] for part in filled))
    return cut
