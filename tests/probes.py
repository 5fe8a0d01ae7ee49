"""Callbacks and datasets that tests plug in by class_path, to look inside a run that goes on in other processes."""

import atexit
import io
import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, Timer
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import Optimizer
from torch.utils.data import Dataset

from project.cluster.connection import disconnect
from project.cluster.oom import OomKills
from project.step.state import micro_batch
from project.survive import failure, preemption
from tests.cluster.machine import wait_until


def _samples(trainer: Trainer, batch: Any) -> list[int]:
    """What came; of data that doesn't say it, what should have come."""
    return batch["sample"].tolist() if "sample" in batch else micro_batch(trainer).samples or []


class Record(Callback):
    """Writes what a rank saw to record-RANK.json in the working directory."""

    def __init__(self) -> None:
        self.steps: dict[int, list[int]] = {}
        self.weights: list[float] = []
        self.evaluated: Counter[int] = Counter()
        self.reductions: list[int] = []
        self._reduced = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wrapped = trainer.strategy.model
        if hasattr(wrapped, "register_comm_hook"):
            wrapped.register_comm_hook(None, self._reduce)

    def _reduce(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._reduced += 1
        return allreduce_hook(None, bucket)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.steps.setdefault(trainer.global_step, []).extend(_samples(trainer, batch))
        self.weights.append(micro_batch(trainer).weight)

    def on_train_batch_end(self, *args: Any) -> None:
        self.reductions.append(self._reduced)
        self._reduced = 0

    def on_validation_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        if not trainer.sanity_checking and "sample" in batch:
            self.evaluated.update(batch["sample"].tolist())

    def on_test_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        self.evaluated.update(batch["sample"].tolist())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        seen = {
            "steps": self.steps,
            "weights": self.weights,
            "evaluated": self.evaluated,
            "reductions": self.reductions,
        }
        Path(f"record-{trainer.global_rank}.json").write_text(json.dumps(seen))


class Threads(Callback):
    """Writes the names of the threads that are there when Python ends to threads-PID.txt in the working directory."""

    def __init__(self) -> None:
        atexit.register(self._write)
        preemption._MOST = 1  # the last step, too, begins a comparison that no step reads

    def _write(self) -> None:
        # The kernel lists a thread for a moment longer than it takes to join it, and on a busy machine that is a long moment.
        deadline = time.monotonic() + 5
        while "gloo" in (names := self._names()) and time.monotonic() < deadline:
            time.sleep(0.01)
        Path(f"threads-{os.getpid()}.txt").write_text(names)

    @staticmethod
    def _names() -> str:
        names = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended meanwhile
                names.append((task / "comm").read_text())
        return "".join(names)


class SlowToEnd(Callback):
    """Rank 0 ends when the thread in which Lightning looks at the launched ranks has looked at them once more."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for thread in threading.enumerate():
            if thread.name == "child-process-observer":
                atexit.register(thread.join)


class Faulty(Dataset[Any]):
    """Random images; on the rank `on`, reading sample `at` raises an error ('raise'), kills the process ('kill') or ends it
    ('exit'), never ends ('wait'), or needs more memory than its cgroup allows ('hog').
    """

    def __init__(self, size: int = 256, on: int = -1, at: int = 100, how: str = "raise") -> None:
        self.size, self.on, self.at, self.how = size, on, at, how

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        rank = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)
        if self.on in (rank, 99) and index >= self.at:
            Path("struck").touch()
            if self.how == "kill":
                os.kill(os.getpid(), 9)
            if self.how == "exit":
                os._exit(3)
            if self.how == "wait":
                time.sleep(1e6)
            if self.how == "hog":
                hog = [bytearray(1 << 24) for _ in range(64)]
                del hog
            raise KeyError("this dataset is broken")
        return torch.full((3, 8, 8), index % 256, dtype=torch.uint8), index % 10


class Cramped(Callback):
    """Puts its rank into a memory cgroup of its own, before it does anything; the link 'cgroup' leads to it."""

    def __init__(self, rank: int, limit: int = 512 << 20) -> None:
        if rank != int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0):
            return
        root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        if not root.is_dir():
            root, name = root.parent, "memory.max"
        group = root / f"cramped-test-{os.getpid()}"
        group.mkdir()
        (group / name).write_text(str(limit))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        failure._OOM_KILLS = OomKills()  # a process is in its cgroup before it is this project's
        Path("cgroup").symlink_to(group)


class ClosesNever(Callback):
    """Connections that are never closed, as NCCL's where a rank has crashed; they would be closed at the end of Python, too."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        dist.destroy_process_group = threading.Event().wait
        atexit.register(disconnect)


class Deaf(Callback):
    """At a step, all ranks but one wait in a call that notices nothing, as for a device; the one raises an error ('raise'),
    or a thread of it aborts ('abort'), as that of NCCL does after an error of its own.
    """

    def __init__(self, rank: int = 1, step: int = 3, how: str = "raise") -> None:
        self.rank, self.step, self.how = rank, step, how

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.step:
            return
        if trainer.global_rank == self.rank:
            time.sleep(1)  # the others have come to their call meanwhile
            Path("struck").touch()
            if self.how == "raise":
                raise KeyError("this device is broken")
            threading.Thread(target=os.abort).start()
        os.read(os.pipe()[0], 1)


class Fault(Callback):
    """Signals its own process, once in the life of a run: Fault(rank=1, step=7, where="validation", number=9).

    `where`: in the second micro-batch of the step ('accumulation'), before it ('step'), in the validation that follows it
    ('validation'), while a checkpoint of it is being written ('write'), or in a later step, when that is there ('saved').
    """

    def __init__(self, rank: int = 0, step: int = 7, where: str = "step", number: int = 9) -> None:
        self.rank, self.step, self.where, self.number = rank, step, where, number

    @property
    def mark(self) -> Path:
        return Path(f"struck-{self.rank}-{self.step}-{self.where}-{self.number}")

    def _strike(self, trainer: Trainer, where: str) -> None:
        if (where, trainer.global_rank, trainer.global_step) == (self.where, self.rank, self.step):
            self._signal()

    def _signal(self) -> None:
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches:
            self._strike(trainer, "accumulation")

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before the run looks whether it is to stop or to save."""
        self._strike(trainer, "step")
        if (
            (self.where, trainer.global_rank) == ("saved", self.rank)
            and trainer.global_step > self.step
            and not self.mark.exists()
        ):
            saved = f"lightning_logs/*/checkpoints/step-{self.step:09}.ckpt"  # only rank 0 knows the run's folder
            wait_until(lambda: [*Path().glob(saved)], 60, "saved")
            self._signal()

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._strike(trainer, "validation")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.where == "write":
            save, fault = torch.save, self

            def struck(value: Any, file: Any) -> None:
                if not isinstance(file, io.BytesIO) and trainer.global_step >= fault.step and not fault.mark.exists():
                    file.write(b"half a checkpoint")
                    file.flush()
                    fault._signal()
                save(value, file)

            torch.save = struck


class UnfreezesWithin(Callback):
    """A part of the network learns from the third step of each epoch on, and not before."""

    def __init__(self, part: str = "head") -> None:
        self.part = part

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        pl_module.get_submodule(self.part).requires_grad_(batch_idx // trainer.accumulate_grad_batches >= 2)


class Dropped(torch.nn.Module):
    """A network with all that could depend on history: batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Dropout(0.3),
            torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(32, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class Slow(torch.nn.Module):
    """A network that takes its time."""

    def __init__(self, seconds: float = 0.2) -> None:
        super().__init__()
        self.seconds, self.layer = seconds, torch.nn.LazyLinear(10)
        self.layer(torch.zeros(1, 3 * 8 * 8))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layer(images.flatten(1))


class Ledger(Callback):
    """Appends what every micro-batch held to ledger-RANK.jsonl, with the process that trained on it; `pause` slows it down,
    from the step `crawl_from` on more with each step, until there is a file 'hurry'. Both lie in `folder`.
    """

    def __init__(self, pause: float = 0.0, rank: int | None = None, folder: str = ".", crawl_from: int | None = None) -> None:
        self.pause, self.rank, self.folder, self.crawl_from = pause, rank, Path(folder), crawl_from

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        line = {
            "pid": os.getpid(),
            "step": trainer.global_step,
            "key": micro_batch(trainer).key,
            "samples": _samples(trainer, batch),
        }
        with (self.folder / f"ledger-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.rank in (None, trainer.global_rank):
            crawled = -1 if self.crawl_from is None else trainer.global_step - self.crawl_from
            until = time.monotonic() + max(self.pause, 0.25 + crawled / 10 if crawled >= 0 else 0.0)
            while (left := until - time.monotonic()) > 0 and not (self.folder / "hurry").exists():
                time.sleep(min(left, 0.1))


class SlowDisk(Callback):
    """Every checkpoint takes so many seconds to write, until there is a file 'hurry'."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        save = torch.save

        def slow(*args: Any, **settings: Any) -> None:
            if not isinstance(args[1], io.BytesIO) and not Path("hurry").exists():
                time.sleep(self.seconds)
            save(*args, **settings)

        torch.save = slow


class Filler(Callback):
    """Fills the disk of the run at its fifth step."""

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 5 and trainer.is_global_zero:  # who alone knows the run's folder
            with suppress(OSError), (Path(trainer.default_root_dir).parents[1] / "filler").open("ab", buffering=0) as file:
                while True:
                    file.write(b"x" * 1024)


class Remover(Callback):
    """Removes the folder of the checkpoints in the middle of the run."""

    def on_step_begins(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 10:
            shutil.rmtree(Path(trainer.default_root_dir) / "checkpoints", ignore_errors=True)


class Stuck(Callback):
    """One rank goes no further at a step: Stuck(rank=1, step=3, where="step").

    `where`: before the forward pass ('step'), in a collective that the others know nothing of ('collective'), within the
    backward pass ('backward'), or in validation ('validation'). `signal`: it sends itself this one (SIGSTOP, say) instead of
    waiting.
    """

    def __init__(self, rank: int = 1, step: int = 3, where: str = "step", signal: int = 0) -> None:
        self.rank, self.step, self.where, self.signal = rank, step, where, signal

    def _strike(self, trainer: Trainer, where: str) -> None:
        if (where, trainer.global_rank, trainer.global_step) == (self.where, self.rank, self.step):
            self.sit_and_wait()

    def sit_and_wait(self) -> None:
        Path("struck").touch()
        if self.where == "collective":
            torch.distributed.barrier()
        elif self.signal:
            os.kill(os.getpid(), self.signal)
        else:
            time.sleep(1e6)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._strike(trainer, "step")
            self._strike(trainer, "collective")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        loss.register_hook(lambda gradient: self._strike(trainer, "backward"))

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self._strike(trainer, "validation")


class LearningOnly(torch.optim.SGD):
    """An optimiser of what learns at the start: what is unfrozen later comes to it as a group of its own."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__([parameter for parameter in params if parameter.requires_grad], lr, momentum=0.9)


class Backbone(BackboneFinetuning):
    """Lightning's BackboneFinetuning, for the first layers of `Dropped`."""

    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, lambda_func=lambda epoch: 1.5)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        object.__setattr__(pl_module, "backbone", pl_module.network.layers[:2])  # known, and not registered a second time
        super().setup(trainer, pl_module, stage)


class Logs(Callback):
    """Logs by Lightning's way, and one value of the start of each epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("it/epoch", float(trainer.current_epoch))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        pl_module.log("it/loss", outputs["loss"])
        if trainer.is_global_zero:
            pl_module.log("it/first", outputs["loss"], on_step=False, on_epoch=True, rank_zero_only=True)
        if trainer.global_rank == trainer.world_size - 1 or trainer.global_step % 4 > 1:  # the last rank alone, at first
            pl_module.log("it/last", outputs["loss"], on_step=False, on_epoch=True, sync_dist=True)


class Watcher(Callback):
    """Looks at batch norm's buffers in every hook, after every other callback: are they the running statistics?"""

    def __init__(self) -> None:
        self.seen: dict[str, list[list[float]]] = {}

    def _look(self, hook: str, module: LightningModule) -> None:
        norm = next(layer for layer in module.modules() if isinstance(layer, torch.nn.BatchNorm2d))
        self.seen.setdefault(hook, []).append(norm.running_var.tolist())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        Path(f"watcher-{trainer.global_rank}.json").write_text(json.dumps(self.seen))


def _watch(hook: str) -> Any:
    return lambda self, trainer, pl_module, *args: self._look(hook, pl_module)


for _hook in ("train_batch_start", "before_zero_grad", "before_backward", "after_backward", "before_optimizer_step"):
    setattr(Watcher, f"on_{_hook}", _watch(f"on_{_hook}"))
Watcher.on_train_batch_end = _watch("on_train_batch_end")  # type: ignore[method-assign]


class Moody(torch.nn.Module):
    """A network with state of all kinds: a mean and a dict of its own, a queue that grows, batch norm's cumulative mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8, momentum=None), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(32, 10),
        )  # fmt: skip
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("queue", torch.zeros(0))
        self.forwards = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"forwards": self.forwards}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.forwards = state["forwards"]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
            with torch.no_grad():
                self.mean.lerp_(images.mean((0, 2, 3)), 0.1)
                self.queue = torch.cat([self.queue, images.mean().view(1)])
        return self.layers(images - self.mean[:, None, None])


class States(Callback):
    """Keeps what it has seen: as numpy's values, and another on each rank."""

    def __init__(self) -> None:
        self.seen = np.zeros(3)
        self.rank: int | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.seen = self.seen * 0.9 + float(outputs["loss"])
        assert self.rank in (None, trainer.global_rank)
        self.rank = trainer.global_rank

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "largest": self.seen.max(), "rank": self.rank}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen, self.rank = state_dict["seen"], state_dict["rank"]


class Unreadable(Callback):
    """Its state can be written, and not be read again: from the first moment on, or after some steps."""

    def __init__(self, after: int = 0) -> None:
        self.after, self.steps = after, 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.steps = trainer.global_step

    def state_dict(self) -> dict[str, Any]:
        return {"when": datetime.now()} if self.steps >= self.after else {"when": 0}


class GrowsLater(torch.nn.Module):
    """Makes a parameter in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3 * 8 * 8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.scale = torch.nn.Parameter(torch.ones(()))
        return self.head(images.flatten(1)) * self.scale


class TimeIsUp(Callback):
    """trainer.max_time is used up in this step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            for timer in (callback for callback in trainer.callbacks if isinstance(callback, Timer)):
                timer.load_state_dict({"time_elapsed": {"train": 1e9, "sanity_check": 0.0, "validate": 0.0, "test": 0.0}})


class Born(Callback):
    """Notes when this process began, and when this was made, in ticks of the machine's clock."""

    def __init__(self) -> None:
        rank = os.environ.get("LOCAL_RANK", "0")
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        now = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
        Path(f"born-{rank}.json").write_text(json.dumps({"began": began, "made": now}))


class EndsAlone(Callback):
    """Rank 1 ends with an error that nobody hears of, and rank 0 waits for ever."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.global_rank == 1:
            os._exit(3)
        signal.pause()


class KilledEarly(Callback):
    """Rank 2 is killed before the ranks are connected."""

    def __init__(self) -> None:
        if os.environ["LOCAL_RANK"] == "2":
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Graphs(Callback):
    """Prints which micro-batches of a step are graphs at the end. `kill`: once, after this step."""

    def __init__(self, kill: int = -1) -> None:
        self.kill = kill

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.kill and not Path("struck").exists():
            Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        graphs = trainer.step_state.runner
        print(f"rank {trainer.global_rank} has graphs: {', '.join(sorted(graphs._graphs))}", flush=True)


class ByScore(Callback):
    """Makes each step smaller by the best score so far: what a checkpoint callback tells has to be the same on each rank."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        checkpoints = trainer.checkpoint_callback
        scores = checkpoints.best_model_score, checkpoints.current_score  # type: ignore[union-attr]
        for parameter in pl_module.parameters():
            if parameter.grad is not None and None not in scores:
                parameter.grad /= 1 + scores[0] + scores[1] / 7
