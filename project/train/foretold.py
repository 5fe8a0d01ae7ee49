"""What each rank of a run will hold, before it holds it: the network, its optimiser and a micro-batch, on paper."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging

from project.cluster import gpu
from project.cluster.environment import limits
from project.train.activations import Activations, activations
from project.train.batching import accumulation
from project.train.blocks import Named, blocks_of
from project.train.data_ranks import data_ranks
from project.train.first_batch import first_batch
from project.train.held import Held, Inventory, Sharing, held, in_bytes, inventory
from project.train.micro_batch import samples_of
from project.train.on_paper import batch_on_paper, copied_to_meta, copied_to_paper
from project.train.optimizer_state import OptimizerState

log = logging.getLogger(__name__)

USABLE = 0.95
"""Of a device's memory: the rest goes to its driver, to libraries, and into gaps."""

Found = TypeVar("Found")


class Foretold:
    """Of one network. What can't be reckoned on paper is not known, and `unknown` says why.

    Args:
        trainer: the run's.
        module: its module.
        blocks: the names of its blocks, as `blocks_of` takes them.
        batch: makes a micro-batch, on the host.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, blocks: Any, batch: Callable[[], Any]) -> None:
        self.trainer, self.module = trainer, copied_to_meta(module, trainer.precision_plugin.convert_module)
        self.device = trainer.strategy.root_device
        self.blocks: Named = blocks_of(self.module, blocks)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        averages = sum(isinstance(one, WeightAveraging) for one in callbacks)
        self.inventory: Inventory = inventory(self.module, self.blocks, averages)
        self.unknown: dict[str, str] = {}
        self._optimizer = self._try("optimizer", lambda: OptimizerState(self._copy(None)))
        self._activations = cache(self._reckon_activations)
        self._micro_batch = batch

    @cached_property
    def batch(self) -> Any:
        """A micro-batch; None where there can't be one here."""
        return self._try("activations", self._micro_batch)

    def held(self, sharing: Sharing) -> Held:
        """By one rank, where the ranks share so."""
        state = self._optimizer
        kept = self._activations(sharing.param_dtype if sharing.spread else None)
        again = sharing.spread and sharing.checkpoint_activations
        return held(
            self.inventory,
            sharing,
            None if state is None else self._try("optimizer", lambda: state.bytes(sharing.parts)),
            None if kept is None else kept.checkpointed if again else kept.kept,
            {**self.unknown},
        )

    def _copy(self, dtype: torch.dtype | None) -> LightningModule:
        return copied_to_paper(self.module, self.device, dtype)

    def _reckon_activations(self, dtype: torch.dtype | None) -> Activations | None:
        if self.batch is None:
            return None

        def reckon() -> Activations:
            copied = self._copy(dtype)
            named = dict(copied.named_modules())
            batch = batch_on_paper(self.trainer.precision_plugin.convert_input(self.batch), self.device, dtype)
            context = self.trainer.precision_plugin.train_step_context
            return activations(copied, [(name, named[name]) for name, _ in self.blocks], batch, context)

        return self._try("activations", reckon)

    def _try(self, what: str, reckon: Callable[[], Found]) -> Found | None:
        try:
            with _no_trace():
                return reckon()
        except Exception as error:  # somebody's module may do whatever it likes
            log.debug("%s can't be reckoned on paper", what, exc_info=True)
            first = str(error).strip().partition("\n")[0]
            self.unknown[what] = f"{type(error).__name__}: {first}" if first else type(error).__name__
            return None


@contextmanager
def _no_trace() -> Iterator[None]:
    """Random numbers go on as if nothing had been drawn; what is said of a first batch is said when it comes."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        logging.disable(before)


def room(device: torch.device, ranks_here: int) -> int | None:
    """Bytes that a rank can have on its device; None where that is not known."""
    if device.type == "cuda":
        return gpu.memory(device).left
    left: int | None = limits(Path("."))["memory"]
    return None if left is None else left // max(1, ranks_here)


def held_by_others(device: torch.device) -> str:
    """What other processes hold of a GPU, in a few words, or ''."""
    return str(gpu.memory(device)) if device.type == "cuda" else ""


def steps_of(trainer: Trainer, samples: int) -> int:
    """Micro-batches of a step, on as many ranks as there are."""
    loaders: Any = trainer._data_connector
    if loaders.global_batch is None or not samples:
        return trainer.accumulate_grad_batches
    return accumulation(
        loaders.global_batch, samples, data_ranks(trainer).count, loaders.wanted, "trainer.global_batch_size batch_size"
    )


def tell(trainer: Trainer, blocks: Sequence[str] | None, sharing: Sharing) -> None:
    """Logs what each rank is about to hold, beside what its device has, and a warning where that is less."""
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
    try:
        foretold = Foretold(trainer, module, blocks, lambda: first_batch(module, data))
        samples = samples_of(foretold.batch)
        sharing = replace(sharing, accumulation=steps_of(trainer, samples))
        will = foretold.held(sharing)
    except Exception as error:  # a line less is no reason not to train
        log.info("What each rank will hold is not known: %s", error)
        return
    log.info("Each rank will hold at most %s: %s.", in_bytes(will.total), ", ".join(_parts(will)))
    if line := not_reckoned(sharing):
        log.info(line)
    for what, why in will.unknown.items():
        log.info("Not known is what is held for the %s: %s", what, why)
    has = room(foretold.device, sharing.per_host)
    if has is None:
        return
    held_there = held_by_others(foretold.device)
    others = f" ({held_there})" if held_there else ""
    if will.total <= USABLE * has:
        log.info("Its device has %s%s.", in_bytes(has), others)
        return
    found = best_option(foretold, sharing)
    hint = "a smaller micro-batch, or more ranks" if found is None else f"{found[0]} makes it {in_bytes(found[1].total)}"
    text = "Each rank will hold %s, and its device has %s%s. HINT: %s."
    log.warning(text, in_bytes(will.total), in_bytes(has), others, hint)


def not_reckoned(sharing: Sharing) -> str:
    """What a figure leaves out."""
    if sharing.shared_by == 1:
        return ""
    return (
        f"What tensor_parallel={sharing.shared_by} saves is not reckoned: the figures are those of {sharing.ranks} ranks that "
        f"see {sharing.ranks // sharing.shared_by} micro-batches at once, with whole layers."
    )


def _parts(will: Held) -> Iterator[str]:
    where = " on the host" if will.offloaded else ""
    yield f"parameters {in_bytes(will.parameters)}{where}"
    whole = will.whole_gradients
    yield (
        f"gradients {in_bytes(whole)}, whole until a step's last micro-batch"
        if whole
        else (f"gradients {in_bytes(will.gradients)}{where}")
    )
    yield f"optimiser {'not known' if will.optimizer is None else in_bytes(will.optimizer) + where}"
    yield f"gathered {in_bytes(will.gathered)}"
    yield f"activations {'not known' if will.activations is None else in_bytes(will.activations)}"
    if will.others:
        yield f"buffers and averages {in_bytes(will.others)}"


_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "shard=full": {"shard": "full"},
    "checkpoint_activations=true": {"checkpoint_activations": True},
    "cpu_offload=true": {"cpu_offload": True},
    "param_dtype=bf16": {"param_dtype": torch.bfloat16},
}
"""Of `Sharded`, with which a rank may hold less."""


def best_option(foretold: Foretold, sharing: Sharing) -> tuple[str, Held] | None:
    """The option that saves most, and what a rank holds with it."""
    now, found = foretold.held(sharing).total, []
    for name, change in _OPTIONS.items():
        other = replace(sharing, **{"shard": sharing.shard or "full", **change})
        then = foretold.held(other)
        if other != sharing and then.total < now:
            found.append((then.total, name, then))
    return min(found, key=lambda one: one[0])[1:] if found else None
