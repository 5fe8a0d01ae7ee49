"""The life of a run, a line in its folder for each start and each stop: when, at which step, on how many ranks, and why.

A run that was killed has no line for its stop. The report is made of these lines (`watch/history.py`).
"""

import json
import logging
import os
import platform
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from project import __version__
from project.cluster import code
from project.cluster.place import image
from project.errors import NonFiniteError, UserError
from project.step.position import planned_steps
from project.typed import typed
from project.untrusted import open_to_append
from project.watch.history import FILE, lives_of

log = logging.getLogger(__name__)

_LONGEST = 500  # characters of a reason


class Life(Callback):
    """Writes down the starts and the stops of a fit."""

    def __init__(self) -> None:
        self._began = False
        self.wrote = False
        """Whether there is anything to read."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = True
        hosts = typed(trainer).host_names
        each = trainer.world_size // len(hosts)  # those that have not met are all on this one
        device = trainer.strategy.root_device
        self._write(
            trainer,
            "start",
            pid=os.getpid(),
            epoch=trainer.current_epoch,
            of=planned_steps(trainer),
            ranks=trainer.world_size,
            hosts={name: count * each for name, count in Counter(hosts).items()},
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            precision=str(trainer.precision),
            accumulation=trainer.accumulate_grad_batches,
            global_batch=typed(trainer).global_batch,
            versions={
                "project": __version__,
                "torch": torch.__version__,
                "lightning": version("lightning"),
                "python": platform.python_version(),
            },
            **self._made_of(trainer),
        )

    def _made_of(self, trainer: Trainer) -> dict[str, str | None]:
        """Returns the commit and the image, and warns where a resumed run has different ones."""
        if not trainer.is_global_zero:
            return {}
        now = {"commit": _commit(), "image": None if image() == "none" else image()}
        before = lives_of(Path(trainer.default_root_dir) / FILE)
        for name, value in now.items():
            # A run of a version that did not write it down has no such entry.
            if before and name in before[-1].known and (last := before[-1].known[name]) != value:
                log.warning("The run goes on with another %s: %s -> %s", name, last or "none", value or "none")
        return now

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer, "finished", None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        name = _signal(exception)
        cause = exception.__cause__ if isinstance(exception, SystemExit) and exception.__cause__ else exception
        lines = str(cause).strip().splitlines() or [""]
        kind = "" if isinstance(cause, (UserError, NonFiniteError)) else f"{type(cause).__name__}: "
        error = f"{kind}{lines[0]}"[:_LONGEST]
        self._stop(trainer, "stopped" if name else "failed", name or error)

    def _stop(self, trainer: Trainer, state: str, why: str | None) -> None:
        if self._began:  # what fails before is not a start yet
            self._write(trainer, "stop", state=state, why=why)
        self._began = False

    def note(self, trainer: Trainer, event: str, why: str) -> None:
        """Writes down an event between start and stop; `watch/notifier.py` reads it."""
        if self._began:
            self._write(trainer, event, pid=os.getpid(), why=why[:_LONGEST])

    def _write(self, trainer: Trainer, event: str, **known: object) -> None:
        if not trainer.is_global_zero or typed(trainer).fast_dev_run:  # nothing is to be left of it
            return
        line = json.dumps({"event": event, "time": round(time.time(), 3), "step": trainer.global_step, **known})
        try:
            folder = Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            with open_to_append(folder / FILE) as file:
                file.write(line + "\n")
            self.wrote = True
        except OSError as error:
            log.warning("That the run has come to its %s can't be written down: %s. Training goes on.", event, error)


def record(trainer: Trainer, event: str, why: str) -> None:
    """Records something that happens in the middle of a life, where the run keeps such a file."""
    for callback in typed(trainer).callbacks:
        if isinstance(callback, Life):
            callback.note(trainer, event, why)


def _signal(exception: BaseException) -> str | None:
    """Returns the name of the signal that an end follows from."""
    if isinstance(exception, KeyboardInterrupt):
        return "SIGINT"
    known = {128 + number: number.name for number in signal.Signals}
    return known.get(exception.code) if isinstance(exception, SystemExit) and isinstance(exception.code, int) else None


def _commit() -> str | None:
    """Returns the commit of the working directory, with a plus sign if something is changed; else of the project's own code."""
    git, known = ("git", "describe", "--always", "--dirty=+", "--exclude=*"), ""
    with suppress(OSError, subprocess.TimeoutExpired):  # in most images there is no git
        known = subprocess.run(git, capture_output=True, text=True, timeout=5).stdout.strip()
    return None if (commit := known or code.commit()) == "none" else commit
