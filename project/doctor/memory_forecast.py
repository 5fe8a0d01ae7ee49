"""Forecasts the bytes that each rank of a run will hold: a line before a sharded fit, and the table of `fit --dry_run`.

With `fully_shard` (FSDP2) a rank holds a shard of each parameter: the first dimension is cut as `torch.chunk` cuts it, and the
first rank's shard, which counts here, is the largest. What is whole for a while is counted as FSDP2 of torch 2.15 has it: while
a block computes backwards, the next one is gathered into a buffer, its own gradients are whole, and those of the block before
are still on their way to their ranks.
"""

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from project.cluster import gpu
from project.cluster.environment import limits
from project.cluster.processes import memory_of
from project.data.dealing import chance_kept
from project.data.self_dealing import SelfDealing
from project.doctor.activations import FAKE, activations, copy_like, fake, first_batch
from project.doctor.findings import in_bytes
from project.errors import UserError
from project.sharded.blocks import blocks_of
from project.sharded.strategy import DTYPES, Shard, Sharded
from project.step.batching import accumulation
from project.step.evaluation import loaders_of
from project.step.loaders import attached_for_fit
from project.step.micro_batch import count_samples
from project.tables import fit_table
from project.typed import TypedTrainer

log = logging.getLogger(__name__)

Given = ParamSpec("Given")
Result = TypeVar("Result")
Configured = int | Literal["auto"]
"""The accumulation in the configuration."""

_ON_HOST = " (host)"  # in the memory of a GPU's host
_USABLE = 0.95  # of a device's memory: the rest goes to its driver, to libraries, and into gaps
_WIDE = 150  # columns, where no terminal says how many there are
_HOST = 8  # ranks on a host, where the YAML doesn't say
# What a CPU's process keeps of memory that was freed, as it was seen in runs of up to 160 steps: glibc has holes too small by
# some bytes for what was there before.
_HOLES = 8  # times the largest parameter: two are an update's
_GATHERED = 6  # times the network, where blocks are gathered and let go
_FIRST_STEP = 64 << 20  # what a process takes on top of what it has: libraries and threads that training begins with


@dataclass(frozen=True)
class Layout:
    """How ranks share a network: the settings of `Sharded`. `shard` is None for DDP, where every rank has everything."""

    ranks: int = 1
    shard: Shard | None = None
    per_host: int = _HOST
    shared_by: int = 1
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    checkpoint_activations: bool = False
    cpu_offload: bool = False
    exact: bool = False
    accumulation: int = 1

    @property
    def sharded(self) -> bool:
        return self.shard is not None and bool(self.ranks > 1 or self.param_dtype or self.reduce_dtype or self.cpu_offload)

    @property
    def shards(self) -> int:
        """Returns into how many shards a tensor is cut."""
        ranks = min(self.ranks, self.per_host) if self.shard == "node" else self.ranks
        return max(1, ranks // self.shared_by) if self.sharded else 1

    @property
    def waits(self) -> bool:
        """Returns whether gradients are whole until a step's last micro-batch, when they are sent."""
        return self.sharded and (self.accumulation > 1 or self.exact)


def layout_of(strategy: Strategy, exact: bool) -> Layout:
    """Returns how ranks share a network with this strategy, whatever their number."""
    if not isinstance(strategy, Sharded):
        return Layout(exact=exact)
    types = DTYPES[strategy.param_dtype], DTYPES[strategy.reduce_dtype]
    others = strategy.checkpoint_activations, strategy.cpu_offload, exact
    return Layout(1, strategy.shard, strategy.num_processes, strategy.shared_by, *types, *others)


@dataclass(frozen=True)
class Forecast:
    """The bytes that one rank holds, at most, by the columns of the table; None: not known."""

    layout: Layout
    figures: dict[str, int | None]
    marks: dict[str, str]

    @property
    def total(self) -> int:
        """Returns the bytes on the device, of what is known."""
        return sum(number or 0 for name, number in self.figures.items() if self.marks.get(name) != _ON_HOST)

    @property
    def texts(self) -> dict[str, str]:
        texts = {
            name: "not known" if number is None else in_bytes(number) + self.marks.get(name, "")
            for name, number in self.figures.items()
        }
        return texts | {"total": (">= " if None in self.figures.values() else "") + in_bytes(self.total)}


class Forecaster:
    """Forecasts for the run's network, with or without memory, however ranks share it. `dry`: as in `first_batch`."""

    def __init__(self, trainer: TypedTrainer, dry: bool) -> None:
        strategy, self.precision, self.device = trainer.strategy, trainer.precision_plugin, trainer.strategy.root_device
        module, self.data = trainer.lightning_module, trainer.datamodule
        self.global_batch = loaders_of(trainer).global_batch
        self.saves = bool(trainer.checkpoint_callbacks)
        self.averages = sum(isinstance(callback, WeightAveraging) for callback in trainer.callbacks)
        self.module = copy_like(module, lambda tensor: tensor.detach().to("meta"), self.device)
        self.precision.convert_module(self.module)
        self.blocks = blocks_of(self.module, strategy.blocks if isinstance(strategy, Sharded) else None)
        self.unknown: list[str] = []
        self.batch = self._try("activations", lambda: first_batch(module, self.data, dry))
        self._states = self._try("optimiser", self._optimizer_states)
        self._kept = cache(lambda dtype: self._try("activations", lambda: self._activations(dtype)))

    def _try(self, what: str, compute: Callable[[], Result]) -> Result | None:
        """Draws none of the run's random numbers, and leaves warnings about a first batch to the time when it comes."""
        before = logging.root.manager.disable
        logging.disable(max(before, logging.WARNING))
        try:
            with chance_kept():
                return compute()
        except Exception as error:  # somebody's module may do whatever it likes
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            self.unknown.append(f"{what} not known: {reason.removesuffix(': ')}")
            return None
        finally:
            logging.disable(before)

    def _optimizer_states(self) -> list[Tensor]:
        """Returns the tensors that the optimisers keep, whatever they are: they take a step without memory."""
        module = copy_like(self.module, lambda tensor: fake(tensor, self.device), self.device)
        optimizers, states = list[Optimizer](), list[Tensor]()
        with FAKE:
            apply_to_collection(module.configure_optimizers(), Optimizer, optimizers.append)
        for parameter in module.parameters():
            parameter.grad = fake(parameter, self.device) if parameter.requires_grad else None
        for optimizer in optimizers:
            optimizer.step()
            apply_to_collection([*optimizer.state.values()], Tensor, states.append)
        return states

    def _activations(self, dtype: torch.dtype | None) -> tuple[int, int]:
        """Returns the bytes that a micro-batch keeps, without and with checkpoints; parameters are computed with as `dtype`."""

        def like(tensor: Tensor) -> Tensor:
            return fake(tensor, self.device, dtype if isinstance(tensor, nn.Parameter) else None)

        batch = apply_to_collection(self.precision.convert_input(self.batch), Tensor, fake, self.device, dtype)
        return activations(copy_like(self.module, like, self.device), [name for name, _ in self.blocks], batch, self.precision)

    def forecast(self, layout: Layout) -> Forecast:
        """Returns what one rank holds where ranks share the network like that."""
        parameters, on_gpu, shards = [*self.module.parameters()], self.device.type != "cpu", layout.shards
        learning = [parameter for parameter in parameters if parameter.requires_grad]
        held, buffers = _bytes(parameters, shards), sum(buffer.nbytes for buffer in self.module.buffers())
        # DDP sends gradients in buckets: on a GPU they lie in there, on a CPU they are copied (step/ddp.py).
        buckets = 0 if layout.ranks == 1 or on_gpu or layout.exact else _bytes(learning)
        kept = None if self.batch is None else self._kept(layout.param_dtype if layout.sharded else None)
        figures: dict[str, int | None] = {
            "parameters": held,
            "gradients": _bytes(learning, dtype=layout.reduce_dtype) if layout.waits else _bytes(learning, shards),
            "optimiser": None if self._states is None else _bytes(self._states, shards),
            "gathered": self._gathered(layout) if layout.sharded else buckets,
            "activations": kept and kept[layout.sharded and layout.checkpoint_activations],
            "other": buffers + self.averages * (held + buffers),
        }
        figures["checkpoint"] = sum(figures[name] or 0 for name in ("parameters", "optimiser", "other")) if self.saves else 0
        if not on_gpu:  # cluster/memory.py; gradients and activations leave holes as well
            largest = max((parameter.nbytes for parameter in learning), default=0)
            holes = _HOLES * largest + (_GATHERED * _bytes(parameters) if layout.sharded else 0)
            figures["freed"] = holes + _bytes(learning) + (figures["activations"] or 0)
        figures["process"] = memory_of(os.getpid()) + _FIRST_STEP
        offloaded = layout.sharded and layout.cpu_offload and on_gpu
        marks = dict.fromkeys(("parameters", "gradients", "optimiser"), _ON_HOST) if offloaded else {}
        if on_gpu:
            marks |= dict.fromkeys(("checkpoint", "process"), _ON_HOST)
        return Forecast(layout, figures, marks | ({"gradients": " *"} if layout.waits else {}))

    def _gathered(self, layout: Layout) -> int:
        """Returns the most that is whole at once: when the root is gathered, in a block, or at the root's end."""

        def whole(parameters: Sequence[Tensor]) -> tuple[int, int, int]:
            """Returns the bytes of parameters, of gradients that don't count already, and of the buffer that sends these."""
            learning, shards = [parameter for parameter in parameters if parameter.requires_grad], layout.shards
            gradients = 0 if layout.waits else _bytes(learning, dtype=layout.param_dtype)
            sent = _bytes(learning, shards, layout.reduce_dtype) * shards
            return _bytes(parameters, shards, layout.param_dtype) * shards, gradients, sent

        inside = [[*block.parameters()] for _, block in self.blocks]
        taken = {id(parameter) for block in inside for parameter in block}
        root, root_gradients, root_sent = whole([left for left in self.module.parameters() if id(left) not in taken])
        blocks = [(0, 0, 0), *map(whole, inside)]
        largest, gradients, sent = (max(block[column] for block in blocks) for column in range(3))
        backward = root_gradients + gradients + sent
        if layout.shard == "gradients":  # blocks stay, and the buffer of one more is there in the forward pass
            most = root + sum(parameters for parameters, _, _ in blocks) + max(largest, backward)
        else:
            most = root + 2 * largest + backward
        return max(most, 2 * root, root_gradients + root_sent)

    def accumulation(self, layout: Layout, configured: Configured) -> int:
        """Returns the micro-batches of a step; raises a UserError where there can be no such step."""
        count, rest = divmod(layout.ranks, layout.shared_by)
        if rest:
            raise UserError(f"{layout.ranks} ranks are no multiple of tensor_parallel={layout.shared_by}. HINT: take one.")
        keys, size, global_batch = "trainer.global_batch_size batch_size", count_samples(self.batch), self.global_batch
        if self.data is not None and isinstance(self.data, SelfDealing):
            keys, (size, global_batch) = "data.global_batch_size data.batch_size", self.data.batch_sizes()
        return accumulation(global_batch if size else None, size, count, configured, keys)

    def notes(self, *layouts: Layout) -> list[str]:
        """Returns notes that explain the figures."""
        lines = [*self.unknown]
        if any(layout.waits for layout in layouts):
            lines.append(
                "* whole, until the last micro-batch of a step: they are sent once a step. A smaller global batch, or a larger "
                "micro-batch, makes it one micro-batch, and gradients as large as the parameters."
            )
        if any(layout.shared_by > 1 for layout in layouts):
            lines.append("What tensor_parallel saves is not counted: each rank's layers are as if they were whole.")
        return lines

    def verdict(self, forecast: Forecast) -> tuple[bool, str]:
        """Returns whether a device like this one has room for a rank, and a line with this result."""
        layout, (room, others) = forecast.layout, _room(self.device, forecast.layout.per_host)
        who = "ddp" if layout.shard is None else f"{layout.ranks:,} ranks"
        if room is None:
            return True, f"{who}: what a device has is not known here."
        has = f"a device like the one here{', as far as it is known' * bool(self.unknown)} ({in_bytes(room)} each{others})"
        if forecast.total <= _USABLE * room:
            return True, f"{who}: fits {has}."
        least, option = min((self.forecast(smaller).total, name) for name, smaller in _smaller(layout).items())
        hint = f"{option} makes it {in_bytes(least)}" if least < forecast.total else "a smaller micro-batch, or more ranks"
        return False, f"{who}: does not fit {has}. HINT: {hint}."


def _smaller(layout: Layout) -> dict[str, Layout]:
    """Returns layouts with which a rank may hold less, by the setting of `Sharded` that makes each."""
    sharded = replace(layout, shard=layout.shard or "full")
    return {
        "shard=full": replace(layout, shard="full"),
        "checkpoint_activations=true": replace(sharded, checkpoint_activations=True),
        "cpu_offload=true": replace(sharded, cpu_offload=True),
        "param_dtype=bf16": replace(sharded, param_dtype=torch.bfloat16),
    }


def _bytes(tensors: Iterable[Tensor], shards: int = 1, dtype: torch.dtype | None = None) -> int:
    """Returns the bytes of the first of so many shards."""
    total = 0
    for tensor in tensors:
        rows = -(-tensor.shape[0] // shards) if tensor.ndim else 1
        total += rows * math.prod(tensor.shape[1:]) * (dtype or tensor.dtype).itemsize
    return total


def _room(device: torch.device, ranks_here: int) -> tuple[int | None, str]:
    """Returns the bytes that a rank can have on its device, and who else has some of them."""
    if device.type == "cuda":
        memory = gpu.memory(device)
        return memory.left, f"; {memory}" if str(memory) else ""
    left = limits(Path("."))["memory"]
    return left and left // ranks_here, f", shared by {ranks_here}" * (ranks_here > 1)


def report(trainer: TypedTrainer) -> None:
    """Logs the memory that each rank will need, and a warning if its device has less."""
    try:
        forecaster = Forecaster(trainer, dry=False)
        layout = replace(layout_of(trainer.strategy, trainer.exact), ranks=trainer.world_size)
        layout = replace(layout, accumulation=forecaster.accumulation(layout, loaders_of(trainer).configured_accumulation))
        forecast = forecaster.forecast(layout)
        fits, verdict = forecaster.verdict(forecast)
    except Exception as error:  # a line less is no reason not to train
        log.info("What each rank will hold is not known: %s", error)
        return
    parts = ", ".join(f"{name} {text}" for name, text in forecast.texts.items() if name != "total")
    log.info("Each rank will hold at most %s: %s.", forecast.texts["total"], parts)
    for note in forecaster.notes(layout):
        log.info(note)
    log.log(logging.INFO if fits else logging.WARNING, verdict)


def on_meta(class_type: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
    """Returns what is made here without memory, if it can be made so; a network that looks at its numbers has some."""
    try:
        with torch.device("meta"):
            return class_type(*args, **kwargs)
    except Exception as error:
        made = class_type(*args, **kwargs)
        log.info("Made with numbers: %s", str(error).partition("\n")[0])
        return made


def dry_run(
    trainer: TypedTrainer, model: LightningModule, datamodule: LightningDataModule | None = None, ranks: str = ""
) -> list[Forecast]:
    """Shows what each rank of a fit would hold, and trains nothing. Returns the rows of its table, in bytes.

    Args:
        trainer: the Trainer of the run, on one rank.
        model: the model of the run; one built under `torch.device("meta")` takes no memory.
        datamodule: its data, for a micro-batch.
        ranks: numbers of ranks, as in "8,64,1024"; none is needed. By default the settings' number.
    """
    loaders = loaders_of(trainer)
    configured, loaders.configured_accumulation = loaders.configured_accumulation, "auto"  # here is one rank
    trainer.strategy.connect(model)
    try:
        with attached_for_fit(trainer, model, datamodule):
            return _forecasts(trainer, configured, ranks)
    finally:
        loaders.configured_accumulation = configured


def _forecasts(trainer: TypedTrainer, configured: Configured, ranks: str) -> list[Forecast]:
    """Prints the table of a dry run with its notes, and returns its rows."""
    module = trainer.lightning_module
    on_meta(module.configure_model)
    on_meta(module.setup, "fit")
    settings = trainer.configuration.get("trainer", {})
    forecaster, layout = Forecaster(trainer, dry=True), layout_of(trainer.strategy, trainer.exact)
    given, here = settings.get("devices"), torch.cuda.device_count() if forecaster.device.type == "cuda" else 1
    devices = len(given) if isinstance(given, (list, tuple)) else int(given) if str(given).isdigit() else here
    rows, refused = list[Forecast](), list[str]()
    own_count = devices * int(settings.get("num_nodes") or 1)
    for count in numbers(ranks, own_count if layout.shard else max(own_count, 2)):
        per_host = min(count, devices if devices > 1 else _HOST)
        row = replace(layout, shard=layout.shard or "full", ranks=count, per_host=per_host)
        try:
            row = replace(row, accumulation=forecaster.accumulation(row, configured))
        except UserError as error:
            refused.append(f"{count:,} ranks: {str(error).partition(' HINT:')[0]}")
        rows.append(forecaster.forecast(row))
    first = rows[0].layout
    alone = own_count == 1 and not layout.shard and numbers(ranks, 1) == [1]
    ddp_ranks, per_host = (1, 1) if alone else (max(2, first.ranks), max(2, first.per_host))
    ddp = forecaster.forecast(replace(first, shard=None, ranks=ddp_ranks, per_host=per_host, accumulation=1, shared_by=1))
    own = rows if layout.shard else [ddp]
    rows = [*rows, ddp] if layout.shard else [ddp, *rows]
    kinds = ", ".join(sorted({type(block).__name__ for _, block in forecaster.blocks}))
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False, soft_wrap=True)
    numel, samples = sum(parameter.numel() for parameter in module.parameters()), count_samples(forecaster.batch) or "?"
    blocks = f", {len(forecaster.blocks)} block(s) of {kinds}" if forecaster.blocks else ""
    console.print(f"{type(module).__name__}: {numel:,} parameters{blocks}.")
    console.print(f"A micro-batch of {samples}; precision {trainer.precision}; on {forecaster.device.type}.")
    if not layout.shard:
        console.print("trainer.strategy has each rank hold everything. Beside it, what strategy=sharded would hold.")
    console.print(fit_table(_table(rows), console, ("hosts", "other", "gathered", "gradients", "freed", "checkpoint")))
    notes = forecaster.notes(*(row.layout for row in rows))
    for line in (*notes, *refused, *(forecaster.verdict(row)[1] for row in own)):
        console.print(line)
    return rows


def _table(rows: Sequence[Forecast]) -> Table:
    table = Table("ranks", "hosts", "strategy", title="What one rank holds, at most", title_justify="left")
    for name in rows[0].texts:
        table.add_column(name, justify="right")
    for row in rows:
        layout = row.layout
        hosts = -(-layout.ranks // layout.per_host)
        any_number = ["any" if layout.ranks > 1 else "1", "", "ddp"]
        who = [f"{layout.ranks:,}", f"{hosts:,}", f"sharded, {layout.shard}"] if layout.shard else any_number
        table.add_row(*who, *row.texts.values())
    return table


def numbers(text: str, here: int) -> list[int]:
    """Returns the numbers of ranks in `--dry_run=8,64`; without any, that of the YAML."""
    given = [part for part in text.replace(" ", "").split(",") if part not in ("", "true", "True")]
    if not all(part.isdigit() and int(part) for part in given):
        raise UserError(f"--dry_run={text}: these are numbers of ranks. HINT: --dry_run=8,64,1024.")
    return sorted({int(part) for part in given}) or [here]
