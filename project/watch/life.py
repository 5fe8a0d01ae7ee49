"""The life of a run, a line in its folder for each start and each stop: when, at which step, on how many ranks, and why.

A run that was killed has no line for its stop. The report is made of these lines (`watch/history.py`).
"""

import getpass
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from project import __version__
from project.cluster import code
from project.cluster.place import host, image, process_age
from project.errors import Cause
from project.masking import masked_command
from project.step.monitored import monitored_setting
from project.step.position import counts, epoch_size, planned_steps
from project.step.state import ends_step
from project.typed import typed
from project.untrusted import both_ends, open_to_append
from project.watch.history import FILE, lives_of

log = logging.getLogger(__name__)

_LONGEST_TRACEBACK = 4_000  # characters
_COMMAND = 4_000  # characters of a command line


class Life(Callback):
    """Writes down the starts and the stops of a fit.

    Args:
        cause_of: returns why an error ends it.
        changed: returns the names of the settings that are not the defaults.
    """

    def __init__(
        self, cause_of: Callable[[BaseException], Cause], changed: Callable[[], Sequence[str] | None] | None = None
    ) -> None:
        self._cause_of, self._changed = cause_of, changed
        self._began = False
        self._first_step: int | None = None
        self._failure: Cause | None = None
        self._set_up = 0.0
        """When this fit began, in a process of Python's, which may have done other things before."""
        self.wrote = False
        """Whether there is anything to read."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._set_up = time.time()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        self._begin(
            trainer,
            epoch=trainer.current_epoch,
            of=planned_steps(trainer),
            # The metric by which the run is judged, and whether its highest or its lowest value is the best.
            **dict(zip(("monitor", "mode"), monitored_setting(typed(trainer).callbacks) or (), strict=False)),
            accumulation=trainer.accumulate_grad_batches,
            global_batch=typed(trainer).global_batch,
            **epoch_size(trainer),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            **self._made_of(trainer),
        )

    def _begin(self, trainer: Trainer, **more: object) -> None:
        """Writes down a start. `more`: what is known only once the data is."""
        self._began = True
        self._first_step = trainer.global_step
        hosts = typed(trainer).host_names
        each = trainer.world_size // len(hosts)  # those that have not met are all on this one
        self._write(
            trainer,
            "start",
            pid=os.getpid(),
            began=round(self._set_up if self._changed is None else time.time() - process_age(os.getpid()), 3),
            user=_user(),
            command=masked_command(["python", *sys.orig_argv[1:]])[:_COMMAND],
            changed=self._changed() if trainer.is_global_zero and self._changed else None,
            ranks=trainer.world_size,
            hosts={name: count * each for name, count in Counter(hosts).items()},
            precision=str(trainer.precision),
            versions={
                "project": __version__,
                "torch": torch.__version__,
                "lightning": version("lightning"),
                "python": platform.python_version(),
            },
            **more,
        )

    def _made_of(self, trainer: Trainer) -> dict[str, str | None]:
        """Returns the commit and the image, and warns where a resumed run has different ones."""
        if not trainer.is_global_zero:
            return {}
        now = {"commit": commit_of_run(), "image": None if image() == "none" else image()}
        before = lives_of(Path(trainer.default_root_dir) / FILE)
        for name, value in now.items():
            # A run of a version that did not write it down has no such entry.
            if trainer.global_step and before and name in before[-1].known and (last := before[-1].known[name]) != value:
                log.warning("The run continues with another %s: %s -> %s", name, last or "none", value or "none")
        return now

    def has_trained(self, trainer: Trainer) -> bool:
        """Returns whether a step has been taken since the fit began."""
        return self._first_step is not None and trainer.global_step > self._first_step

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes down the end of the run, when its last checkpoint is on the disk."""
        self._stop(trainer, "finished")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        first = not self._began and not (Path(trainer.default_root_dir) / FILE).exists()
        if first and isinstance(exception, Exception) and self._cause_of(exception).traceback:
            self._begin(trainer)  # a new run that crashes before it trains; one that is refused has not begun
        if not self._began:
            return
        if name := _signal(exception):
            self._stop(trainer, "stopped", name)
        else:
            self._failure = self._cause(trainer, exception)
            self._stop(trainer, "failed", **_entries(self._failure), moment=_moment(trainer))

    def amend(self, trainer: Trainer, exception: BaseException) -> None:
        """Writes down a failure, or another cause of it, that has become known only after the fit had ended."""
        if self._first_step is not None and (cause := self._cause(trainer, exception)) != self._failure:
            self._failure = cause
            self._write(trainer, "stop", state="failed", **_entries(cause))

    def _cause(self, trainer: Trainer, exception: BaseException) -> Cause:
        """Returns why a fit ends: of several ranks the one whose own error it is has its name in it, as a peer's error has."""
        cause = self._cause_of(exception)
        own = cause.traceback or cause.text.startswith("Loader process")
        if trainer.world_size == 1 or not own or cause.text.startswith("rank "):
            return cause
        return replace(cause, text=f"rank {trainer.global_rank} on {host()} has failed: {cause.text}")

    def _stop(self, trainer: Trainer, state: str, why: str | None = None, **more: str) -> None:
        if self._began:
            self._write(trainer, "stop", state=state, why=why, **more)
        self._began = False

    def note(self, trainer: Trainer, event: str, why: str) -> None:
        """Writes down an event between start and stop; `watch/notifier.py` reads it."""
        if self._began:
            self._write(trainer, event, pid=os.getpid(), why=both_ends(why))

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
            log.warning("That the run has come to its %s can't be written down: %s. Training continues.", event, error)


def _moment(trainer: Trainer) -> str:
    """Returns where in a run an error was raised."""
    batches = counts(trainer.fit_loop.epoch_loop.batch_progress.current)
    if trainer.validating or batches.ready == batches.completed:
        return f"{'the validation ' if trainer.validating else ''}after step {trainer.global_step}"
    done = batches.processed > batches.completed and ends_step(trainer)  # in on_train_batch_end
    return f"in step {trainer.global_step + (not done)}"


def _entries(cause: Cause) -> dict[str, str]:
    """Returns the entries of a line that tell the cause of a failure."""
    entries = {
        "why": both_ends(cause.text),
        "where": both_ends(cause.where),
        "traceback": cause.traceback[-_LONGEST_TRACEBACK:],
        "kind": cause.kind,
    }
    return {name: text for name, text in entries.items() if text or name == "why"}


def _signal(exception: BaseException) -> str | None:
    """Returns the name of the signal that an end follows from."""
    if isinstance(exception, KeyboardInterrupt):
        return "SIGINT"
    known = {128 + number: number.name for number in signal.Signals}
    return known.get(exception.code) if isinstance(exception, SystemExit) and isinstance(exception.code, int) else None


def _user() -> str | None:
    with suppress(OSError, KeyError, ImportError):  # a container may have a number without a name
        return getpass.getuser()
    return None


@cache
def commit_of_run() -> str | None:
    """Returns the commit of the working directory, with a plus sign if something is changed; else of the project's own code."""
    git, known = ("git", "describe", "--always", "--dirty=+", "--exclude=*"), ""
    with suppress(OSError, subprocess.TimeoutExpired):  # in most images there is no git
        known = subprocess.run(git, capture_output=True, text=True, timeout=5).stdout.strip()
    return None if (commit := known or code.commit()) == "none" else commit
