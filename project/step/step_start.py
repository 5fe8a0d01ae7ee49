"""Keeps what a step's micro-batches change before its optimiser does, as it was when the step began.

A checkpoint that is saved within a step is one of the step's beginning: a run that resumes takes the whole step again. Weights
and optimisers are what they were; buffers, what was logged, and metrics are not. What `self.log` adds up is never changed in
place, so that a note costs nothing; of buffers only those are copied that have moved in a step before.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from project.step.batch_norm_layers import batch_norms
from project.step.position import all_trained, beyond_last_step, counts
from project.step.results import Results
from project.step.state import step_state
from project.step.structure import Holder, tensor_holders
from project.typed import typed

_Versioned: TypeAlias = tuple[Tensor | None, int]
"""A tensor, and how often it has been changed in place."""
_LARGEST = 2**24  # bytes: a larger buffer is not copied


class StepStart:
    """Notes the beginning of each step, and gives it to a checkpoint that is saved within the step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.clear()

    def clear(self) -> None:
        """Forgets the fit before."""
        self._at = -1
        self._weights: list[Tensor] = []
        self._versions: list[int] = []
        self._names: list[str] = []
        self._holders: list[Holder] = []
        self._buffers: list[_Versioned] = []
        self._moving: set[int] | None = None
        """The buffers, by their place among all, that steps have moved; None before the second step."""
        self._copies: dict[int, Tensor] = {}
        self.grids: dict[str, float] = {}
        """The grids of the exact sums."""

    def begin_epoch(self) -> None:
        """Finds the tensors again: hooks may have changed the network."""
        module = self._trainer.lightning_module
        # Batch norm's move after the optimiser's step.
        norms = {f"{name}.{buffer}" for name, norm in batch_norms(module) for buffer, _ in norm.named_buffers(recurse=False)}
        names = [name for name, buffer in module.named_buffers() if name not in norms and _is_plain(buffer)]
        if names != self._names:
            self._moving, self._buffers = None, []
        self._at, self._names, self._holders = -1, names, tensor_holders(module, names)
        self._weights = [weight for weight in module.parameters() if _is_plain(weight)]

    def note(self, results: Results) -> None:
        """Notes that a step begins."""
        self._at = self._trained
        results.note_step()
        typed(self._trainer).logged.note_step()
        self.grids = typed(self._trainer).gradients.state_dict()
        self._versions = [weight._version for weight in self._weights]
        before, self._buffers = self._buffers, self._versioned_buffers()
        if before:
            pairs = zip(self._buffers, before, strict=True)
            self._moving = (self._moving or set()) | {number for number, pair in enumerate(pairs) if _has_moved(*pair)}
        self._copies = {
            number: buffer.detach().clone()
            for number, (buffer, _) in enumerate(self._buffers)
            if (self._moving is None or number in self._moving) and buffer is not None and buffer.nbytes <= _LARGEST
        }

    @property
    def _trained(self) -> int:
        """Returns how many micro-batches this rank has trained on since the run began."""
        return counts(self._trainer.fit_loop.epoch_loop.batch_progress.total).processed

    @property
    def applies(self) -> bool:
        """Returns whether the step that was noted is not taken yet: a checkpoint of now is one of its beginning."""
        return self._at == self._trained - beyond_last_step(self._trainer) and not all_trained(self._trainer)

    @property
    def has_values(self) -> bool:
        """Returns whether what was logged up to now is what it was when the step began: it is not taken yet, or skipped."""
        state, batches = step_state(self._trainer), counts(self._trainer.fit_loop.epoch_loop.batch_progress.current)
        is_at_its_end = batches.processed > batches.completed and not beyond_last_step(self._trainer)
        return self.applies or (is_at_its_end and state.may_be_skipped and bool(state.skipped))

    def _versioned_buffers(self) -> list[_Versioned]:
        return [(buffer, _version(buffer)) for buffer in (holder.get(name) for holder, name in self._holders)]

    @contextmanager
    def buffers(self) -> Iterator[None]:
        """Gives the module, within this context, the buffers that it had when the step began."""
        copies = self._copies if self.applies else {}
        places = [self._holders[number] for number in copies]
        own = [holder.get(name) for holder, name in places]
        _put(places, copies.values())
        try:
            yield
        finally:
            _put(places, own)

    def moved(self) -> list[str]:
        """Returns the names of weights and buffers that the step has moved, and of which there is no copy."""
        if not self.applies:
            return []
        versions = zip(self._weights, self._versions, strict=True)
        moved = {id(weight) for weight, before in versions if weight._version != before}
        buffers = zip(self._versioned_buffers(), self._buffers, strict=True)
        others = {number for number, pair in enumerate(buffers) if number not in self._copies and _has_moved(*pair)}
        weights = self._trainer.lightning_module.named_parameters()
        return [name for name, weight in weights if id(weight) in moved] + [self._names[number] for number in sorted(others)]


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor counts its changes: not a shard, one without a shape yet, or one of torch.inference_mode."""
    return not (isinstance(tensor, DTensor) or is_lazy(tensor) or tensor.is_inference())


def _version(tensor: Tensor | None) -> int:
    """Returns a number that grows with each change in place."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _has_moved(now: _Versioned, before: _Versioned) -> bool:
    return now[0] is not before[0] or now[1] != before[1]


def _put(places: Iterable[Holder], tensors: Iterable[Tensor | None]) -> None:
    for (holder, name), tensor in zip(places, tensors, strict=True):
        holder[name] = tensor
