"""Gradients that are the same to the last bit on any number of ranks: each micro-batch's is a term of an exact sum.

DistributedDataParallel adds up in the order of a ring, and a rank's own micro-batches in their order; on another number of
ranks these are other orders. Here each micro-batch's gradient is rounded to a grid, by itself, and the rest is exact
(exact/sums.py). The grid of a parameter follows the largest value that its gradients had in the step before, over all
micro-batches; so it is a function of the run, too, and a checkpoint takes it along.

The sums travel to the other ranks while the backward pass of the step's last micro-batch continues, a bucket at a time.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from project.errors import UserError
from project.exact.sums import ExactSum, sum_from_coarsest
from project.sharded.shards import view_of
from project.step.ddp import refuse_lazy

_AT_FIRST = 2.0**-10  # before a step has shown how large a parameter's gradients are; larger ones take a second sum
_MARGIN = 4.0  # so much larger than in the step before is no surprise
_BUCKET, _BUCKETS = 250_000, 16  # numbers that are sent together, about; and into how many parts all are cut, at most
_FEW = 2**12  # numbers: parameters with fewer are dealt with together
_ADD_ON_HOST = {"cpu"}  # a rank adds up what others send it: less work for processors. Devices' links add up by themselves

Named = tuple[str, nn.Parameter]


class _Unit:
    """A parameter with many numbers, or neighbours with few. Its gradients are parts of its bucket's."""

    def __init__(self, named: list[Named], place: slice, means: Tensor, terms: int) -> None:
        self.names, self.parameters = zip(*named, strict=True)
        self.place = place  # in its bucket
        self.largest = [_AT_FIRST] * len(named)
        """By parameter, powers of two: what the grid of this step was made for."""
        sizes = [parameter.numel() for parameter in self.parameters]
        # Side by side, even where a parameter's numbers are not: `empty_like` knows.
        self._places = [
            (parameter.shape, torch.empty_like(parameter).stride(), end - parameter.numel())
            for parameter, end in zip(self.parameters, accumulate(sizes), strict=True)
        ]
        self._gradients = self._parts(means[place])
        self.waits = False  # for the gradients of a backward pass
        self.sum = ExactSum(sizes, self.largest, terms, means.device)
        self.restart()

    def _parts(self, vector: Tensor) -> list[Tensor]:
        """Returns views of what belongs to each parameter, in its shape."""
        begin = vector.storage_offset()
        return [vector.as_strided(shape, stride, begin + at) for shape, stride, at in self._places]

    def restart(self) -> None:
        """Begins another step."""
        self.sum.restart(self.largest)
        self.seen = [-1.0] * len(self.names)
        """By parameter, the largest value of this step's gradients on this rank; none so far."""

    def begin(self) -> None:
        self.waits = True
        for parameter in self.parameters:
            parameter.grad = None

    def add_gradients(self) -> None:
        """Adds the gradients of this backward pass to the sum, as far as there are any."""
        if not self.waits:
            raise UserError(
                f"The gradient of {self.names[0]} came twice in one backward pass, as reentrant checkpointing makes it, "
                "and trainer.exact can't tell when it is whole. HINT: torch.utils.checkpoint(..., use_reentrant=False)."
            )
        self.waits = False
        taken = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if all(gradient is None for gradient in taken):
            return
        for name, gradient in zip(self.names, taken, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise UserError(
                    f"trainer.exact can't be kept: the gradient of {name} is sparse. HINT: nn.Embedding(..., sparse=False)."
                )
        vector = self._flat_gradients(taken)
        largest = self.sum.largest_of(vector)
        for index, gradient in enumerate(taken):
            if gradient is None:
                continue
            if math.isfinite(largest[index]):
                self.seen[index] = max(self.seen[index], largest[index])
            else:
                # `means` makes it infinite; what the sum makes of it does not matter.
                self.seen[index], largest[index] = math.inf, 0.0
        self.sum.add(vector, largest)

    def _flat_gradients(self, taken: list[Tensor | None]) -> Tensor:
        """Returns the gradients side by side; zeros where a parameter has none."""
        first = taken[0]
        if len(taken) == 1 and first is not None and first.stride() == self._gradients[0].stride():
            return first.as_strided((first.numel(),), (1,))
        vector = self._gradients[0].new_zeros(self.place.stop - self.place.start)
        for part, gradient in zip(self._parts(vector), taken, strict=True):
            if gradient is not None:
                part.copy_(gradient)
        return vector

    def means(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each parameter's mean gradient by its name; sets the grids of the next step."""
        for index, (name, gradient, seen) in enumerate(zip(self.names, self._gradients, self.seen, strict=True)):
            if seen < 0:
                continue  # no micro-batch of any rank has come to it
            if not math.isfinite(seen):
                gradient.fill_(math.inf)
            elif seen and not seen * 2 <= self.largest[index] <= seen * _MARGIN**3:  # it changes seldom: a new grid takes time
                self.largest[index] = math.ldexp(1.0, math.frexp(seen * _MARGIN)[1])
            yield name, gradient
        self.restart()


class _Bucket:
    """Units whose gradients lie side by side and are sent together: each rank adds up its share of them, of all ranks' terms,
    and sends the mean to the others. So what travels is terms, and means that are rounded already."""

    def __init__(self, units: list[list[Named]], micro_batches: int, world_size: int) -> None:
        sizes = [sum(parameter.numel() for _, parameter in unit) for unit in units]
        _, first = units[0][0]
        self._slice_size = -(-sum(sizes) // world_size)
        self._means = torch.zeros(self._slice_size * world_size, dtype=first.dtype, device=first.device)
        self.units = [
            _Unit(unit, slice(end - size, end), self._means, micro_batches)
            for unit, size, end in zip(units, sizes, accumulate(sizes), strict=True)
        ]
        self._scale, self._world_size = 1 / micro_batches, world_size
        self._work: dist.Work | None = None
        if world_size == 1:
            return
        self._adds_on_host = first.device.type in _ADD_ON_HOST
        # The only term of a rank travels as it is: a sum needs more digits.
        as_it_is = self._adds_on_host and micro_batches == world_size
        self._sent = torch.zeros_like(self._means, dtype=first.dtype if as_it_is else torch.float64)
        self._received = torch.empty_like(self._sent if self._adds_on_host else self._sent[: self._slice_size])
        self._own_means = torch.empty_like(self._means[: self._slice_size])

    def send(self) -> None:
        """Sends this rank's terms."""
        if self._world_size == 1:
            return
        for unit in self.units:
            here, terms = self._sent[unit.place], unit.sum.terms
            if len(terms) == 1 and terms[0].dtype == here.dtype:
                here.copy_(terms[0])
            else:
                unit.sum.fold(terms, here)
        swap = dist.all_to_all_single if self._adds_on_host else dist.reduce_scatter_tensor
        self._work = swap(self._received, self._sent, async_op=True)

    def reduce_and_send(self, coarser: Mapping[_Unit, Tensor]) -> None:
        """Adds up what came of this rank's slice, and sends the means. `coarser`: what stands above units' finest sums."""
        if self._world_size == 1:
            for unit in self.units:
                unit.sum.fold(unit.sum.terms, self._means[unit.place], 0, self._scale, coarser.get(unit))
            return
        self.wait()
        shares = self._received.view(-1, self._slice_size)
        begin = dist.get_rank() * self._slice_size
        for unit in self.units:
            first, last = max(begin, unit.place.start), min(begin + self._slice_size, unit.place.stop)
            if first < last:
                start, here = first - unit.place.start, slice(first - begin, last - begin)
                above = coarser[unit][start : start + last - first] if unit in coarser else None
                unit.sum.fold([*shares[:, here]], self._own_means[here], start, self._scale, above)
        self._work = dist.all_gather_into_tensor(self._means, self._own_means, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class ExactGradients:
    """The exact gradients of the parameters that learn. Call `begin` before each backward pass, `end` after it; after the last
    one of a step, all ranks call `finish`.

    Args:
        module: whose parameters they are.
        micro_batches: of a step, over all ranks, as many for each; the gradient is the mean over them.
        world_size: ranks.
        gathered: what the module computes with by the names of its parameters, where those are spread over the ranks.
        layouts: of gradients that lie in another order than the usual one where nothing is spread, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        micro_batches: int,
        world_size: int,
        gathered: Mapping[str, nn.Parameter] | None = None,
        layouts: Mapping[str, torch.memory_format] | None = None,
    ) -> None:
        refuse_lazy(module)
        self._layouts = layouts or {}
        self._world_size = world_size
        self._owners = dict(module.named_parameters())
        self._learned_at_start = [parameter.requires_grad for parameter in self._owners.values()]
        self.scaled = False
        """Whether a GradScaler has scaled the loss."""
        self.whole: dict[int, Tensor] = {}
        """The whole gradients of this step of parameters that are spread, by `id`."""
        named = [(name, parameter) for name, parameter in (gathered or self._owners).items() if parameter.requires_grad]
        for name, parameter in named:
            if parameter.is_complex():
                raise UserError(
                    f"trainer.exact can't be kept: {name} is complex. HINT: torch.view_as_real of a real parameter."
                )
        self._buckets = [_Bucket(units, micro_batches, world_size) for units in _split_into_buckets(named)]
        self._units = [unit for bucket in self._buckets for unit in bucket.units]
        self._device = named[0][1].device if named else None  # NCCL can't add up what lies on the host
        self._last, self._sent = False, 0
        # What is small is fetched when all is over.
        self._hooks = [
            unit.parameters[0].register_post_accumulate_grad_hook(lambda _, unit=unit: self._add_and_send(unit))
            for unit in self._units
            if len(unit.parameters) == 1
        ]

    @property
    def outdated(self) -> bool:
        """Returns whether other parameters learn than when this was made."""
        return [parameter.requires_grad for parameter in self._owners.values()] != self._learned_at_start

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, float]:
        return {name: largest for unit in self._units for name, largest in zip(unit.names, unit.largest, strict=True)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        for unit in self._units:
            unit.largest = [state.get(name, now) for name, now in zip(unit.names, unit.largest, strict=True)]
            unit.restart()

    def begin(self, last: bool) -> None:
        """Begins a backward pass; `last`: of this rank in this step."""
        self._last, self._sent = last, 0
        for unit in self._units:
            unit.begin()

    def _add_and_send(self, unit: _Unit) -> None:
        """Adds the gradients of a unit, and sends the buckets that are complete."""
        unit.add_gradients()
        # In the same order on all ranks, whatever the order in which their gradients come.
        while (
            self._last
            and self._sent < len(self._buckets)
            and not any(member.waits for member in self._buckets[self._sent].units)
        ):
            self._send_next()

    def end(self) -> None:
        """Ends a backward pass: what has not come will not."""
        for unit in self._units:
            if unit.waits:
                unit.add_gradients()

    def _send_next(self) -> None:
        """Sends a bucket's terms; and the means of the one before it, whose terms should have come meanwhile."""
        self._buckets[self._sent].send()
        if self._sent:
            self._buckets[self._sent - 1].reduce_and_send({})
        self._sent += 1

    def unscale_whole(self, scale: Callable[[Tensor], Tensor]) -> None:
        """Makes whole gradients those of the loss again, as their shards are; `scale` multiplies as it did the loss."""
        for gradient in self.whole.values():
            gradient.div_(scale(gradient.new_ones((), dtype=torch.float32)))

    def finish(self) -> None:
        """Leaves the mean over all micro-batches of all ranks as the gradient of each parameter."""
        while self._sent < len(self._buckets):
            self._send_next()
        # All ranks need the largest values that any of them has seen, and how many sums each unit has on any of them.
        seen = [value for unit in self._units for value in (*unit.seen, unit.sum.count)]
        agreed = torch.tensor(seen, dtype=torch.float64, device=self._device)
        work = dist.all_reduce(agreed, dist.ReduceOp.MAX, async_op=True) if self._world_size > 1 else None
        for bucket in self._buckets[-1:]:
            bucket.reduce_and_send({})
        if work is not None:
            work.wait()
        of_all, coarser = iter(agreed.tolist()), {}
        for unit in self._units:
            unit.seen = [next(of_all) for _ in unit.seen]
            if (count := int(next(of_all))) > 1:  # some term was too large for the finest grid
                coarser[unit] = self._coarser_sum(unit, count)
        for bucket in self._buckets:
            bucket.wait()
            if not coarser.keys().isdisjoint(bucket.units):
                bucket.reduce_and_send(coarser)
                bucket.wait()
            for unit in bucket.units:
                for name, gradient in unit.means():
                    self._set_gradient(name, gradient)

    def _set_gradient(self, name: str, gradient: Tensor) -> None:
        """Sets the gradient of a parameter; of a sharded one, this rank's shard, and keeps the whole."""
        owner = self._owners[name]
        if isinstance(owner, DTensor):
            # A norm is added up in the order in which the numbers lie.
            self.whole[id(owner)] = gradient.contiguous(memory_format=self._layouts.get(name, torch.contiguous_format))
            gradient = view_of(gradient, owner)
            if self.scaled:  # each is unscaled once
                gradient = gradient.clone()
        owner.grad = gradient

    def _coarser_sum(self, unit: _Unit, count: int) -> Tensor:
        """Returns what all ranks have above the finest grid of a unit."""
        sums = unit.sum.coarser(count)
        if self._world_size > 1:
            for level in sums:
                dist.all_reduce(level)
        return sum_from_coarsest(sums[::-1])


def _split_into_buckets(named: list[Named]) -> Iterator[list[list[Named]]]:
    """Yields the units of each bucket, of one dtype and device, about as gradients come; small parameters come last, as one."""
    many = [(name, parameter) for name, parameter in named[::-1] if parameter.numel() > _FEW]
    ends = list(accumulate(parameter.numel() for _, parameter in many))
    size = max(_BUCKET, ends[-1] // _BUCKETS) if ends else _BUCKET
    numbers = {name: (end - 1) // size for (name, _), end in zip(many, ends, strict=True)}
    for _, neighbours in groupby(many, lambda pair: (numbers[pair[0]], *_kind(pair))):
        yield [[pair] for pair in neighbours]
    few: dict[tuple[torch.dtype, torch.device], list[Named]] = {}
    for pair in named[::-1]:
        if pair[1].numel() <= _FEW:
            few.setdefault(_kind(pair), []).append(pair)
    yield from ([unit] for unit in few.values())


def _kind(pair: Named) -> tuple[torch.dtype, torch.device]:
    return pair[1].dtype, pair[1].device
