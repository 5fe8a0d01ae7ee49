"""What was done to tensors that have no memory yet, so that it can be done again, bit by bit, when they get some.

A tensor is a piece of a storage. Each operation notes which pieces it reads and writes; a view is no operation, as it is only
another piece of the same storage. The values of a storage are found by doing again, in their order, the operations that wrote
to it, and those that wrote what these have read. Random numbers are drawn from the state that the generator had.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from project.errors import UserError

HINT = "HINT: trainer.strategy.init_args.deferred=false has every rank build the whole network, as usual."


def each(value: Any) -> Iterator[Tensor]:
    """The tensors among an operation's arguments, or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from each(one)
    elif isinstance(value, dict):
        yield from each([*value.values()])


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same arguments, with something else in the place of some."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)([mapped(one, change) for one in value])
    if isinstance(value, dict):
        return {name: mapped(one, change) for name, one in value.items()}
    return change(value)


@dataclass(frozen=True)
class Piece:
    """Where a tensor lies: which bytes of which storage, in which order."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def lies_as(self, tensor: Tensor) -> bool:
        same = (self.dtype, self.size, self.offset) == (tensor.dtype, tuple(tensor.shape), tensor.storage_offset())
        steps = zip(self.size, self.stride, tensor.stride(), strict=True) if same else ()
        return same and (0 in self.size or all(ours == theirs for size, ours, theirs in steps if size > 1))

    def bytes(self) -> tuple[int, int]:
        """The first, and the one after the last."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (self.offset + extent) * self.dtype.itemsize


@dataclass(frozen=True)
class Copy:
    """A tensor that has values: as they were."""

    tensor: Tensor


@dataclass(frozen=True)
class Drawn:
    """A generator, as it was before the draw; None is torch's own."""

    state: Tensor
    own: bool


@dataclass(frozen=True)
class Operation:
    number: int
    function: Any
    args: Any
    kwargs: Any
    reads: frozenset[int]
    """Storages, those that it writes to among them."""
    made: tuple[Piece | None, ...]
    """For each tensor of its results: where a new one lies."""
    drawn: Drawn | None
    default: torch.dtype

    def storages(self) -> frozenset[int]:
        return self.reads | {piece.storage for piece in self.made if piece}


class Record:
    """Storages without memory, and what was done to them."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        """By id, which stays theirs as long as they are kept here."""
        self.writes: dict[int, list[Operation]] = defaultdict(list)
        self.given: dict[int, list[tuple[int, int, str, bool]]] = defaultdict(list)
        """Pieces of each storage that have got their values: which bytes, whose, and whether that is a parameter."""
        self.kept: dict[tuple[int, torch.device], torch.UntypedStorage] = {}
        """The memory of what is no parameter, so that what shares it goes on sharing it."""
        self.replaying = False
        self.in_call = False
        """Is one of these tensors being asked for something."""
        self._count, self._threads = 0, torch.get_num_threads()
        self._last: tuple[Piece, int, Tensor] | None = None

    def knows(self, tensor: Any) -> bool:
        return (
            isinstance(tensor, Tensor)
            and tensor.is_meta
            and tensor.layout is torch.strided
            and id(tensor.untyped_storage()) in self.storages
        )

    def piece(self, tensor: Tensor) -> Piece:
        if tensor.is_conj() or tensor.is_neg():
            raise UserError(f"A conjugated or negated view is used while the model is built, which can't be deferred. {HINT}")
        storage = id(tensor.untyped_storage())
        return Piece(storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def add(
        self, function: Any, noted: tuple[Any, Any], reads: set[int], writes: set[int], results: Any, drawn: Drawn | None
    ) -> None:
        """Notes an operation, whose results lie on the meta device."""
        made: list[Piece | None] = []
        for result in each(results):
            storage = result.untyped_storage()
            new = id(storage) not in self.storages
            if new:
                self.storages[id(storage)] = storage
            made.append(self.piece(result) if new else None)
        written = writes | {piece.storage for piece in made if piece}
        if written:
            self._count += 1
            default = torch.get_default_dtype()
            args, kwargs = noted
            operation = Operation(self._count, function, args, kwargs, frozenset(reads), tuple(made), drawn, default)
            for storage_id in written:
                self.writes[storage_id].append(operation)

    def value(self, tensor: Tensor) -> Tensor:
        """What it would be now. It is not to be written to."""
        piece = self.piece(tensor)
        writes = self.writes[piece.storage]
        at = writes[-1].number if writes else 0
        if self._last is None or self._last[:2] != (piece, at):
            self._last = None  # before there is another one
            self._last = piece, at, piece.of(self.replay([piece.storage])[piece.storage])
        return self._last[2]

    def forget_last(self) -> None:
        self._last = None

    def replay(self, wanted: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """These storages, with their values, on the CPU."""
        wanted = set(wanted)
        operations = self._needed(wanted)
        last = {storage: operation.number for operation in operations for storage in operation.storages()}
        found: dict[int, torch.UntypedStorage] = {}
        with self._as_it_was():
            for operation in operations:
                _again(operation, found)
                for storage in operation.storages() - wanted:
                    if last[storage] == operation.number:
                        del found[storage]
        return found

    def _needed(self, wanted: set[int]) -> list[Operation]:
        """In their order: what wrote to these, and to what that has read, up to the moment when it was read."""
        needed: dict[int, Operation] = {}
        looked_at: dict[int, int] = {}
        todo = [(storage, self._count + 1) for storage in wanted]
        while todo:
            storage, before = todo.pop()
            for operation in self.writes[storage]:
                if looked_at.get(storage, 0) <= operation.number < before and operation.number not in needed:
                    needed[operation.number] = operation
                    todo += [(read, operation.number) for read in operation.reads]
            looked_at[storage] = max(before, looked_at.get(storage, 0))
        return [needed[number] for number in sorted(needed)]

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """What operations depend on beside their arguments; afterwards everything is as it is now."""
        default, threads, state = torch.get_default_dtype(), torch.get_num_threads(), torch.default_generator.get_state()
        before, self.replaying = self.replaying, True
        if threads != self._threads:  # sums may be made in another order
            torch.set_num_threads(self._threads)
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                yield
        finally:
            self.replaying = before
            torch.default_generator.set_state(state)
            torch.set_default_dtype(default)
            if threads != self._threads:
                torch.set_num_threads(threads)


waiting: list[Record] = []
"""Of models that wait for their weights."""


def _again(operation: Operation, found: dict[int, torch.UntypedStorage]) -> None:
    generator = None
    if operation.drawn and operation.drawn.own:
        generator = torch.Generator()
    if operation.drawn:
        (generator or torch.default_generator).set_state(operation.drawn.state)

    def real(noted: Any) -> Any:
        if isinstance(noted, Piece):
            return noted.of(found[noted.storage])
        if isinstance(noted, Copy):
            return noted.tensor.clone()  # it is kept, and what is made of it may be a view of it
        return generator if isinstance(noted, Drawn) else noted

    torch.set_default_dtype(operation.default)
    args, kwargs = mapped(operation.args, real), mapped(operation.kwargs, real)
    results = [*each(operation.function(*args, **kwargs))]
    for piece, result in zip(operation.made, results, strict=True):
        if piece is None:
            continue
        if not piece.lies_as(result):
            raise UserError(
                f"{operation.function} gives a tensor that lies in memory as {tuple(result.shape)} with strides "
                f"{result.stride()}, where {piece.size} and {piece.stride} were foreseen: it can't be deferred. {HINT}"
            )
        found[piece.storage] = result.untyped_storage()
