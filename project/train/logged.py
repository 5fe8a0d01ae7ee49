"""What `self.log` logs: its means over a step and over an epoch count each sample once, also those of a resumed run."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor

from project.data.dealing import DealtLoader
from project.train.exact import ExactScalar, exact_total
from project.train.micro_batch import micro_batch
from project.train.strategy import gathered

Sums = dict[str, dict[str, Any]]
"""By what was logged: how (`meta`, `sync`), and of each rank the sum, or largest or smallest value, of the epoch so far, and
the number of samples in it (`ranks`)."""

_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "metric_attribute")


class Results(_ResultCollection):
    """What the training steps of an epoch have logged; a run that was stopped within the epoch goes on with it."""

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self._from_before: tuple[Sums, int, int] | None = None
        self.kept: set[str] = set()
        """Hooks that logged before the run was stopped, and have not logged since."""
        self.exact = False
        """Sums are the same to the last bit on any number of ranks; all ranks' values count, whatever `sync_dist` says."""
        self._exact: dict[str, ExactScalar] = {}
        self._met: set[str] = set()  # of this epoch
        self._terms: dict[str, list[Tensor]] = {}  # of this step
        self.rank, self.world_size = 0, 1
        self.weight, self.ends_step = 1.0, True
        self._of_step: dict[str, tuple[Tensor, float, int]] = {}
        """What the micro-batches of this step have logged: the weighted sum, the weights and how many they were."""

    def begin_micro_batch(self, weight: float, begins_step: bool, ends_step: bool) -> None:
        """`weight`: what it counts for in its step."""
        self.weight, self.ends_step = weight, ends_step
        if begins_step:
            self._of_step.clear()
            self._terms.clear()

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Lightning shows a step as its last micro-batch, which is another one on another number of ranks. It is their mean."""
        metric: Any = self[key]
        meta = metric.meta
        if self.exact and metric.is_tensor and (meta.is_mean_reduction or meta.is_sum_reduction):
            self._update_exactly(key, value, batch_size)
            return
        if not (self.training and meta.fx == "training_step" and meta.on_step and metric.is_tensor and meta.is_mean_reduction):
            super().update_metrics(key, value, batch_size)
            return
        shared, meta.sync.should = meta.sync.should, False  # the ranks need not meet before the step is over
        super().update_metrics(key, value, batch_size)
        meta.sync.should = shared
        total, weights, count = self._of_step.get(key, (0.0, 0.0, 0))
        total, weights, count = total + metric._forward_cache * self.weight, weights + self.weight, count + 1
        self._of_step[key] = total, weights, count
        # The weights of all ranks add up to the number of micro-batches; a rank's own need not.
        met = shared and self.ends_step
        metric._forward_cache = meta.sync(total / count) if met else total / weights

    def _update_exactly(self, key: str, value: Any, batch_size: int) -> None:
        metric: Any = self[key]
        meta = metric.meta
        if metric.has_reset or key not in self._exact:
            self._exact[key] = ExactScalar()
        shared, meta.sync.should = meta.sync.should, False  # the ranks meet at the end of a step or of the epoch
        super().update_metrics(key, value, batch_size)
        meta.sync.should = shared
        if meta.on_epoch:
            self._exact[key].add(value.double() * batch_size if meta.is_mean_reduction else value)
        if not (self.training and meta.fx == "training_step" and meta.on_step and meta.is_mean_reduction):
            return
        terms = self._terms.setdefault(key, [])
        terms.append(value.detach().double() * self.weight)
        mine: list[float] = torch.stack(terms).tolist()
        everybodys = gathered(mine, self.world_size) if self.ends_step else [mine]
        total = exact_total([term for terms in everybodys for term in terms])
        metric._forward_cache = torch.tensor(total / sum(len(terms) for terms in everybodys), dtype=torch.float64)

    def meet(self) -> None:
        """At the end of an epoch, by all ranks: what has been added up is that of all of them."""
        mine: dict[str, tuple[list[float], int]] = {}
        for key, found in self._exact.items():
            metric: Any = self[key]
            if metric.meta.on_epoch and not metric.has_reset and key not in self._met:
                mine[key] = found.parts(), int(metric.cumulated_batch_size) if metric.meta.is_mean_reduction else 0
        everybodys = gathered(mine, self.world_size)
        for key in mine:
            metric = self[key]
            of_ranks = [one[key] for one in everybodys if key in one]
            total = exact_total([part for parts, _ in of_ranks for part in parts])
            count = sum(count for _, count in of_ranks)
            if metric.meta.sync.should and self.rank:  # Lightning is about to add it up
                total, count = 0.0, 0
            metric.value = torch.tensor(total, dtype=torch.float64, device=metric.value.device)
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = torch.tensor(count, device=metric.value.device)
            self._met.add(key)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        self._met -= {key for key in self._met if fx is None or self[key].meta.fx == fx}
        super().reset(metrics, fx)

    def sums(self, ranks: int) -> Sums:
        """Of all ranks, which must call this together."""
        mine: dict[str, tuple[Tensor, Tensor]] = {}
        for key, found in self.items():
            metric: Any = found
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset:
                samples = metric.cumulated_batch_size if metric.meta.is_mean_reduction else torch.tensor(0)
                value = metric.value.detach().cpu()
                if key in self._exact:
                    value = torch.tensor(self._exact[key].parts(), dtype=torch.float64)
                mine[key] = value, samples.cpu()
        everybodys = gathered(mine, ranks)
        made: Sums = {}
        for key in mine:
            if all(key in one for one in everybodys):
                meta: Any = self[key].meta
                made[key] = {
                    "meta": {**{name: getattr(meta, name) for name in _META}, "reduce_fx": meta.reduce_fx.__name__},
                    "sync": {"should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
                    "ranks": [one[key] for one in everybodys],
                }
        return made

    def go_on(self, sums: Sums, rank: int, ranks: int) -> None:
        """With the next epoch that begins."""
        self._from_before = sums, rank, ranks

    def put_back(self, device: torch.device, reduce: Callable[..., Any]) -> None:
        """What was summed up on another number of ranks is rank 0's now."""
        if self._from_before is None:
            return
        (sums, rank, ranks), self._from_before = self._from_before, None
        for key, one in sums.items():
            of_ranks = one["ranks"]
            if self.exact and one["meta"]["reduce_fx"] in ("mean", "sum"):
                parts = [part for value, _ in of_ranks for part in value.reshape(-1).tolist()] if rank == 0 else []
                self._exact[key] = ExactScalar(parts)
                value, samples = torch.zeros(()), torch.stack([count for _, count in of_ranks]).sum() * (rank == 0)
            elif len(of_ranks) == ranks:
                value, samples = of_ranks[rank]
            else:
                how = {"max": torch.amax, "min": torch.amin}.get(one["meta"]["reduce_fx"], torch.sum)
                value, samples = (how(torch.stack(parts), 0) for parts in zip(*of_ranks, strict=True))
                if rank and how is torch.sum:
                    value, samples = torch.zeros_like(value), torch.zeros_like(samples)
            should, rank_zero_only = one["sync"].values()
            meta = dict(one["meta"])
            self.pop(key, None)  # of an earlier fit
            fx, name = meta.pop("fx"), meta.pop("name")
            # As when it was logged for the first time, but without that value, which the ranks need not meet for.
            self.log(fx, name, torch.zeros(()), **meta, batch_size=1, sync_dist_fn=reduce, rank_zero_only=rank_zero_only)
            metric: Any = self[key]
            metric.reset()
            metric.has_reset, metric.meta.sync.should = False, should
            metric.value = value
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = samples
            self[key] = metric.to(device)
            self.kept.add(fx)
        self._of_step.clear()


class Logged(_LoggerConnector):
    """Lightning's, which guesses the size of a batch from what its `collate_fn` made (of strings, by their length)."""

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        super().on_batch_start(batch, dataloader_idx)
        results: Any = self.trainer._results
        if self.trainer.training:
            at, steps = micro_batch(self.trainer), self.trainer.fit_loop.epoch_loop
            results.batch_size = at.size or None
            begins = (steps.batch_progress.current.ready - 1) % self.trainer.accumulate_grad_batches == 0
            results.begin_micro_batch(at.weight, begins, not steps.accumulates())
            return
        loop: Any = self.trainer._active_loop
        loaders = loop._combined_loader.flattened
        loader = loaders[dataloader_idx or 0]
        if isinstance(loader, DealtLoader) and loader.taken:
            _, step, number = loader.taken.popleft()
            low, high = loader.keys.order.micro_span(step, number)
            results.batch_size = high - low

    def should_reset_tensors(self, fx: str) -> bool:
        """Lightning throws away what is there when a hook logs for the first time in an epoch."""
        reset: bool = super().should_reset_tensors(fx)
        results: Any = self.trainer._results
        if isinstance(results, Results) and fx in results.kept:
            results.kept.discard(fx)
            return False
        return reset

    def epoch_end_reached(self) -> None:
        """Lightning brings the ranks' numbers of samples to their mean as whole numbers: of 3 and 4, that would be 3."""
        super().epoch_end_reached()
        results: Any = self.trainer._results
        if isinstance(results, Results) and results.exact:
            results.meet()
        for metric in results.values():
            if metric.is_tensor and metric.meta.is_mean_reduction:
                dtype = metric.value.dtype if metric.value.is_floating_point() else torch.float32
                metric.cumulated_batch_size = metric.cumulated_batch_size.to(dtype)
