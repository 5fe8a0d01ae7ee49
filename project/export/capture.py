"""Captures weights and inputs from an evaluation: the export holds what `validate` and `test` use.

Callbacks and modules may exchange the weights for an evaluation (averages of them, say), and a data module's hooks make of a
batch what the network gets. So both are taken from within a real evaluation, and not from the checkpoint's file.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from project.errors import UserError
from project.survive.signals import EXIT_CODES, SIGNALS
from project.typed import TypedTrainer

BATCHES = 4  # of the validation set, that are looked at

Inputs = tuple[Tensor, ...]
"""What one call of `forward` takes."""

HOW = (
    "HINT: forward takes the batch if that is a tensor, its first part if it is a tuple or a list, and of a dict what its "
    "arguments are called (all tensors, if it is forward(**batch)), or 'image'; otherwise give the module an "
    "example_input_array."
)


class Capture(Callback):
    """A callback that keeps the weights and the batches of an evaluation; it stands behind all other callbacks."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        self.batches: list[Any] = []

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if dataloader_idx:
            return
        if not self.weights:
            state = pl_module.state_dict()
            self.weights = {name: _copy(value) if isinstance(value, Tensor) else value for name, value in state.items()}
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


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


@dataclass
class Samples:
    """The real inputs of `forward`, by the names of its arguments, in batches; and their origin."""

    names: list[str]
    batches: list[Inputs]
    origin: str

    @property
    def count(self) -> int:
        return sum(len(batch[0]) for batch in self.batches)


def has_forward(module: LightningModule) -> bool:
    """Returns whether the module has a forward of its own, which defines its inputs and outputs."""
    return is_overridden("forward", module, LightningModule)


def samples(module: LightningModule, batches: Sequence[Any], origin: str) -> Samples:
    """Returns the inputs of the module's `forward`, from batches; raises a UserError where they are ambiguous."""
    inputs = [_inputs(module, batch) for batch in batches]
    if inputs and all(arguments is not None for arguments in inputs):
        named = [arguments for arguments in inputs if arguments is not None]
    else:
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
    tensor = tensor.detach().to("cpu", copy=True)
    return tensor.float().clone() if tensor.is_floating_point() else tensor.clone()


def _arguments(module: LightningModule) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in inspect.signature(module.forward).parameters.values() if parameter.kind in kinds]


def _takes_any_name(module: LightningModule) -> bool:
    """Returns whether the signature is `forward(**batch)`."""
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return kinds == [inspect.Parameter.VAR_KEYWORD]


def _take_by_position(module: LightningModule, names: Sequence[str]) -> None:
    """Gives such a forward arguments with names: the exporters read its signature."""
    forward = module.forward

    def named(*args: Tensor) -> Any:
        return forward(**dict(zip(names, args, strict=True)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    named.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    module.forward = named  # type: ignore[method-assign]


def _inputs(module: LightningModule, batch: Any) -> dict[str, Tensor] | None:
    """Returns what `forward` takes of a batch, or None where that is ambiguous."""
    arguments = _arguments(module)
    needed = [argument.name for argument in arguments if argument.default is inspect.Parameter.empty]
    first = arguments[0].name if arguments else "input"
    if isinstance(batch, (tuple, list)) and batch:
        batch = batch[0]
    if isinstance(batch, Tensor):
        return {first: batch} if len(needed) <= 1 else None
    if not isinstance(batch, Mapping):
        return None
    if _takes_any_name(module):
        tensors = {str(name): value for name, value in batch.items() if isinstance(value, Tensor)}
        return tensors if tensors and all(name.isidentifier() for name in tensors) else None
    taken: dict[str, Tensor] = {}
    for argument in arguments:
        if not isinstance(batch.get(argument.name), Tensor):
            break  # those that follow would stand in its place
        taken[argument.name] = batch[argument.name]
    if taken and {*needed} <= {*taken}:
        return taken
    image = batch.get("image")
    return {first: image} if isinstance(image, Tensor) and len(needed) <= 1 else None


def _example(module: LightningModule) -> dict[str, Tensor]:
    example: Any = module.example_input_array
    if isinstance(example, Tensor):
        example = (example,)
    names = [argument.name for argument in _arguments(module)]
    if isinstance(example, tuple) and 0 < len(example) <= len(names) and all(isinstance(part, Tensor) for part in example):
        return dict(zip(names, example, strict=False))
    if isinstance(example, dict) and example and list(example) == names[: len(example)]:
        return dict(example)
    raise UserError(f"What {type(module).__name__}.forward takes of a batch can't be told. {HOW}")


def pieces(samples: Samples, size: int | None) -> list[Inputs]:
    """Returns the batches to check with: `size` samples each, or (None) any number: also one, and more than one."""
    batches = samples.batches
    if size is None:
        single = tuple(part[:1] for part in batches[0])
        more = [] if any(len(batch[0]) > 1 for batch in batches) else [tuple(part.repeat_interleave(2, 0) for part in single)]
        return [*more, *batches, single]
    cut = []
    for batch in batches:
        repeats = -(-size // len(batch[0]))
        filled = [torch.cat([part] * repeats) for part in batch]  # a batch that is too small is filled up with itself
        count = max(len(batch[0]) // size, 1)
        cut += [tuple(part[at * size : (at + 1) * size] for part in filled) for at in range(count)]
    return cut
