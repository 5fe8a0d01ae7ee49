"""A model is built without memory for its weights, and gets them block by block, with the bits that it would have had.

Within `deferred()` any code builds any module. Tensors that are not small come out on the meta device, and what is done to them
is noted (train/replayed.py). Random numbers are drawn as always, into a tensor that is dropped at once: what is built later
draws the same as ever. To the code that builds, these tensors look like others: they say that they are on the CPU, and a value
that Python asks for is computed.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from project.errors import UserError
from project.train.materialize import become
from project.train.replayed import HINT, Copy, Drawn, Record, each, mapped, waiting

SMALL = 16_384
"""Tensors of so many bytes are made at once: Python often asks for their values, or keeps them where nobody finds them."""

_META, _CPU = torch.device("meta"), torch.device("cpu")
_FILL = {
    *("normal_", "uniform_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_", "bernoulli_"),
    *("randn_like", "rand_like", "randint_like"),
}
"""Random numbers that don't depend on what was there before."""
_MOVED = {"running_mean", "running_var"}
"""Batch norm writes to these, and its operations don't say so; no others of torch's do that."""
_UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Only values tell what these give."""


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and tensor.layout is torch.strided


def _can_be_noted(function: Any) -> bool:
    """Whether it gives tensors whose shapes don't depend on values, and is torch's own: others may draw and not say so."""
    if function.namespace not in ("aten", "prims") or not _UNKNOWN.isdisjoint(function.tags):
        return False
    return all(str(one.type) in ("Tensor", "List[Tensor]") for one in function._schema.returns)


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    arguments = function._schema.arguments
    changed = [
        (at, one.name)
        for at, one in enumerate(arguments)
        if (one.alias_info is not None and one.alias_info.is_write) or one.name in _MOVED
    ]
    return [*each([args[at] if at < len(args) else kwargs.get(name) for at, name in changed])]


def _on_meta(value: Any) -> Any:
    """What an operation's shapes are computed with."""
    if isinstance(value, Tensor):
        if value.is_meta:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    if isinstance(value, torch.Generator):
        return None
    return _META if isinstance(value, torch.device) else value


def _refuse_meta(device: Any) -> None:
    if device is not None and torch.device(device).type == "meta":
        raise UserError(f"A tensor is made on the meta device out of another while the model is built. {HINT}")


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operation on a tensor without memory."""

    def __init__(self, record: Record, small: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record, self.small = record, small
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if self.record.replaying:
                return function(*args, **kwargs)
            tensors = [*each((args, kwargs))]
            if not all(_is_plain(one) for one in tensors):
                return self._of_another_kind(function, tensors, args, kwargs)
            if any(self.record.knows(one) for one in tensors):
                return self._on_ours(function, tensors, args, kwargs)
            return self._on_others(function, tensors, args, kwargs)

    def _of_another_kind(self, function: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        if any(type(one).__torch_dispatch__ is not Tensor.__torch_dispatch__ for one in tensors):
            return NotImplemented  # their class is asked, and comes back here with what they are made of
        return self._with_values(function, tensors, args, kwargs)

    def _on_others(self, function: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Nothing in it is without memory; what it makes may become so, if it is large."""
        usual = partial(function, *args, **kwargs)
        sent = self._is_sent_to_ours(kwargs)
        if self.small is None and not sent:
            return usual()
        small = 0 if sent or self.small is None else self.small
        given = not sent and any(one.untyped_storage().nbytes() > small for one in tensors if not one.is_meta)
        if given or not self._is_on_cpu(function, tensors, kwargs) or not _can_be_noted(function):
            return usual()
        if _written(function, args, kwargs):
            return usual()
        try:
            results = function(*mapped(args, _on_meta), **mapped(kwargs, _on_meta))
        except (NotImplementedError, RuntimeError):  # which may be the user's error
            return usual()
        if all(one.untyped_storage().nbytes() <= small for one in each(results)):
            return usual()
        self._note(function, args, kwargs, (args, kwargs), results)
        return results

    def _is_sent_to_ours(self, kwargs: Any) -> bool:
        """Torch itself sends an index to where it takes a tensor of ours to be."""
        return self.record.in_call and kwargs.get("device") == _META

    def _is_on_cpu(self, function: Any, tensors: list[Tensor], kwargs: Any) -> bool:
        if self._is_sent_to_ours(kwargs):
            return all(one.device == _CPU for one in tensors)
        name, device = function._schema.name.partition("::")[2], kwargs.get("device")
        # Tensors of the meta device, as others make them, may say how large one of ours is.
        meta_too = device is not None and (name.endswith("_like") or name.startswith("new_"))
        places = {"cpu", "meta"} if meta_too else {"cpu"}
        if device is None:
            return bool(tensors) and all(one.device.type in places for one in tensors)
        return device.type == "cpu" and all(one.device.type in places for one in tensors)

    def _on_ours(self, function: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        ours = [self.record.knows(one) for one in tensors]
        written = _written(function, args, kwargs)
        device = kwargs.get("device")
        if (
            not _can_be_noted(function)
            or (device is not None and device.type not in ("cpu", "meta"))  # torch itself says meta
            or any(not self.record.knows(one) for one in written)
        ):
            return self._with_values(function, tensors, args, kwargs)
        if any(one.device != _CPU for one, our in zip(tensors, ours, strict=True) if not our):
            raise UserError(f"{function} has tensors of several devices while the model is built. {HINT}")
        before = mapped((args, kwargs), self._noted)
        try:
            results = function(*mapped(args, _on_meta), **mapped(kwargs, _on_meta))
        except NotImplementedError:  # torch can't say what comes out
            if not written:
                return self._with_values(function, tensors, args, kwargs)
            results = written[0] if function._schema.returns else None
        self._note(function, args, kwargs, (args, kwargs), results, before)
        return results

    def _with_values(self, function: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        if any(self.record.knows(one) for one in _written(function, args, kwargs)):
            raise UserError(f"{function} is called while the model is built, and can't be deferred. {HINT}")

        def real(value: Any) -> Any:
            return self.record.value(value) if self.record.knows(value) else value

        return function(*mapped(args, real), **mapped(kwargs, real))

    def _noted(self, value: Any) -> Any:
        """An argument as it is kept: as it is now."""
        if self.record.knows(value):
            return self.record.piece(value)
        if isinstance(value, torch.device):
            return _CPU
        return Copy(value.detach().clone()) if isinstance(value, Tensor) else value

    def _note(self, function: Any, args: Any, kwargs: Any, given: Any, results: Any, before: Any = None) -> None:
        known = {id(one.untyped_storage()) for one in each(given) if self.record.knows(one)}
        written = _written(function, args, kwargs)
        new = any(id(one.untyped_storage()) not in self.record.storages for one in each(results))
        if not new and (not written or torch.Tag.inplace_view in function.tags):
            return  # a view
        noted = before or mapped((args, kwargs), self._noted)
        drawn = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            drawn = self._draw(function, args, kwargs, written)
            noted = mapped(noted, lambda value: drawn if isinstance(value, torch.Generator) else value)
        self.record.add(function, noted, known, {id(one.untyped_storage()) for one in written}, results, drawn)

    def _draw(self, function: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Drawn:
        """Draws as many random numbers as ever, from where they are always drawn."""
        generators = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)]
        drawn = Drawn((generators or [torch.default_generator])[0].get_state(), own=bool(generators))
        filled = function._schema.name.partition("::")[2] in _FILL

        def real(value: Any) -> Any:
            if not self.record.knows(value):
                return value
            if filled and (value is args[0]):
                return self._to_draw_into(value)
            value_now = self.record.value(value)
            return value_now.clone() if any(value is one for one in written) else value_now

        function(*mapped(args, real), **mapped(kwargs, real))
        return drawn

    def _to_draw_into(self, like: Tensor) -> Tensor:
        """The same memory each time: what is freed between small things that stay has holes that the next one does not fit."""
        last = sum((length - 1) * stride for length, stride in zip(like.shape, like.stride(), strict=True))
        size = (last + 1) * like.element_size()
        if size > len(self._scratch):
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size].view(like.dtype).as_strided(like.shape, like.stride())


class AsUsual(TorchFunctionMode):
    """What tensors without memory say of themselves."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record
        value: Any = record.value
        of: Any = Tensor
        self._set_data = of.data.__set__
        self._answers: dict[Any, Any] = {
            of.device.__get__: lambda tensor, *_: _CPU,
            of.is_meta.__get__: lambda tensor, *_: False,
            of.is_cpu.__get__: lambda tensor, *_: True,
            Tensor.get_device: lambda tensor: -1,
            Tensor.cpu: lambda tensor, memory_format=torch.preserve_format: tensor.to(memory_format=memory_format),
            Tensor.to: self._to,
            Tensor.data_ptr: self._address,
            Tensor.tolist: lambda tensor: value(tensor.detach()).tolist(),
            Tensor.numpy: lambda tensor, **how: self._read_only(tensor.numpy, tensor, **how),
            Tensor.__array__: lambda tensor, *how: self._read_only(Tensor.__array__, tensor, *how),
            Tensor.__format__: lambda tensor, how: value(tensor.detach()).__format__(how),
            Tensor.__reduce_ex__: lambda tensor, protocol: self._copy(tensor).__reduce_ex__(protocol),
            Tensor.type: self._type,
        }

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.record.replaying:
            return function(*args, **kwargs)
        if function == self._set_data and self.record.knows(args[0]) != self.record.knows(args[1]):
            return become(args[0], args[1].detach())  # which torch refuses, as it sees two devices
        if not args or not self.record.knows(args[0]):
            return function(*args, **kwargs)
        if "device" in kwargs and function is not Tensor.to:
            _refuse_meta(kwargs["device"])
        before, self.record.in_call = self.record.in_call, True
        try:
            return self._answers.get(function, function)(*args, **kwargs)
        finally:
            self.record.in_call = before

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        def here(value: Any) -> Any:
            if isinstance(value, (str, torch.device)):
                device = torch.device(value)
                _refuse_meta(device)
                return _META if device.type == "cpu" else device
            if isinstance(value, Tensor) and value.device == _CPU:
                return torch.empty(0, dtype=value.dtype, device=_META)
            return value

        return tensor.to(*map(here, args), **{name: here(value) for name, value in kwargs.items()})

    def _address(self, tensor: Tensor) -> int:
        numbers = {storage: at for at, storage in enumerate(self.record.storages)}
        return (1 + numbers[id(tensor.untyped_storage())]) * 2**44 + int(tensor.storage_offset()) * tensor.element_size()

    def _read_only(self, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What is written to an array would be lost here, and so it can't be."""
        if tensor.requires_grad and not kwargs.get("force"):
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        array = self._copy(tensor.detach()).numpy()
        array.flags.writeable = False
        return array.astype(*args) if args else array

    def _copy(self, tensor: Tensor) -> Any:
        with torch.no_grad():
            real = self.record.value(tensor)
            return real.clone().requires_grad_(tensor.requires_grad)

    def _type(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor.type(*args, **kwargs) if args or kwargs else torch.empty(0, dtype=tensor.dtype).type()


@contextmanager
def deferred(small: int = SMALL, record: Record | None = None) -> Iterator[Record]:
    """What is built here has no memory for its weights, until `materialize` gives it some.

    Args:
        small: tensors of at most so many bytes are as always.
        record: of what was built before, which this goes on with.
    """
    record = record or Record()
    with Operations(record, small), AsUsual(record):
        yield record
    record.forget_last()
    if record not in waiting:
        waiting.append(record)


def builder() -> Callable[..., Any]:
    """What makes the modules of a configuration, one within another: a class, and what its constructor is given."""
    record = Record()

    def made(class_type: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with deferred(record=record):
            return class_type(*args, **kwargs)

    return made


@contextmanager
def resumed() -> Iterator[None]:
    """What is done here to a model that waits for its weights (a deep copy of it is made, say) will have been done when it gets
    them. What is made here of anything else is as always."""
    with ExitStack() as stack:
        for record in waiting:
            stack.enter_context(Operations(record, None))
            stack.enter_context(AsUsual(record))
        yield
    for record in waiting:
        record.forget_last()
