"""Saves and restores the torchmetrics of a module: their states go into a checkpoint, and come back.

torchmetrics leaves its states out of a module's `state_dict`, because at the end of an epoch nothing is in most of them; but a
MaxMetric of validations, say, keeps its state for the whole run.
"""

import logging
from collections.abc import Collection, Iterator
from typing import TypeAlias, TypedDict, TypeVar, cast

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric, MetricCollection, MetricTracker
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from project.step.data_ranks import DataRanks

log = logging.getLogger(__name__)

T = TypeVar("T")
State: TypeAlias = Tensor | list[Tensor]


class RankStates(TypedDict, total=False):
    """A rank's states of a metric; of one that has not updated it, nothing."""

    state: dict[str, State]
    """By their names."""
    updates: int
    """How often the metric was updated."""


States: TypeAlias = dict[str, list[RankStates]]
"""By the name of the metric, of each rank its states."""


def states_of_metrics(module: LightningModule) -> dict[str, RankStates]:
    """Returns copies of this rank's states of a module's metrics."""
    made: dict[str, RankStates] = {}
    for name, metric in metrics_of(module):
        copies = {
            key: [*value] if isinstance(value, list) else value.detach().clone() for key, value in metric.metric_state.items()
        }
        made[name] = {"state": copies, "updates": metric.update_count} if metric.update_called else {}
    return made


class NotedMetrics:
    """The states of a module's metrics when a step began: updates change them in place."""

    def __init__(self, module: LightningModule) -> None:
        self._collections = [part for part in module.modules() if isinstance(part, MetricCollection)]
        self._metrics = [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]
        self._lists: dict[tuple[str, str], list[Tensor]] = {}
        self.states: dict[str, RankStates] = {}

    def note(self) -> None:
        """Notes that a step begins."""
        for collection in self._collections:
            collection.values(copy_state=False)  # those that count the same have their states with one of them
        self.states = {name: self._states_of(name, metric) if metric.update_called else {} for name, metric in self._metrics}

    def _states_of(self, name: str, metric: Metric) -> RankStates:
        states: dict[str, State] = {}
        for key, value in metric.metric_state.items():
            states[key] = self._elements((name, key), value) if isinstance(value, list) else value.detach().clone()
        return {"state": states, "updates": metric.update_count}

    def _elements(self, key: tuple[str, str], now: list[Tensor]) -> list[Tensor]:
        """Returns a copy of a list that has mostly grown since the step before: what was copied then is not copied again."""
        kept = self._lists.get(key, [])
        if len(kept) > len(now) or (kept and kept[-1] is not now[len(kept) - 1]):
            kept = []
        kept.extend(now[len(kept) :])
        self._lists[key] = kept
        return kept


def on_host(states: T) -> T:
    """Returns states in main memory, of plain tensors: a library's kind of tensor is in no file that is read as data."""
    made: T = apply_to_collection(states, Tensor, lambda tensor: tensor.detach().cpu().as_subclass(Tensor))
    return made


def gather_metric_states(own: dict[str, RankStates], ranks: DataRanks) -> States:
    """Returns the states of all ranks, which must call this together."""
    by_rank = ranks.all_gather_objects(on_host(own))
    names = {key for of_rank in by_rank for key in of_rank}
    return {name: [of_rank.get(name, RankStates()) for of_rank in by_rank] for name in names}


def restore_metric_states(saved: States, module: LightningModule, rank: int, ranks: int) -> None:
    """Restores states into the metrics of today's ranks."""
    for name, part in module.named_modules():
        if isinstance(part, MetricTracker):  # which has made a metric whenever it was told to
            numbers = [key.removeprefix(f"{name}.").partition(".")[0] for key in saved]
            while str(len(part)) in numbers:
                part.increment()
    metrics = dict(metrics_of(module))
    for name, of_ranks in saved.items():
        if (metric := metrics.get(name)) is None:
            continue
        if metric.update_called:  # in a sanity check; what a module has restored by itself stays
            Metric.reset(metric)
        here = of_ranks[rank] if len(of_ranks) == ranks else _on_other_ranks(name, metric, of_ranks, rank)
        for key, value in here.get("state", {}).items():
            set_state(metric, key, move_data_to_device(value, metric.device))
        set_updates(metric, here.get("updates", metric.update_count))


def set_updates(metric: Metric, updates: int) -> None:
    """Sets how often a metric was updated."""
    metric._update_count = updates


def set_state(metric: Metric, name: str, value: object) -> None:
    """Sets a state of a metric, which has no setter."""
    setattr(metric, name, value)


def _on_other_ranks(name: str, metric: Metric, of_ranks: list[RankStates], rank: int) -> RankStates:
    """Returns the states of a metric for today's ranks, or none where they can't be brought together: rank 0 continues with all
    of a sum, every rank with the largest value.
    """
    made: dict[str, State] = {}
    entries = [entry for entry in of_ranks if entry]
    for key, how in metric._reductions.items() if entries else ():
        parts = [entry["state"][key] for entry in entries]
        tensors = cast(list[Tensor], parts)  # which they are, but for those of `dim_zero_cat`
        if how in (dim_zero_max, dim_zero_min, dim_zero_mean):
            made[key] = how(torch.stack(tensors))
        elif how not in (dim_zero_sum, dim_zero_cat):
            if not rank:
                log.warning("%s can't be taken over by another number of ranks: it begins anew in this epoch.", name)
            return {}
        elif not rank and how is dim_zero_sum:
            made[key] = cast(Tensor, sum(tensors))
        elif not rank:
            made[key] = [element for part in parts for element in (part if isinstance(part, list) else [part])]
    return {"state": made, "updates": sum(entry["updates"] for entry in entries) if not rank else 0}


def metrics_of(module: LightningModule) -> Iterator[tuple[str, Metric]]:
    """Yields the metrics of a module with their names."""
    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.items()  # those that count the same have their states with one of them until somebody asks
    for name, part in module.named_modules():
        if isinstance(part, Metric):
            yield name, part


def with_parts(names: Collection[str | None], module: LightningModule) -> set[str | None]:
    """Returns the names of metrics and of those that they are made of, which are reset with them."""
    known = dict(module.named_modules())
    parts = {id(part) for name in names if name in known for part in known[name].modules()}
    return {*names, *(name for name, metric in metrics_of(module) if id(metric) in parts)}
