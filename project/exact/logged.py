"""Makes what `self.log` logs the same to the last bit on any number of ranks.

A value of a micro-batch is a term of a sum that is rounded once (exact/sums.py). Where a step or an epoch ends, all ranks meet
and have the same result, whatever `sync_dist` is. A value that is logged elsewhere, at the end of an epoch, say, has to be
the same on all ranks; where it is not, it depends on their number, and is refused.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from operator import mul
from sys import intern
from typing import TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from project.errors import UserError
from project.exact.sums import ExactScalar, canonical_parts, exact_mean, exact_total, to_host
from project.step.data_ranks import DataRanks
from project.step.ddp import all_gather_numbers, all_gather_objects
from project.step.results import OF_MICRO_BATCH, Results, Sums, Value

_T = TypeVar("_T")
_Terms = list[tuple[float, float]]
"""Values, and what each counts for."""


class ExactResults(Results):
    """Results whose sums do not depend on who added them up."""

    def __init__(self, trainer: Trainer, training: bool) -> None:
        super().__init__(trainer, training)
        self._tells = False
        # The ranks meet at the end of a step or of an epoch, whatever was asked for; Lightning adds up what all of them have.
        self._how = {"sync_dist": True, "sync_dist_fn": None}
        self._world_size: int = trainer.world_size
        self._trainer = trainer
        self._sums: dict[str, ExactScalar] = {}
        self._sums_before: dict[str, ExactScalar] = {}  # this step
        self._reduced: set[str] = set()  # of this epoch
        self._terms: dict[str, list[tuple[Tensor, float]]] = {}  # of this step, and not yet brought together
        self.logs_at_the_end = True
        """Whether somebody may log in `on_train_batch_end`: the same on all ranks."""
        self._expected: dict[bool, tuple[tuple[str, int], ...] | None] = {}

    def begin_micro_batch(self, weight: float, begins_step: bool, ends_step: bool) -> None:
        super().begin_micro_batch(weight, begins_step, ends_step)
        if begins_step:
            self._terms.clear()
            # Lightning would log a value again in steps that have not logged it, but not after a restart.
            for metric in self.values():
                metric._forward_cache = None

    def note_step(self) -> None:
        super().note_step()
        self._sums_before = {key: total.copy() for key, total in self._sums.items()}

    @contextmanager
    def before_step(self) -> Iterator[None]:
        now, self._sums = self._sums, self._sums_before
        try:
            with super().before_step():
                yield
        finally:
            self._sums = now

    def _discard_value_of_step(self, key: str, before: Value | None, skipped: bool | Tensor) -> None:
        if skipped is True and key in self._sums:
            self._sums[key] = self._sums_before.get(key) or ExactScalar()
        super()._discard_value_of_step(key, before, skipped)

    def _whole_value(self, name: str, value: object) -> object:
        if isinstance(value, DTensor):
            raise UserError(
                f"trainer.exact can't be kept: {name!r}, which is logged, follows from parameters or gradients that are spread "
                "over the ranks, and its last bits from how many these are. HINT: don't log it (the gradient's norm is logged "
                "anyway), or trainer.strategy=ddp."
            )
        return value

    def update_metrics(self, key: str, value: Metric | Tensor, batch_size: int) -> None:
        metric: _ResultMetric = self[key]
        meta, hook = metric.meta, _hook_name(metric.meta.fx)
        is_term = hook in OF_MICRO_BATCH
        if is_term and meta.sync.rank_zero_only:
            raise UserError(
                f"self.log({meta.name!r}, rank_zero_only=True) in {hook} logs the micro-batches of rank 0, "
                "which are others on another number of ranks: trainer.exact can't be kept. HINT: leave it out; all ranks' mean "
                "is logged."
            )
        if is_term and meta.on_step and meta.logger and not self.training:
            raise UserError(
                f"self.log({meta.name!r}, on_step=True) in {hook} logs each micro-batch of rank 0, which are "
                "others on another number of ranks: trainer.exact can't be kept. HINT: on_step=False logs the mean over all."
            )
        if isinstance(value, Tensor) and metric.is_tensor and is_term and _is_sum_of_epoch(metric):
            if metric.has_reset or key not in self._sums:
                self._sums[key] = ExactScalar()
            self._sums[key].add(value.double() * batch_size if meta.is_mean_reduction else value)
        # What is logged once a step counts once: the last micro-batch of a rank may have other samples.
        _ResultCollection.update_metrics(self, key, value, batch_size if is_term else 1)
        if self.training and is_term and meta.on_step:
            of_batch = value if metric.is_tensor else metric._forward_cache
            if isinstance(of_batch, Tensor) and of_batch.numel() == 1:
                self._terms.setdefault(key, []).append((of_batch.detach().double().reshape(()), self.weight))

    def reduce_step(self, hook_is_over: bool) -> None:
        """Reduces what a step has logged to one value. All ranks call it at its end, before `on_train_batch_end` and after."""
        if not self.ends_step or (hook_is_over and not self.logs_at_the_end):
            return
        keys = [key for key in self._terms if (_hook_name(self[key].meta.fx) == "on_train_batch_end") == hook_is_over]
        logged = {key: self._terms.pop(key) for key in keys}
        values = iter(to_host([term for terms in logged.values() for term, _ in terms]) if logged else ())
        own = {key: [(next(values), weight) for _, weight in terms] for key, terms in logged.items()}
        by_rank = self._gather_terms(hook_is_over, own)
        for key in dict.fromkeys(key for of_rank in by_rank for key in of_rank if key in self):
            metric = self[key]
            terms = [term for of_rank in by_rank for term in of_rank.get(key, ())]
            made = torch.tensor(_reduce_terms(terms, metric), dtype=torch.float64)
            metric._forward_cache = made
            if not metric.meta.on_epoch and metric.is_tensor:
                metric.value = made

    def _gather_terms(self, when: bool, own: dict[str, _Terms]) -> list[dict[str, _Terms]]:
        """Returns the terms of all ranks, by rank. Sends numbers alone, where all have logged the same as the last time."""
        if self._world_size == 1:
            return [own]
        names, expected = tuple((key, len(terms)) for key, terms in own.items()), self._expected.get(when)
        if expected is not None:
            pairs = [number for terms in own.values() for pair in terms for number in pair]
            numbers = [1.0, *pairs] if names == expected else [0.0] * (1 + 2 * sum(count for _, count in expected))
            rows = all_gather_numbers(numbers, self._world_size)
            if all(row[0] for row in rows):
                return [_unpack_terms(row[1:], expected) for row in rows]
        by_rank = self._gather(own)
        kinds = {tuple((key, len(terms)) for key, terms in of_rank.items()) for of_rank in by_rank}
        self._expected[when] = kinds.pop() if len(kinds) == 1 else None
        return by_rank

    def reduce_epoch(self) -> None:
        """Reduces the values of all ranks over the epoch. Called at its end, by all of them."""
        own: dict[str, tuple[list[float], float]] = {}
        for key, metric in self.items():
            if not _is_reduced_over_epoch(metric) or key in self._reduced:
                continue
            count = float(metric.cumulated_batch_size) if metric.meta.is_mean_reduction else 0.0
            own[key] = self._sums[key].parts() if key in self._sums else [float(metric.value)], count
        by_rank = self._gather(own)
        for key in dict.fromkeys(key for of_rank in by_rank for key in of_rank):
            metric = self[key]
            of_ranks = [of_rank[key] for of_rank in by_rank if key in of_rank]
            parts = [part for parts, _ in of_ranks for part in parts]
            if metric.meta.is_mean_reduction:
                total = exact_mean(parts, sum(count for _, count in of_ranks))
                metric.cumulated_batch_size = torch.ones_like(metric.cumulated_batch_size)
            else:
                total = _reduce_terms([(part, 1.0) for part in parts], metric)
            metric.value = torch.tensor(total, dtype=torch.float64, device=metric.value.device)
            self._reduced.add(key)

    def _gather(self, own: dict[str, _T]) -> list[dict[str, _T]]:
        """Returns what all ranks have logged, by rank. What only others have logged gets an entry, with nothing of this one; of
        a torchmetrics object, whose counts `ExactMetrics` brings together, that object.
        """
        metas = {key: metric.meta for key, metric in self.items() if key in own or not (metric.is_tensor or metric.has_reset)}
        both = all_gather_objects((own, metas), self._world_size)
        device = next((metric.device for metric in self.values()), torch.device("cpu"))
        for key, meta in {key: meta for _, metas in both for key, meta in metas.items()}.items():
            if key not in self or self[key].has_reset:
                name, module = meta.metric_attribute, self._trainer.lightning_module
                metric = self.setdefault(key, _ResultMetric(meta, name is None).to(device))
                if name is None:
                    metric.reset()
                metric.update(metric.value if name is None else module.get_submodule(name), 0)  # what changes nothing
                metric._forward_cache, metric.has_reset = None, False
                self._not_logged_since.add(key)  # this rank may log it yet
                if _is_sum_of_epoch(metric):
                    self._sums[key] = ExactScalar()
        return [of_rank for of_rank, _ in both]

    def refuse_values_of_single_ranks(self) -> None:
        """Refuses values of other hooks that are not the same on all ranks. Called at the end of an epoch, by all ranks."""
        if self._world_size == 1:
            return
        own = {
            key: repr(self[key].value.double().tolist())
            for key in self._keys_of_epoch()
            if _hook_name(self[key].meta.fx) not in OF_MICRO_BATCH and not self[key].meta.sync.rank_zero_only
        }
        by_rank = all_gather_objects(own, self._world_size)
        for key in own:
            if len({of_rank[key] for of_rank in by_rank if key in of_rank}) > 1:
                meta = self[key].meta
                raise UserError(
                    f"self.log({meta.name!r}) in {_hook_name(meta.fx)} logs another value on each rank, which depends on their "
                    "number: trainer.exact can't be kept. HINT: log it in the step, for each micro-batch, or use a "
                    "torchmetrics.Metric."
                )

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        self._reduced -= {key for key in self._reduced if fx is None or self[key].meta.fx == fx}
        super().reset(metrics, fx)

    def sums(self, ranks: DataRanks) -> Sums:
        """Returns the sums in the form of one rank's: a checkpoint does not show how many there were."""
        self._gather(dict.fromkeys(self._keys_of_epoch()))  # each rank has an entry for what another has logged
        made = super().sums(ranks)
        for key, entry in made.items():
            entry["meta"] = {name: intern(value) if isinstance(value, str) else value for name, value in entry["meta"].items()}
            if key in self._sums and _is_reduced_over_epoch(self[key]):
                parts = [part for value, _ in filter(None, entry["ranks"]) for part in value.tolist()]
                samples = torch.stack([count for _, count in filter(None, entry["ranks"])]).sum()
                entry["ranks"] = [(torch.tensor(canonical_parts(parts), dtype=torch.float64), samples)]
            elif known := [*filter(None, entry["ranks"])]:
                how = {"max": torch.amax, "min": torch.amin}.get(entry["meta"]["reduce_fx"])
                values = torch.stack([value for value, _ in known])
                entry["ranks"] = [(values[0] if how is None else how(values, 0), known[0][1])]
        return dict(sorted(made.items()))  # a rank may have met with them in another order

    def _sum_of_this_rank(self, key: str) -> Tensor:
        if key in self._sums:
            return torch.tensor(self._sums[key].parts(), dtype=torch.float64)
        return super()._sum_of_this_rank(key)

    def _restored_sum(self, key: str, sums: Sums, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        of_ranks, how = [*filter(None, sums[key]["ranks"])], sums[key]["meta"]["reduce_fx"]
        if how not in ("mean", "sum") or _hook_name(sums[key]["meta"]["fx"]) not in OF_MICRO_BATCH:
            value, samples = of_ranks[0]  # the same on all ranks
            return value.sum(), samples
        parts = [part for value, _ in of_ranks for part in value.reshape(-1).tolist()] if rank == 0 else []
        self._sums[key] = ExactScalar(parts)
        samples = torch.stack([count for _, count in of_ranks]).sum()
        return torch.zeros(()), samples * (rank == 0)


def _hook_name(fx: str) -> str:
    """Returns the hook in which it was logged, without the number of the loader."""
    return fx.partition(".")[0]


def _is_sum_of_epoch(metric: _ResultMetric) -> bool:
    meta = metric.meta
    return bool(meta.on_epoch and (meta.is_mean_reduction or meta.is_sum_reduction))


def _is_reduced_over_epoch(metric: _ResultMetric) -> bool:
    """Returns whether a value is a sum, a mean, or the largest or smallest, over the micro-batches of an epoch."""
    in_epoch = metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
    return bool(in_epoch and _hook_name(metric.meta.fx) in OF_MICRO_BATCH)


def _unpack_terms(numbers: Sequence[float], names: tuple[tuple[str, int], ...]) -> dict[str, _Terms]:
    """Returns the terms by name, out of a rank's row of numbers."""
    pairs = iter(zip(numbers[::2], numbers[1::2], strict=True))
    return {key: [next(pairs) for _ in range(count)] for key, count in names}


def _reduce_terms(terms: _Terms, metric: _ResultMetric) -> float:
    """Returns the sum, mean, largest or smallest value of terms, rounded once."""
    values, meta, is_tensor = [value for value, _ in terms], metric.meta, metric.is_tensor
    if is_tensor and (meta.is_max_reduction or meta.is_min_reduction):
        numbers = torch.tensor(values, dtype=torch.float64)  # its extremes of what is no number are none
        return float(numbers.max() if meta.is_max_reduction else numbers.min())
    if is_tensor and meta.is_sum_reduction:
        return exact_total(values)
    if not all(map(math.isfinite, values)):
        return sum(values)
    weights = [Fraction(weight) for _, weight in terms]
    return float(sum(map(mul, map(Fraction, values), weights)) / sum(weights))
