"""Finds what the user's objects keep in Python, beside weights and states: digests of their attributes, by name."""

import dis
import itertools
import re
import sys
from collections import Counter, deque
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from functools import cache, partial
from inspect import getattr_static
from types import FunctionType, GeneratorType, ModuleType
from typing import TypeVar

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric, Metric

from project.data.generators import Generators
from project.data.values import (
    CACHED,
    GENERATORS,
    Digests,
    ends_of,
    is_in_a_library,
    is_of_a_library,
    is_own_file,
    users_class,
)
from project.step.evaluation import loaders_of
from project.typed import StateDict, typed

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_LIGHTNING = {*vars(LightningModule()), *vars(LightningDataModule()), "_dtype", "_device", "_metric_attributes"}
_OF_OPTIMIZERS = {
    *vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)),
    *("step", "_opt_called", "param_groups", "state"),
}
_STANDARD = (
    *("configuration", "global_batch", "epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks"),
    *("optimizer_states", "lr_schedulers", "schedules_as_built", "position", "threads", "training_samples", "MixedPrecision"),
    *("callback_metrics", "logged_names", "logged_sums", "metric_states", "exact_grids", "exact_metrics", "states_of_ranks"),
    "exact_validations",
    *("states_of_loaders", "unsaved_buffers", "averaging_state", "current_model_state", "samples_of_a_micro_batch"),
    *("changed_values", "stopped_early", "hparams_name", "hyper_parameters"),
    *("datamodule_hparams_name", "datamodule_hyper_parameters"),
)
"""Parts of a checkpoint in which no attribute of a user is looked for."""
_OF_METRICS = {*vars(MeanMetric())}
_PLAIN = (bool, int, float, list, dict, set, deque, np.ndarray, torch.Tensor, itertools.count, Metric, Optimizer, LRScheduler)
_MOST_FILES = 100  # of the user's, that are looked at

T = TypeVar("T")
Attributes = Mapping[str, Mapping[str, bytes]]
"""The digests of the attributes of each owner; UNKNOWN of those that can't be compared."""
UNKNOWN = b""


def attributes(trainer: Trainer) -> Attributes:
    """Returns digests of the attributes of the user's objects, and of what their hooks and files keep."""
    digests = Digests(_saved_elsewhere(trainer))
    kept = {name: _values(owner) for name, owner in owners(trainer)}
    for name, more in (*_hooks(trainer), *_functions(trainer), *_layers(trainer), *_attached(trainer), *_globals(trainer)):
        kept[name] = {**kept.get(name, {}), **more}
    return {
        name: {attribute: digests.of(value) or UNKNOWN for attribute, value in values.items()} for name, values in kept.items()
    }


def values(trainer: Trainer) -> Iterator[tuple[str, object]]:
    """Yields what users keep in their objects, with its name."""
    for name, owner in owners(trainer):
        yield from ((f"{name}.{attribute}", value) for attribute, value in _values(owner).items())


def changed_attributes(now: Attributes, before: Attributes) -> dict[str, bytes]:
    """Returns the digests of attributes that have changed since `before`, by name: 'owner.attribute'."""
    earlier = by_name(before)
    return {
        name: digest
        for name, digest in by_name({owner: values for owner, values in now.items() if owner in before}).items()
        if UNKNOWN not in (digest, earlier.get(name)) and digest != earlier.get(name)
    }


def by_name(attributes: Attributes) -> dict[str, bytes]:
    """Returns the digests by 'owner.attribute'."""
    return {f"{owner}.{attribute}": digest for owner, values in attributes.items() for attribute, digest in values.items()}


def lies_in(name: str, attribute: str) -> bool:
    """Returns whether a name is that of an attribute, or of something in it."""
    return f"{name}.".startswith(f"{attribute}.")


def unsaved_attributes(trainer: Trainer, before: Attributes, drawn: Mapping[str, bytes], checkpoint: StateDict) -> list[str]:
    """Returns the names of attributes that have changed since `before`, and that a checkpoint of now does not hold.

    `drawn`: digests of generators that have drawn since then, by name; those in these attributes need no line of their own.
    """
    changed = changed_attributes(attributes(trainer), before)
    changed |= {name: digest for name, digest in drawn.items() if not any(lies_in(name, of) for of in changed)}
    if not changed:  # what is saved may be large, and is looked at for these alone
        return []
    digests = Digests(_saved_elsewhere(trainer))
    parts = {name: part for name, part in checkpoint.items() if name not in _STANDARD}
    parts |= {name: part for name, part in checkpoint["state_dict"].items() if name.endswith("extra_state")}
    states = [*checkpoint.get("optimizer_states", ()), *checkpoint.get("lr_schedulers", ())]
    for number, state in enumerate(states):
        parts[f"{number}"] = {name: part for name, part in state.items() if name not in _OF_OPTIMIZERS}
    saved = digests.within(parts)
    states_of = checkpoint.get("callbacks", {})
    known = {
        type(callback).__name__: digests.within(states_of.get(callback.state_key)) for callback in typed(trainer).callbacks
    }
    kept = dict(values(trainer))

    def is_saved(name: str, digest: bytes) -> bool:
        holds = known.get(re.split("[ .]", name)[0], saved)
        return holds is None or digest in holds or bool((state := _own_state(kept.get(name))) and digests.of(state) in holds)

    return [name for name, digest in changed.items() if not is_saved(name, digest)]


def _own_state(value: object) -> object:
    """Returns what an object (an average of the weights, say) saves by itself, which a user puts in a checkpoint; else None. A
    module's own digest has all of it, and a loader's state may begin an epoch.
    """
    method = None if isinstance(value, (nn.Module, Iterable)) else getattr_static(type(value), "state_dict", None)
    try:
        return method(value) if callable(method) else None
    except Exception:  # the object's, which the user does not call, then
        return None


def owners(trainer: Trainer) -> Iterator[tuple[str, object]]:
    """Yields what users write, by name: the module and those in it, callbacks, the data, its training sets, optimisers."""
    module = trainer.lightning_module
    for path, part in module.named_modules():
        if not is_of_a_library(type(part)):
            yield _name(module, path), part
    callbacks = typed(trainer).callbacks
    data = typed(trainer).datamodule
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    readers = {id(inner): inner for reader in loaders_of(trainer).readers_in_process for inner in _behind(reader)}
    others = (*callbacks, data, *readers.values(), *trainer.optimizers, *schedules)
    yield from _numbered(owner for owner in others if owner is not None and not is_of_a_library(type(owner)))


def _behind(reader: object, deep: int = 4) -> Iterator[object]:
    """Yields a reader of samples, or the users' objects behind it, if it is Python's or torch's: a Subset, a partial."""
    if isinstance(reader, (FunctionType, type)):
        return
    if not is_of_a_library(type(reader)):
        yield reader
    elif deep:
        parts = reader if isinstance(reader, (list, tuple)) else [*vars(reader).values()] if hasattr(reader, "__dict__") else []
        parts = [reader.func, reader.args, *reader.keywords.values()] if isinstance(reader, partial) else parts
        for part in ends_of(parts):
            yield from _behind(part, deep - 1)


def readers(trainer: Trainer) -> Iterator[tuple[str, object]]:
    """Yields the functions with which this process reads samples, with their names."""
    for reader in loaders_of(trainer).readers_in_process:
        if function := _function(reader):
            yield f"DataLoader.{function.__qualname__}", reader


def _function(reader: object) -> FunctionType | None:
    """Returns the user's function that a reader of samples is, or is a partial of."""
    function = reader.func if isinstance(reader, partial) else reader
    return function if isinstance(function, FunctionType) and not is_of_a_library(function) else None


def _numbered(objects: Iterable[object]) -> Iterator[tuple[str, object]]:
    """Yields objects with the names of their classes, and with a number from the second one of a class on."""
    seen = Counter[str]()
    for owner in objects:
        name = users_class(type(owner)).__name__
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name} {seen[name]}", owner


def _name(module: LightningModule, path: str) -> str:
    return f"{users_class(type(module)).__name__}{'.' if path else ''}{path}"


def generators(trainer: Trainer) -> Generators:
    """Returns the random generators that the user's objects and functions hold, wherever in them."""
    return Generators([*readers(trainer), *owners(trainer)])


def _saved_elsewhere(trainer: Trainer) -> Iterator[object]:
    """Yields objects that are saved, or compared, by themselves: an attribute that refers to one has no value of its own."""
    module = trainer.lightning_module
    yield from (trainer, trainer.strategy, *trainer.loggers)
    for optimizer in trainer.optimizers:  # also those that it wraps, if they share its state
        yield from (optimizer, *(inner for inner in _within(optimizer, Optimizer) if inner.state is optimizer.state))
    for config in trainer.lr_scheduler_configs:
        yield config.scheduler
        if is_of_a_library(type(config.scheduler)):  # SequentialLR saves its parts
            yield from _within(config.scheduler, LRScheduler)
    yield from (*module.modules(), *module.parameters(), *module.buffers())
    yield from (owner for _, owner in owners(trainer))


def _within(outer: T, kind: type[T]) -> list[T]:
    """Returns the objects of a kind that an object of that kind has as attributes, or in lists, and those within these."""
    those = [outer]
    for each in those:
        for value in vars(each).values():
            inner = value if isinstance(value, (list, tuple)) else [value]
            those += [item for item in inner if isinstance(item, kind) and all(item is not known for known in those)]
    return those[1:]


def _values(owner: object) -> dict[str, object]:
    """Returns its attributes, and those that its class has for all its instances."""
    shared: dict[str, object] = {}
    for kind in reversed(type(owner).__mro__):
        if not is_in_a_library(kind.__module__):
            shared |= _plain(vars(kind), {kind.__module__})
    aside = _OF_OPTIMIZERS if isinstance(owner, torch.optim.Optimizer) else _OF_LIGHTNING
    if isinstance(owner, Callback):
        aside = aside.union(*(_set_by(base) for base in type(owner).__mro__ if is_of_a_library(base)))
    if isinstance(owner, Metric):  # whose states are saved by themselves
        aside = aside | _OF_METRICS | {*owner.metric_state}

    def is_method(name: str, value: object) -> bool:  # which others put there
        of_class = getattr_static(type(owner), name, None)
        return callable(value) and (callable(of_class) or isinstance(of_class, classmethod)) and not isinstance(value, CACHED)

    return {
        name: value
        for name, value in {**shared, **getattr(owner, "__dict__", {})}.items()
        if name not in aside
        and not name.startswith(("_ddp", "__pl_"))  # torch's, and Lightning's in a loader
        and not is_method(name, value)
        and not (name == "_hparams" and isinstance(value, dict) and not value)  # it is made where somebody looks for it
    }


@cache
def _set_by(kind: Hashable) -> set[str]:
    """Returns the attributes that the methods of a class set: a library's class saves its own by itself."""
    codes = [method.__code__ for method in vars(kind).values() if isinstance(method, FunctionType)]
    return {step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}


def _plain(kept: Mapping[str, object], files: Container[str] = ()) -> dict[str, object]:
    """Returns the numbers, lists and generators among a class's or a file's values; also objects of classes in `files`, and
    functions that keep something.
    """

    def keeps(value: object) -> bool:
        if isinstance(value, FunctionType):
            kept = value.__dict__ or value.__defaults__ or value.__kwdefaults__ or value.__closure__
            return value.__module__ in files and bool(kept)
        return isinstance(value, (*_PLAIN, *GENERATORS, CACHED, GeneratorType)) or type(value).__module__ in files

    return {name: value for name, value in [*kept.items()] if not name.startswith("__") and keeps(value)}


def _hooks(trainer: Trainer) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields the functions that users have hung on layers: what they have closed over may change."""
    module = trainer.lightning_module
    for path, part in module.named_modules():
        hooks = [hook for kind in _HOOKS for hook in getattr(part, kind, {}).values()]
        if those := {f"{hook.__qualname__} (a hook)": hook for hook in hooks if isinstance(hook, FunctionType)}:
            yield _name(module, path), those


def _functions(trainer: Trainer) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields the functions that put samples together: what they have closed over may change."""
    yield "DataLoader", {name.partition(".")[2]: function for name, function in readers(trainer)}


def _layers(trainer: Trainer) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields the kind and the settings of libraries' layers, such as the probability of a dropout."""
    module = trainer.lightning_module
    for path, part in module.named_modules():
        kind = type(part)
        if is_of_a_library(kind) and not isinstance(part, (Metric, LazyModuleMixin)):  # whose first batch makes it another
            yield _name(module, path), {"settings": f"{users_class(kind).__name__}({part.extra_repr()})"}


def _attached(trainer: Trainer) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields what users have hung on objects of others: the trainer, torch's optimisers, parameters."""
    module, optimizers = trainer.lightning_module, [each for each in trainer.optimizers if is_of_a_library(type(each))]
    others: list[tuple[str, object, Container[str]]] = [("Trainer", trainer, typed(trainer).own_attributes)]
    others += [(name, optimizer, _OF_OPTIMIZERS) for name, optimizer in _numbered(optimizers)]
    others += [(_name(module, path), parameter, ()) for path, parameter in module.named_parameters()]
    for name, owner, aside in others:
        yield name, {key: value for key, value in [*vars(owner).items()] if key not in aside and not key.startswith("_")}


def _globals(trainer: Trainer) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields what the files keep in which the user's classes are, and those of the user's that they import."""
    kinds_of_owners = {kind for _, owner in owners(trainer) for kind in type(owner).__mro__}
    of_owners = {kind for kind in kinds_of_owners if not is_in_a_library(kind.__module__)}
    of_functions = {function.__module__ for _, reader in readers(trainer) if (function := _function(reader))}
    files, new = set[str](), ({kind.__module__ for kind in of_owners} | of_functions) & sys.modules.keys()
    while new and len(files) < _MOST_FILES:
        files |= new
        new = {
            of for name in new for value in [*vars(sys.modules[name]).values()] if (of := _file_of(value)) and of not in files
        }
    for name in sorted(files):
        kept = vars(sys.modules[name])
        if not is_own_file(name):  # a package whose class is the user's network, or in it
            yield name, _plain(kept)
            continue
        yield name, _plain(kept, files)
        kinds = [
            value
            for value in [*kept.values()]
            if isinstance(value, type) and value.__module__ == name and value not in of_owners
        ]
        yield from ((f"{name}.{kind.__name__}", _plain(vars(kind), files)) for kind in kinds)


def _file_of(value: object) -> str:
    """Returns the module that an imported name leads to, if it is the user's own; '' otherwise."""
    if not isinstance(value, (ModuleType, FunctionType, type)):
        return ""
    name = str(value.__name__ if isinstance(value, ModuleType) else value.__module__)
    return name if name in sys.modules and is_own_file(name) else ""
