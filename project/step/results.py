"""Adds up what `self.log` logs: means over a step and over an epoch count each sample once, also those of a resumed run."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from typing import TypeAlias, TypedDict, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from project.errors import UserError
from project.step.data_ranks import ByDataRanks, DataRanks
from project.step.metric_states import set_state
from project.step.state import step_state
from project.typed import StateDict


class Sync(TypedDict):
    """The arguments of `self.log` by which the ranks meet."""

    should: bool
    rank_zero_only: bool


class Sum(TypedDict):
    """A value that was logged, of the epoch so far."""

    meta: StateDict
    """The arguments of `self.log`."""
    sync: Sync
    ranks: list[tuple[Tensor, Tensor] | None]
    """Of each rank the sum, or largest or smallest value, and the number of samples in it; None of a rank that has not logged
    it. Empty of a torchmetrics object, which counts for itself.
    """


Sums: TypeAlias = dict[str, Sum]
"""By what was logged."""
Value: TypeAlias = dict[str, Tensor]
"""A value of an epoch so far, under `value`, and where it is a mean the number of samples in it, as Lightning names them."""
Shown: TypeAlias = dict[str, float | Tensor]
"""The numbers that a bar shows: those of a step lie on the GPU until they are read, where one computes them."""


class Metrics(TypedDict):
    """The values that were logged, as Lightning returns them: for callbacks, for loggers and for a bar."""

    callback: dict[str, Tensor]
    log: dict[str, Tensor]
    pbar: dict[str, float]


log = logging.getLogger(__name__)

OF_MICRO_BATCH = {
    *("training_step", "on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward"),
    *(f"{stage}_step" for stage in ("validation", "test")),
    *(f"on_{stage}_batch_{when}" for stage in ("validation", "test") for when in ("start", "end")),
}
"""The hooks that are called for each micro-batch; what other hooks log counts once."""
_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "metric_attribute")


def _with_plain_values(log: Callable[..., None]) -> Callable[..., None]:
    """Returns `log` without its copy to the GPU, for which the host waits: Lightning copies a number that is logged. A kernel
    writes the same number. A tensor of a library's own type is logged as a plain one: no checkpoint can hold others.
    """

    @wraps(log)
    def logged(self: LightningModule, name: str, value: object, *args: object, **how: object) -> None:
        if isinstance(value, (int, float)) and self.device.type == "cuda":
            value = torch.full((), value, dtype=torch.get_default_dtype(), device=self.device)
        elif isinstance(value, Tensor) and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__:  # and no DTensor
            value = value.as_subclass(Tensor)
        log(self, name, value, *args, **how)

    return logged


LightningModule.log = _with_plain_values(LightningModule.log)  # type: ignore[method-assign]


class Results(_ResultCollection):
    """The results that the training steps of an epoch have logged; a run that was stopped within the epoch resumes with
    them.
    """

    def __init__(self, trainer: Trainer, training: bool) -> None:
        super().__init__(training)
        self._state, self._tells = step_state(trainer), trainer.is_global_zero and trainer.world_size > 1
        self._how: dict[str, object] = {}  # arguments of `self.log` that take the place of the user's
        self._own_values: set[str] = set()  # the names of which it was told that they are rank 0's
        self._sums_to_restore: tuple[Sums, int, int] | None = None
        self.hooks_before_resume: set[str] = set()
        """Hooks that logged before the run was stopped, and have not logged since."""
        self._not_logged_since: set[str] = set()  # what has not been logged since
        self.weight, self.ends_step = 1.0, True
        self._before_step: dict[str, Value] = {}  # this step, of an epoch
        self._values_of_step: dict[str, tuple[Tensor, float]] = {}
        """What the micro-batches of this step have logged: the sum, weighted for a mean, or the extreme; and their weights."""
        self.values_of_last_step: dict[str, object] = {}
        """What callbacks see within a step, by name."""

    def log(self, fx: str, name: str, value: object, **how: object) -> None:
        if self._state.recording:
            raise UserError(
                f"self.log({name!r}) in {fx}: that is a part of a graph (trainer.capture), and is not called when the graph is "
                "repeated. HINT: log in on_train_batch_end, where outputs is what training_step returned; or set "
                "trainer.capture=none."
            )
        self._tell_own_value(fx, name, value, how)
        if fx not in OF_MICRO_BATCH and how.get("batch_size") is None:
            how["batch_size"] = 1  # once a step, or an epoch: the size of a rank's last micro-batch does not matter
        strategy = getattr(how.get("sync_dist_fn"), "__self__", None)
        if isinstance(strategy, DDPStrategy):
            how["sync_dist_fn"] = _Reduction(strategy)
        how |= self._how
        if (key := f"{fx}.{name}") in self._not_logged_since:
            # Lightning refuses a name that is logged in two ways. On one rank it shares with nobody, whatever was asked for.
            self._not_logged_since.discard(key)
            metric: _ResultMetric = self[key]
            meta, reduce, reduce_fx = metric.meta, how.get("sync_dist_fn", metric.meta.sync.fn), how.get("reduce_fx")
            # First the function, which `should` takes: of another, Lightning makes a copy, with the strategy and the network.
            meta.sync.fn = reduce if callable(reduce) else None
            meta.sync.should = bool(how.get("sync_dist", False))
            meta.reduce_fx = reduce_fx if callable(reduce_fx) else meta.reduce_fx
        super().log(fx, name, self._whole_value(name, value), **how)

    def _tell_own_value(self, fx: str, name: str, value: object, how: dict[str, object]) -> None:
        """Tells once that a value is rank 0's own, where the curve of another number of ranks will be another."""
        if isinstance(value, Metric):  # which the ranks share at the end of an epoch
            own = bool(how.get("on_step")) and not value.dist_sync_on_step
        else:
            own = not (how.get("sync_dist") or how.get("rank_zero_only"))
        if not (self._tells and own and fx == "training_step") or name in self._own_values:
            return
        self._own_values.add(name)
        if isinstance(value, Metric):
            log.info(
                "%s of a step is rank 0's own, of its last micro-batch: with another number of ranks, its curve is another. "
                "HINT: self.log(%r, ..., on_step=False, on_epoch=True); with trainer.exact=true it is the step's.",
                *(name, name),
            )
            return
        log.info(
            "%s is rank 0's own value: with another number of ranks, its curve is another. HINT: self.log(%r, ..., "
            "sync_dist=True), as in Lightning; with trainer.exact=true that makes no difference.",
            *(name, name),
        )

    def _whole_value(self, name: str, value: object) -> object:
        """Returns a value as a whole tensor: one that follows from sharded parameters is sharded, too. All ranks log it."""
        return value.full_tensor() if isinstance(value, DTensor) else value

    def begin_micro_batch(self, weight: float, begins_step: bool, ends_step: bool) -> None:
        """Begins a micro-batch. `weight`: what it counts for in its step."""
        self.weight, self.ends_step = weight, ends_step
        if begins_step:
            self._values_of_step.clear()

    def note_step(self) -> None:
        """Notes the values of the epoch, where a step begins: Lightning never changes a tensor of theirs in place."""
        self._before_step = {
            key: metric.metric_state
            for key, metric in self.items()
            if not metric.has_reset and (metric.meta.on_epoch or not metric.is_tensor)
        }

    @contextmanager
    def before_step(self) -> Iterator[None]:
        """Has, within this context, the values of the epoch that there were when the step at hand began."""
        now = {key: (metric.metric_state, metric.has_reset) for key, metric in self.items()}
        noted = {key: (values, False) for key, values in self._before_step.items()}
        self._set_values({key: noted.get(key, (values, True)) for key, (values, _) in now.items()})
        try:
            yield
        finally:
            self._set_values(now)

    def _set_values(self, values_by_key: Mapping[str, tuple[Value, bool]]) -> None:
        for key, (values, has_reset) in values_by_key.items():
            for name, value in values.items():
                set_state(self[key], name, value)
            self[key].has_reset = has_reset

    def keep_values_of_step(self) -> None:
        """Keeps the values of the step that has ended: what callbacks see until the next one has."""
        for meta, value in ((metric.meta, metric._forward_cache) for metric in self.values()):
            if meta.fx in OF_MICRO_BATCH and meta.on_step and value is not None:
                self.values_of_last_step[meta.forked_name(True)] = value

    def _keys_of_epoch(self) -> list[str]:
        """Returns the keys of the values that are summed up over this epoch; torchmetrics count for themselves."""
        return [key for key, metric in self.items() if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset]

    def discard_skipped_step(self) -> None:
        """Discards what a skipped step has logged for its epoch; the host does not wait for a GPU that decides it."""
        skipped = self._state.skipped
        for key in self._keys_of_epoch() if self._state.may_be_skipped and skipped is not False else ():
            self._discard_value_of_step(key, self._before_step.get(key), skipped)

    def _discard_value_of_step(self, key: str, before: Value | None, skipped: bool | Tensor) -> None:
        """Sets a value of the epoch back to what it was before the step."""
        metric, now = self[key], self[key].metric_state
        if before is None:  # it was logged for the first time
            fresh = metric if skipped is True else deepcopy(metric)
            fresh.reset()
            before = fresh.metric_state
        if isinstance(skipped, Tensor):
            before = {name: torch.where(skipped, value.to(now[name].device), now[name]) for name, value in before.items()}
        metric.value = before["value"]
        if metric.meta.is_mean_reduction:
            metric.cumulated_batch_size = before["cumulated_batch_size"]

    def update_metrics(self, key: str, value: Metric | Tensor, batch_size: int) -> None:
        """Shows a step as the mean, sum or extreme of its micro-batches. Lightning shows the last one, which is another one on
        another number of ranks.
        """
        metric: _ResultMetric = self[key]
        meta = metric.meta
        if not (self.training and meta.fx in OF_MICRO_BATCH and meta.on_step and metric.is_tensor):
            super().update_metrics(key, value, batch_size)
            return
        shared, meta.sync.should = meta.sync.should, False  # the ranks need not meet before the step is over
        super().update_metrics(key, value, batch_size)
        meta.sync.should = shared
        assert metric._forward_cache is not None
        of_batch: Tensor = metric._forward_cache * self.weight if meta.is_mean_reduction else metric._forward_cache
        before, weights = self._values_of_step.get(key, (None, 0.0))
        add = torch.maximum if meta.is_max_reduction else torch.minimum if meta.is_min_reduction else torch.add
        total, weights = of_batch if before is None else add(before, of_batch), weights + self.weight
        self._values_of_step[key] = total, weights
        if shared and self.ends_step:  # only the weights of all ranks together tell how much a rank's own count for
            total, weights = meta.sync(torch.stack((total, torch.full_like(total, weights))))
        metric._forward_cache = total / weights if meta.is_mean_reduction else total

    def metrics(self, on_step: bool) -> Metrics:
        """Returns what is known now, as Lightning does, but leaves what a bar shows of a step on its device. Until a step has
        ended, callbacks have the values of the last one: those of this one are a rank's own, of some of its micro-batches.
        """
        if not (self.training and on_step):
            return super().metrics(on_step)
        metas = [metric.meta for _, metric in self.valid_items() if metric.meta.prog_bar]
        for meta in metas:
            meta.prog_bar = False
        try:
            known: Metrics = super().metrics(on_step)
        finally:
            for meta in metas:
                meta.prog_bar = True
        for meta in [metric.meta for metric in self.values()] if not self.ends_step else ():
            forked = meta.forked_name(True)
            if (
                meta.on_step
                and meta.fx in OF_MICRO_BATCH
                and forked in known["callback"]
                and forked in self.values_of_last_step
            ):
                known["callback"] |= dict.fromkeys((meta.name, forked), self.values_of_last_step[forked])
        names = [meta.forked_name(on_step) for meta in metas]
        values = {name: known["callback"][name] for name in names if name in known["callback"]}
        shown: Shown = {name: value if value.is_cuda else value.item() for name, value in values.items()}
        known["pbar"] = cast(dict[str, float], shown)
        return known

    def reduce_step(self, hook_is_over: bool) -> None:
        """Does nothing here. `ExactResults` reduces the values of a step over the ranks."""

    def reduce_epoch(self) -> None:
        """Does nothing here. `ExactResults` reduces the values of an epoch over the ranks."""

    def refuse_values_of_single_ranks(self) -> None:
        """Does nothing here. `ExactResults` refuses values that differ between the ranks."""

    def sums(self, ranks: DataRanks) -> Sums:
        """Returns the sums of all ranks, which must call this together."""
        own: dict[str, tuple[Tensor, Tensor] | None] = {
            key: None for key, metric in self.items() if not (metric.is_tensor or metric.has_reset)
        }
        for key in self._keys_of_epoch():
            samples: Tensor = self[key].metric_state.get("cumulated_batch_size", torch.tensor(0))
            own[key] = self._sum_of_this_rank(key), samples.cpu()
        described = {key: (self._description(key), value) for key, value in own.items()}
        by_rank = ranks.all_gather_objects(described)
        made: Sums = {}
        # Its own names, where it has them: others are other objects, and other bytes in a file.
        others = {key: entry for of_rank in by_rank for key, entry in of_rank.items() if key not in described}
        for key, (description, value) in {**described, **others}.items():
            if value is not None:
                description["ranks"] = [of_rank[key][1] if key in of_rank else None for of_rank in by_rank]
            elif not all(key in of_rank for of_rank in by_rank):
                continue  # an object that other ranks have not logged
            made[key] = description
        return made

    def _description(self, key: str) -> Sum:
        """Returns how a value is logged, with no rank's sum yet."""
        meta = self[key].meta
        return {
            "meta": {**{name: getattr(meta, name) for name in _META}, "reduce_fx": meta.reduce_fx.__name__},
            "sync": {"should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
            "ranks": [],
        }

    def _sum_of_this_rank(self, key: str) -> Tensor:
        """Returns the sum, or largest or smallest value, on this rank; or parts of it, which are to be added."""
        value: Tensor = self[key].value.detach().cpu()
        return value

    def resume_with(self, sums: Sums, rank: int, ranks: int) -> None:
        """Keeps a checkpoint's sums for `restore_sums`, at the start of the next epoch."""
        self._sums_to_restore = sums, rank, ranks

    def restore_sums(self, module: LightningModule, device: torch.device, reduce: Callable[..., object]) -> bool:
        """Restores the sums of a checkpoint: what was summed up on another number of ranks is rank 0's now. A torchmetrics
        object is logged anew: its result is the epoch's, though no step of it may follow. Returns whether there are any.
        """
        if self._sums_to_restore is None:
            return False
        (sums, rank, ranks), self._sums_to_restore = self._sums_to_restore, None
        objects = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
        for key, entry in sums.items():
            meta = dict(entry["meta"])
            if not entry["ranks"] and meta["metric_attribute"] not in objects:
                continue  # the module has no such metric any more
            if None in entry["ranks"] and (entry["ranks"][rank] is None if len(entry["ranks"]) == ranks else rank > 0):
                continue  # this rank has not logged it yet
            self.pop(key, None)  # of an earlier fit
            fx, name = meta.pop("fx"), meta.pop("name")
            # As when it was logged for the first time, but without that value, which the ranks need not meet for.
            how = {**meta, "batch_size": 1, "sync_dist_fn": reduce, "rank_zero_only": entry["sync"]["rank_zero_only"]}
            self._own_values.add(name)  # nothing is to be told of it here
            self.log(fx, name, torch.zeros(()) if entry["ranks"] else objects[meta["metric_attribute"]], **how)
            metric: _ResultMetric = self[key]
            metric._forward_cache, metric.meta.sync.should = None, entry["sync"]["should"]
            if entry["ranks"]:
                metric.value, samples = self._restored_sum(key, sums, rank, ranks)
                if metric.meta.is_mean_reduction:
                    metric.cumulated_batch_size = samples
                self[key] = metric.to(device)
            self.hooks_before_resume.add(fx)
            self._not_logged_since.add(key)
        self._values_of_step.clear()
        return True

    def _restored_sum(self, key: str, sums: Sums, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Returns what this rank resumes with: a value of the epoch so far, and the number of samples in it."""
        of_ranks, how = sums[key]["ranks"], sums[key]["meta"]["reduce_fx"]
        if len(of_ranks) == ranks and (own := of_ranks[rank]) is not None:
            return own[0].sum(), own[1]
        known = [(entry[0].sum(), entry[1]) for entry in of_ranks if entry is not None]
        if how == "mean" and sums[key]["meta"]["fx"] not in OF_MICRO_BATCH:  # each rank has counted each step
            values, counts = (torch.stack(parts).double().mean(0) for parts in zip(*known, strict=True))
            return values, counts
        reduce = {"max": torch.amax, "min": torch.amin}.get(how, torch.sum)
        value, samples = (reduce(torch.stack(parts), 0) for parts in zip(*known, strict=True))
        if rank and reduce is torch.sum:
            value, samples = torch.zeros_like(value), torch.zeros_like(samples)
        return value, samples


class _Reduction:
    """Lightning's reduction over the ranks; on GPUs without the barrier before it, for which the host would wait."""

    def __init__(self, strategy: DDPStrategy) -> None:
        self.strategy = strategy

    def __eq__(self, other: object) -> bool:
        """Returns whether two reductions are the same: Lightning refuses a name that is logged twice with different ones."""
        return isinstance(other, _Reduction) and self.strategy is other.strategy

    def __hash__(self) -> int:
        return id(self.strategy)

    def __deepcopy__(self, memo: dict[int, object]) -> "_Reduction":
        """Returns this one: a copy of what was logged does not need the strategy, and with it the network."""
        return self

    def __call__(
        self, value: Tensor, group: dist.ProcessGroup | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        device = self.strategy.root_device
        if not isinstance(value, Tensor) or device.type != "cuda" or not dist.is_initialized():
            return self.strategy.reduce(value, group, reduce_op)
        if not value.is_cuda:  # NCCL reduces what lies on GPUs alone
            return value.copy_(self(value.to(device), group, reduce_op))
        if group is None and isinstance(self.strategy, ByDataRanks):
            group = self.strategy.data_ranks.group
        names = {"mean": "AVG", "avg": "AVG"}
        operation = getattr(dist.ReduceOp, names.get(reduce_op, reduce_op.upper())) if isinstance(reduce_op, str) else reduce_op
        dist.all_reduce(value, operation or dist.ReduceOp.SUM, group=group)
        return value
