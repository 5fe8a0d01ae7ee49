"""Each step leaves a fingerprint: checksums of the weights and the bits of the losses. `python -m project same` compares runs.

They are taken on the device, where nobody waits for them, and go to fingerprints.jsonl at log points and with each checkpoint,
when all ranks bring theirs together. There it shows, too, whether all ranks have the same weights: where they part (code moves
weights outside the optimiser, say), the run stops, unless `trainer.ranks_differ` is 'warn'. Once in a while the outputs of the
network's modules in a forward pass are recorded, too: they name the first in which two runs differ.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from project.cluster.environment import hardware, named, odd_ones
from project.cluster.place import host
from project.errors import FaultError, listed
from project.sharded.strategy import is_sharded, replicates_weights
from project.step.batch_norm_layers import batch_norms, compiled_modules
from project.step.ddp import all_gather_objects, ignored_by_ddp
from project.step.state import micro_batch, step_state
from project.step.structure import tensor_holders
from project.typed import StateDict, typed
from project.untrusted import cut_off_half_a_line, open_to_append
from project.watch.checksums import Checksums, as_bytes, plain, together
from project.watch.fingerprint_file import FILE, MODULE_BYTES, Start, Step

log = logging.getLogger(__name__)

_LEAST, _MOST = 10, 100  # steps from one gathering to the next
_SELDOM = 100  # steps
_CALLS = 2000  # of modules: a network that loops over its layers has many

WhenRanksDiffer = Literal["stop", "warn"]


class _Watched:
    """The tensors of a module that a step may change, by name; `shared`: those that all ranks have alike."""

    def __init__(self, module: nn.Module) -> None:
        norms = {f"{name}.{buffer}" for name, norm in batch_norms(module) for buffer, _ in norm.named_buffers(recurse=False)}
        parameters = [name for name, parameter in module.named_parameters() if plain(parameter)]
        buffers = [
            name
            for name, buffer in module.named_buffers()
            if plain(buffer) and (buffer.is_floating_point() or buffer.is_complex())
        ]
        self.names = (*parameters, *buffers)
        alike = ({*parameters} - ignored_by_ddp(module)) | norms
        self.shared = [at for at, name in enumerate(self.names) if name in alike]
        self._holders = tensor_holders(module, self.names)
        self.places = [(id(holder), name) for holder, name in self._holders]
        self._checksums: Checksums | None = None
        self._compute: Callable[[], Tensor]

    def checksums(self, trainer: Trainer) -> Tensor:
        tensors: Any = [holder[name] for holder, name in self._holders]  # some are exchanged for others
        if self._checksums is None or not self._checksums.fit(tensors):
            self._checksums = Checksums(tensors)
            self._compute = step_state(trainer).runner.repeated(self._checksums)
        return self._compute()


@dataclass
class _Row:
    """A step, or (`begins`) the moment before the first one of a start. What is on the device stays there."""

    step: int
    epoch: int
    watched: _Watched
    checksums: Tensor
    losses: Sequence[tuple[int, Tensor]]
    modules: Sequence[tuple[str, Tensor]]
    begins: bool


Record = tuple[str, list[tuple[str, dict[int, bytes]]], bytes]
"""The record of a rank: its host; for each row the checksum of what all ranks have alike, and the losses of its micro-batches;
of the last row a byte for each tensor."""


class Fingerprints(Callback):
    """Records each step of a fit.

    Args:
        exact: whether the run is the same on any number of ranks (`trainer.exact`).
        ranks_differ: whether the run stops where the ranks' weights part, or continues with a warning.
    """

    def __init__(self, exact: bool = False, ranks_differ: WhenRanksDiffer = "stop") -> None:
        self.exact, self.ranks_differ = exact, ranks_differ
        self.outputs_every = _SELDOM
        """The steps from one recording of the modules' outputs to the next."""
        self._forget()

    def _forget(self) -> None:
        self._rows: list[_Row] = []
        self._losses: list[tuple[int, Tensor]] = []
        self._step: int | None = None  # of the last row
        self._watched: _Watched | None = None
        self._header: tuple[str, ...] | None = None  # the names that the file has
        self._outputs: ModuleOutputs | None = None  # of the step at hand
        self._modules_due = True
        self._warned = self._failing = self._whole = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        sharded = not isinstance(trainer.strategy, (DDPStrategy, SingleDeviceStrategy)) or is_sharded(trainer)
        if sharded or typed(trainer).fast_dev_run:  # nothing is to be left of it
            typed(trainer).callbacks = [callback for callback in typed(trainer).callbacks if callback is not self]
        if sharded:
            log.info("trainer.fingerprints is for strategy=ddp: with this one steps are not recorded.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        self._every = min(max(typed(trainer).log_every_n_steps, _LEAST), _MOST)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look_again(pl_module)

    def _look_again(self, module: nn.Module) -> None:
        """Finds the tensors again: a network may be changed during training."""
        watched = _Watched(module)
        if self._watched is None or watched.places != self._watched.places:
            self._watched = watched

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if self._step is None:  # now, and not before: the start of the epoch may have changed the weights
            self._take(trainer, pl_module, trainer.global_step, begins=True)
        if self._modules_due and micro_batch(trainer).key[2] == 0:
            self._modules_due = False
            self._outputs = ModuleOutputs(pl_module)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._end_listening()  # a module that is computed once more in the backward pass is not heard twice

    def _end_listening(self) -> None:
        if self._outputs is not None:
            self._outputs.end()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._end_listening()
        if (loss := step_state(trainer).loss) is not None and loss.numel() == 1:
            self._losses.append((micro_batch(trainer).key[2], loss.reshape(1).clone().view(torch.uint8)))
        step, before = trainer.global_step, self._step
        if before is None or step == before:
            return  # the step goes on; or the loader gave None for the run's first micro-batch
        self._take(trainer, pl_module, step)
        # Where a module steps several optimisers, its steps are counted in twos, say.
        if step // self._every != before // self._every:
            self._write_all(trainer)
        if step // self.outputs_every != before // self.outputs_every:
            self._look_again(pl_module)
            self._modules_due = True

    def _take(self, trainer: Trainer, module: LightningModule, step: int, begins: bool = False) -> None:
        self._step = step
        if self._watched is None:
            self._look_again(module)
        assert self._watched is not None
        try:
            checksums = self._watched.checksums(trainer)
        except (KeyError, TypeError):  # one of the tensors is there no more, or None
            self._watched = _Watched(module)
            checksums = self._watched.checksums(trainer)
        modules = self._outputs.calls if self._outputs is not None else ()
        self._rows.append(_Row(step, trainer.current_epoch, self._watched, checksums, self._losses, modules, begins))
        self._losses, self._outputs = [], None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: StateDict) -> None:
        """Writes all rows, as all ranks are here: a run that resumes from this checkpoint has all before it on record."""
        self._write_all(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_all(trainer)
        self._forget()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes what rank 0 knows: its peers may be elsewhere, and a GPU may never come to an end."""
        self._end_listening()
        if pl_module.device.type == "cpu" or trainer.world_size == 1:
            with suppress(RuntimeError):  # a device that has failed
                self._write_all(trainer, alone=True)
        self._forget()

    def _write_all(self, trainer: Trainer, alone: bool = False) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        for row in rows:
            row.checksums = row.checksums.cpu()  # the host waits for the device here
        alike = [_hex(together(row.checksums[row.watched.shared])) for row in rows]
        losses = [{number: loss.cpu().numpy().tobytes() for number, loss in row.losses} for row in rows]
        record: Record = host(), list(zip(alike, losses, strict=True)), as_bytes(rows[-1].checksums, 1)
        of_all: list[Record] = [record] if alone else all_gather_objects(record, trainer.world_size)
        if trainer.is_global_zero:
            self._append(trainer, "".join(self._lines(trainer, rows, of_all)))
        if replicates_weights(trainer):
            self._compare_ranks(trainer, rows, of_all)

    def _lines(self, trainer: Trainer, rows: list[_Row], of_all: list[Record]) -> Iterator[str]:
        """Yields rank 0's lines, with the losses of all ranks."""
        micro_batches = int(trainer.accumulate_grad_batches * trainer.world_size)
        for at, row in enumerate(rows):
            weights, tensors = _hex(together(row.checksums)), as_bytes(row.checksums, 1)
            if row.begins or row.watched.names != self._header:
                known = row.begins  # otherwise the network has been changed in a step, and before it there was another
                yield Start(
                    row.step if known else row.step - 1, trainer.world_size, micro_batches, self.exact, str(torch.__version__),
                    hardware(trainer.strategy.root_device), torch.get_num_threads(), row.watched.names,
                    weights if known else None, tensors if known else b"",
                ).line()  # fmt: skip
                self._header = row.watched.names
            if row.begins:
                continue
            of_ranks = {number: bits for _, rows_of, _ in of_all for number, bits in rows_of[at][1].items()}
            shared = {str(rank): rows_of[at][0] for rank, (_, rows_of, _) in enumerate(of_all) if replicates_weights(trainer)}
            yield Step(
                row.step, row.epoch, trainer.world_size, weights, tensors, of_ranks,
                [(name, as_bytes(output.view(1), MODULE_BYTES)) for name, output in row.modules],
                {rank: checksum for rank, checksum in shared.items() if checksum != of_all[0][1][at][0]},
            ).line(micro_batches)  # fmt: skip

    def _compare_ranks(self, trainer: Trainer, rows: Sequence[_Row], of_all: Sequence[Record]) -> None:
        """Reports once where the ranks' weights part, by what most ranks have. All ranks know, and so all of them stop."""
        numbers = [[rows_of[at][0] for _, rows_of, _ in of_all] for at in range(len(rows))]
        parted = next((at for at, checksums in enumerate(numbers) if len(set(checksums)) > 1), None)
        if parted is None or self._warned:
            return
        self._warned = True
        _, odd = odd_ones([{"weights": number} for number in numbers[parted]], "weights")
        who = named(sorted(odd), [host for host, *_ in of_all])
        tensors = zip(*(tensor_bytes for *_, tensor_bytes in of_all), strict=False)
        differ = [name for name, bits in zip(rows[-1].watched.names, tensors, strict=False) if len(set(bits)) > 1]
        which = f" Not the same: {listed(differ)}." if differ else ""
        text = (
            f"After step {rows[parted].step}, {who} has other weights than the other ranks have, and all should have the same."
            f"{which} Likeliest, something moves weights outside the optimiser by what its rank alone has seen: a codebook or "
            "a teacher that is moved in the forward pass, a hook, a layer unfrozen on some ranks only, statistics of its own."
        )
        hint = (
            "move them by what all ranks have (after the gradients have met, in on_before_optimizer_step, say). Where nothing "
            "does so, the memory of that host may be bad: go on without it, from a checkpoint of before (--resume PATH)."
        )
        if self.ranks_differ == "stop":
            raise FaultError(f"{text} Stopped: trainer.ranks_differ. HINT: {hint}")
        if trainer.is_global_zero:
            log.warning("%s HINT: %s", text, hint)

    def _append(self, trainer: Trainer, text: str) -> None:
        path = Path(trainer.default_root_dir) / FILE
        try:
            if not self._whole:
                path.parent.mkdir(parents=True, exist_ok=True)
                cut_off_half_a_line(path)
            with open_to_append(path) as file:
                file.write(text)
            self._whole, self._failing = True, False
        except OSError as error:
            if not self._failing:
                log.warning("Fingerprints of the steps can't be written: %s. Training continues.", error)
            self._whole, self._failing = False, True
            self._header = None  # what follows has no step before it


# What the modules give ------------------------------------------------------------------------------------------------


def tensors_in(output: object) -> Iterator[Tensor]:
    """Yields the tensors in whatever a module returns, in their order."""
    if isinstance(output, Tensor) and plain(output):
        yield output
    if is_dataclass(output) and not isinstance(output, (type, Mapping)):
        output = {field.name: getattr(output, field.name, None) for field in fields(output)}
    if isinstance(output, (Mapping, list, tuple)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_in(value)


class ModuleOutputs:
    """Listens to a module's submodules from when it is made until `end`.

    Nothing is recorded of what torch.compile has translated, which must not find hooks, nor of torch.jit's modules.
    """

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[tuple[str, Tensor]] = []
        translated = compiled_modules(module)
        if "training_step" in vars(module):  # torch.compile of the whole leaves another one there
            translated |= set(module.modules())
        self._hooks = [
            part.register_forward_hook(self._listener(f"{name} ({type(part).__name__})"))
            for name, part in module.named_modules()
            if part is not module and part not in translated and not isinstance(part, torch.jit.ScriptModule)
        ]

    def _listener(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def listen(part: nn.Module, args: object, output: object) -> None:
            if torch.compiler.is_compiling() or len(self.calls) >= _CALLS:
                return
            tensors: list[Tensor] = []
            with suppress(Exception):  # an object of the user's that can't be read, or a list that is in itself
                tensors += islice(tensors_in(output), _CALLS)
            if tensors and not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph's change each time
                # One by one: they may lie on several devices.
                each = [together(Checksums([tensor])()).to(tensors[0].device) for tensor in tensors]
                self.calls.append((name, together(torch.stack(each))))

        return listen

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _hex(number: Tensor) -> str:
    return f"{int(number) & (1 << 64) - 1:016x}"
