"""Computes torchmetrics whose values are the same to the last bit on any number of ranks.

A metric adds up what its updates bring; floats in the order in which they come. Here each micro-batch's part is taken out of
the metric when the next one begins, and the metric stands at zero again. Sums of floats are kept on grids (exact/sums.py),
and lists by the micro-batch that they belong to. At the end of an epoch, all ranks have what all of them have counted.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias, TypedDict, cast

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from project.errors import UserError
from project.exact.sums import WideSum, sum_from_coarsest
from project.step.ddp import all_gather_objects
from project.step.logged import Logged
from project.step.metric_states import RankStates, metrics_of, on_host, restore_metric_states, set_state, set_updates
from project.typed import StateDict

_MICRO_BATCHES = 2**24  # of an epoch, at most
_LARGEST, _LEVELS = 128, 11  # all that a float32 can be
_PARTS = {"exact_metrics": "train", "exact_validations": "val"}  # of a checkpoint: the stage whose counts they are
_EXTREMES: dict[object, Callable[..., Tensor]] = {dim_zero_max: torch.amax, dim_zero_min: torch.amin}

Where: TypeAlias = tuple[int, ...]
"""Identifies a micro-batch: what sorts them in the same way on any number of ranks."""
Element: TypeAlias = tuple[Where, int, object]
"""An element of a state that is a list: its micro-batch, its number in it, and what it is."""
State: TypeAlias = Tensor | list[Element]


class Counted(TypedDict):
    """A metric's counts."""

    states: dict[str, State]
    """What its updates have brought, by the name of the state."""
    updates: int
    """How many they were."""


Counts: TypeAlias = Mapping[str, dict[str, Counted]]
"""By stage, then by metric."""


class ExactLogged(Logged):
    """The logger connector with trainer.exact: the module's metrics are exact, too."""

    _metrics: "ExactMetrics | None" = None
    _counts_before_validation: "Counts" = MappingProxyType({})

    @property
    def metrics_of_module(self) -> "ExactMetrics":
        """Returns the exact metrics of the module at hand."""
        module = self.trainer.lightning_module
        if self._metrics is None or self._metrics.module is not module:
            self._metrics = ExactMetrics(module, self.trainer.world_size)
        return self._metrics

    def begin_micro_batch(self, stage: str, key: Where) -> None:
        self.metrics_of_module.begin(stage, key)

    def reduce_metrics(self, stage: str) -> None:
        self.metrics_of_module.reduce_epoch(stage)

    def note_metrics(self) -> None:
        self._counts_before_validation = self.metrics_of_module.own_counts(before_step=False)
        super().note_metrics()

    def note_step(self) -> None:
        self.metrics_of_module.note_step()

    def metrics_of_ranks(self, before_step: bool) -> dict[str, object]:
        metrics = self.metrics_of_module
        counts = self._counts_before_validation if self.trainer.validating else metrics.own_counts(before_step)
        made = {part: metrics.gather_counts(counts.get(stage, {})) for part, stage in _PARTS.items()}
        # What was not counted in micro-batches is the same on all ranks. A name of elsewhere is another object: other bytes.
        own = on_host(self.own_metrics(before_step))
        counted = {name for of_part in made.values() for name in of_part}
        states = {sys.intern(name): [RankStates() if name in counted else own[name]] for name in own}
        return {**made, "metric_states": states}

    def restore_metrics(self, checkpoint: StateDict) -> None:
        self.metrics_of_module.load_state_dict(checkpoint, self.trainer.global_rank)
        restore_metric_states(checkpoint["metric_states"], self.trainer.lightning_module, 0, 1)


class ExactMetrics:
    """The metrics of a module. Call `begin` before each micro-batch, `reduce_epoch` at the end of an epoch, by all ranks."""

    def __init__(self, module: LightningModule, world_size: int) -> None:
        self.module, self._world_size = module, world_size
        self._counted: dict[str, dict[str, Counted]] = {}
        self._stage: str | None = None
        self._key: Where = ()
        self._reduced: dict[str, tuple[Metric, Callable[..., bool | None]]] = {}
        self._updated_between: dict[str, int] = {}
        """Metrics that are updated between micro-batches, with what is the same on all ranks: how often they were."""
        self._before_step: dict[str, tuple[dict[str, Tensor | int], int]] | None = None
        """What training had counted when the step at hand began, of lists the length; None before its first micro-batch."""

    def begin(self, stage: str, where: Where) -> None:
        """Begins a micro-batch: counts from here on belong to it."""
        if self._reduced:
            self._continue_counting()
        self._collect()
        for name, metric in metrics_of(self.module) if self._updated_between else ():
            if name in self._updated_between:
                self._updated_between[name] = metric.update_count
        self._stage, self._key = stage, where
        if stage == "train" and self._before_step is None:  # a state that is no list is never changed in place
            self._before_step = {
                name: (
                    {key: len(state) if isinstance(state, list) else state for key, state in counted["states"].items()},
                    counted["updates"],
                )
                for name, counted in self._counted.get(stage, {}).items()
            }

    def note_step(self) -> None:
        """Notes that a step begins."""
        self._before_step = None

    def _collect(self) -> None:
        """Moves what the last micro-batch has counted from the metrics into the sums."""
        for name, metric in metrics_of(self.module):
            if not metric.metric_state or not metric.update_called or name in self._reduced:
                continue
            if name in self._updated_between:
                if self._stage is not None and self._updated_between[name] != metric.update_count:
                    raise UserError(
                        f"The metric {name} is updated in micro-batches and between them: trainer.exact can't tell what is a "
                        "rank's own. HINT: two metrics."
                    )
                continue
            if self._stage is None:  # each rank has all of it: nothing is to be brought together
                self._updated_between[name] = metric.update_count
                metric.distributed_available_fn = _never_distributed
                continue
            _refuse_unsupported(name, metric)
            counted = self._counted.setdefault(self._stage, {}).setdefault(name, {"states": {}, "updates": 0})
            counted["updates"] += metric.update_count
            states = counted["states"]
            for key, value in metric.metric_state.items():
                own = self._part_of_micro_batch(value, how := metric._reductions[key])
                before = states.get(key)
                if isinstance(own, list) and isinstance(before, list):
                    before += own
                elif isinstance(own, Tensor) and isinstance(before, Tensor):  # which may come from a checkpoint
                    states[key] = _reduce_states([before.to(own.device), own], how)
                else:
                    states[key] = own
            Metric.reset(metric)

    def _part_of_micro_batch(self, value: Tensor | list[Tensor], how: object) -> State:
        """Returns what the last micro-batch adds to a state. `how`: the metric's reduction."""
        if isinstance(value, list):
            parts = [
                element.detach().cpu().as_subclass(Tensor) if isinstance(element, Tensor) else element for element in value
            ]
            return [(self._key, number, element) for number, element in enumerate(parts)]
        value = value.detach().as_subclass(Tensor)
        if how is dim_zero_sum and value.is_floating_point():
            sums = WideSum(value.numel(), _MICRO_BATCHES, value.device, levels=_LEVELS, top=_LARGEST)
            sums.add(value.reshape(-1))
            return sums.folds
        return value.clone()

    def reduce_epoch(self, stage: str) -> None:
        """Sets the metrics to what all ranks have counted in an epoch. Called by all of them."""
        self._collect()
        self._stage = None
        metrics = dict(metrics_of(self.module))
        for name, counted in self.gather_counts(self._counted.get(stage, {})).items():
            metric = metrics[name]
            for key, state in counted["states"].items():
                how, default = metric._reductions[key], metric.metric_state[key]
                if isinstance(state, list):
                    parts = [element for _, _, element in state]
                    value: object = [part.to(metric.device) if isinstance(part, Tensor) else part for part in parts]
                elif isinstance(default, Tensor) and how is dim_zero_sum and default.is_floating_point():
                    value = sum_from_coarsest(state).view(default.shape).to(metric.device, default.dtype)
                else:
                    value = state.to(metric.device)
                set_state(metric, key, value)
            set_updates(metric, counted["updates"])
            metric._computed = None
            if name not in self._reduced:
                self._reduced[name] = metric, metric.distributed_available_fn
            metric.distributed_available_fn = _never_distributed

    def gather_counts(self, own: dict[str, Counted]) -> dict[str, Counted]:
        """Returns what all ranks have counted, in the order of the micro-batches."""
        of_rank: dict[str, Counted] = {}
        for name, counted in own.items():
            states = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in counted["states"].items()}
            of_rank[name] = {"states": states, "updates": counted["updates"]}
        by_rank = all_gather_objects(of_rank, self._world_size)
        metrics = dict(metrics_of(self.module))
        made: dict[str, Counted] = {}
        for name in sorted({name for of_rank in by_rank for name in of_rank} & set(metrics)):
            parts = [of_rank[name] for of_rank in by_rank if name in of_rank]
            reductions = metrics[name]._reductions
            joined = {key: _reduce_states([part["states"][key] for part in parts], how) for key, how in reductions.items()}
            # A name that came from elsewhere is another object, and a checkpoint would have other bytes for it.
            made[sys.intern(name)] = {"states": joined, "updates": sum(part["updates"] for part in parts)}
        return made

    def _continue_counting(self) -> None:
        """Resumes counting after the end of an epoch: metrics that were not reset keep what they have."""
        self._drop_reset_metrics()
        for metric, distributed in self._reduced.values():
            metric.distributed_available_fn = distributed
            if metric.update_called:
                Metric.reset(metric)
        self._reduced = {}

    def _drop_reset_metrics(self) -> None:
        """Drops the counts of metrics that were reset since the end of an epoch."""
        for name in [name for name, (metric, _) in self._reduced.items() if not metric.update_called]:
            for counted in self._counted.values():
                counted.pop(name, None)

    def own_counts(self, before_step: bool) -> Counts:
        """Returns copies of this rank's counts; `before_step`: of those when the step at hand began."""
        self._drop_reset_metrics()
        self._collect()
        copies: dict[str, dict[str, Counted]] = apply_to_collection(self._counted, list, list.copy)
        if before_step and self._before_step is not None:
            now, copies["train"] = copies.get("train", {}), {}
            for name, (noted, updates) in self._before_step.items():
                states = {
                    key: cast(list[Element], now[name]["states"][key])[:state] if isinstance(state, int) else state
                    for key, state in noted.items()
                }
                copies["train"][name] = {"states": states, "updates": updates}
        return copies

    def load_state_dict(self, checkpoint: StateDict, rank: int) -> None:
        self._continue_counting()
        self._counted = {stage: {} if rank else checkpoint.get(part, {}) for part, stage in _PARTS.items()}
        for _, metric in metrics_of(self.module):
            if metric.update_called:  # what a module has restored by itself stays
                Metric.reset(metric)


def _never_distributed() -> bool:
    return False


def _reduce_states(parts: Sequence[State], how: object) -> State:
    """Reduces the parts of a state to one. `how`: the metric's reduction."""
    if isinstance(parts[0], list):
        elements = [element for part in cast(Sequence[list[Element]], parts) for element in part]
        return sorted(elements, key=lambda element: element[:2])
    reduce = _EXTREMES.get(how, torch.sum)
    return reduce(torch.stack(cast(list[Tensor], parts)), 0)


def _refuse_unsupported(name: str, metric: Metric) -> None:
    """Raises a UserError for a metric whose value would depend on the number of ranks."""
    if metric._computed is not None:
        raise UserError(
            f"The metric {name} was computed within an epoch, where each rank has counted other samples: trainer.exact can't "
            "be kept. HINT: call it for the value of the batch, and compute it at the end of the epoch."
        )
    if metric.dist_sync_on_step:
        raise UserError(
            f"The metric {name} brings the ranks together in each step (dist_sync_on_step): trainer.exact can't be kept. "
            "HINT: leave that out; at the end of the epoch the metric is all ranks' in any case."
        )
    for key, how in metric._reductions.items():
        is_list = isinstance(metric.metric_state[key], list)
        if how not in ((dim_zero_cat, None) if is_list else (dim_zero_sum, dim_zero_max, dim_zero_min)):
            raise UserError(
                f"The metric {name} ({type(metric).__name__}) brings the ranks' states together in a way of its own ({key}): "
                "trainer.exact can't be kept. HINT: another metric, or one that keeps its samples, as CatMetric does."
            )
