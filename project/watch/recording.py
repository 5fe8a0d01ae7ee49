"""The recording of some steps by torch's profiler, and the names of the parts of a step in it."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from project.step.allocator import start_recording
from project.step.epoch_loop import remove_callback
from project.typed import callbacks_of
from project.untrusted import make_folder, replacing, write_text
from project.watch.recorded import RANGE, lines, write_held
from project.watch.throughput import Throughput

log = logging.getLogger(__name__)


def _part_hook(name: str) -> Callable[..., None]:
    """Returns a hook with which a part of the step begins."""

    def hook(self: "StepRanges", *args: object, **kwargs: object) -> None:
        self._next(name)

    return hook


class StepRanges(Callback):
    """Names the parts of each step, for torch's profiler or (`nvtx`) for Nsight Systems."""

    def __init__(self, nvtx: bool = False) -> None:
        self._nvtx = nvtx
        self._part = ExitStack()
        self._names_parts = nvtx

    def _name_no_more(self) -> None:
        self._part.close()
        self._names_parts = False

    def _next(self, name: str) -> None:
        """Begins a part, and ends the one before it."""
        self._part.close()
        if self._names_parts:
            self._part.enter_context(torch.cuda.nvtx.range(name) if self._nvtx else record_function(RANGE + name))

    on_fetch_begins = _part_hook("data wait")
    on_train_batch_start = _part_hook("forward")
    on_before_backward = _part_hook("backward")
    on_before_optimizer_step = _part_hook("optimizer")
    on_fetch_ends = on_after_backward = on_train_batch_end = _part_hook("rest")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        remove_callback(trainer, self)  # another fit brings its own
        self._name_no_more()


class Recording(StepRanges):
    """Records steps from the `first` on, which the step before it warms up for, with their `memory`, into a folder.

    It is a callback of all ranks until the recording is over; ranks that are not recorded wait for the ones that are.
    """

    def __init__(self, first: int, steps: int, ranks: Sequence[int], memory: bool, folder: Path) -> None:
        super().__init__()
        self.first, self.steps, self.ranks, self._memory, self._folder = first, steps, ranks, memory, folder
        self.over = False
        """Whether it is done, or can't be any more."""
        self._profile: profile | None = None
        self._why_not: str | None = None
        self._began = False
        self._step = 0  # the last one that is over

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if not self._began and trainer.global_step + 1 >= self.first - 1 and not batch_idx % trainer.accumulate_grad_batches:
            self._begin(trainer)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def _begin(self, trainer: Trainer) -> None:
        self._began, self._step = True, trainer.global_step
        _leave_out(trainer)
        self.first = self._step + 2
        if trainer.global_rank not in self.ranks:
            return
        on_gpu = trainer.strategy.root_device.type == "cuda"
        try:
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu],
                schedule=schedule(wait=0, warmup=1, active=self.steps),
                profile_memory=self._memory,
            )
            self._profile.start()
            self._names_parts = True
        except Exception as error:  # a device whose counters are not for everybody, say
            if self._why_not is None:
                log.warning("The steps can't be recorded: %s. Training continues.", error)
            self._profile, self._why_not = None, f"The steps can't be recorded: {error}. Training continues."

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not self._began or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        _leave_out(trainer)
        if self._step >= self.first + self.steps - 1:
            self._finish(trainer, pl_module)
        elif self._profile is not None:
            self._part.close()
            self._profile.step()
            if self._memory and self._step == self.first - 1 and trainer.strategy.root_device.type == "cuda":
                start_recording()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the recording, or begins it anew later: an evaluation is no part of a step, and its trace would be large."""
        if not self._began or trainer.sanity_checking:
            return
        if self._step >= self.first:
            self._finish(trainer, pl_module)
        else:  # nothing is recorded yet: it begins again afterwards
            self._stop()
            self._began = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.over and self._step < self.first and trainer.is_global_zero:
            log.warning("Step %d was to be recorded, and the run has ended after step %d.", self.first, trainer.global_step)
        self._finish(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with suppress(torch.AcceleratorError):
            self._close(trainer)

    def _close(self, trainer: Trainer) -> profile | None:
        """Removes the callback, and stops the profiler."""
        self.over = True
        remove_callback(trainer, self)
        return self._stop()

    def _stop(self) -> profile | None:
        self._name_no_more()
        recorded, self._profile = self._profile, None
        if recorded is not None:
            recorded.stop()
        return recorded

    def _finish(self, trainer: Trainer, module: LightningModule) -> None:
        recorded, done = self._close(trainer), self._step - self.first + 1
        if not self._began or done < 1:
            return
        stem, summary = self._folder / f"step-{self.first:09d}", []
        if recorded is not None or self._why_not:
            try:
                summary = self._write(recorded, done, trainer, stem.with_name(f"{stem.name}-rank{trainer.global_rank}"))
                if self._memory:
                    write_held(trainer, module, stem.with_name(f"{stem.name}-memory-rank{trainer.global_rank}"))
            except OSError as error:
                log.warning("The profile can't be written: %s. Training continues.", error)
                return
        if trainer.is_global_zero:
            for line in summary:
                log.info("%s", line)
            if done < self.steps:
                log.warning("An evaluation, or the end, came after %d of the %d steps to record.", done, self.steps)
            which = "rank" if len(self.ranks) == 1 else "ranks"
            log.info(
                "Profile of steps %d to %d of %s %s: %s-*; the traces open in https://ui.perfetto.dev",
                *(self.first, self._step, which, ", ".join(map(str, self.ranks)), stem),
            )

    def _write(self, recorded: profile | None, steps: int, trainer: Trainer, stem: Path) -> list[str]:
        """Writes the trace, and last the text with its summary: whoever finds it finds the rest."""
        make_folder(self._folder)
        summary = [f"Rank {trainer.global_rank}, steps {self.first} to {self._step}"]
        if recorded is None:
            summary.append(self._why_not or "")
        else:
            with replacing(stem.with_name(f"{stem.name}.json.gz")) as trace:  # which would be written through a link
                recorded.export_chrome_trace(str(trace))
            summary += lines(recorded.events() or (), steps, trainer.strategy.root_device.type == "cuda")
        write_text(stem.with_name(f"{stem.name}.txt"), "\n".join([*summary, ""]))
        return summary


def _leave_out(trainer: Trainer) -> None:
    """Leaves a step out of the throughput: recorded steps are slower, and so is the one in which a trace is waited for."""
    for throughput in callbacks_of(trainer, Throughput):
        throughput.leave_out()
