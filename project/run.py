"""A run has a name and a folder of its own, lightning_logs/NAME; whoever names a run that exists goes on with it.

Only rank 0 decides here; the others are told.
"""

import fcntl
import logging
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from project.cluster.facts import flat
from project.cluster.launcher import Launch
from project.survive.checkpoints import facts_of, newest_good, read_facts

log = logging.getLogger(__name__)

RUNS = "lightning_logs"

# A change of these makes it another run: the samples, their order, or what is trained.
_IDENTITY = ("seed_everything", "data.source", "data.batch_size", "data.global_batch_size", "data.tail", "model.network")
# These say where and how it runs, not what comes out.
_CIRCUMSTANCE = (
    *("base", "config", "run", "resume", "debug", "ckpt_path", "checkpoints", "weights_only"),
    *("data.num_workers", "data.resident", "data.seed"),
    *(f"trainer.{name}" for name in ("devices", "num_nodes", "accelerator", "logger", "callbacks", "profiler", "plugins")),
    *(
        "watchdog",
        "trainer.default_root_dir",
        "trainer.enable",
        "trainer.log_every",
        "trainer.strategy",
        "trainer.accumulate_grad",
    ),
)


class Run:
    """A run's folder, held by this process until it ends; a second process is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("a+")
        except OSError as error:
            raise ValueError(
                f"The run's folder {folder} can't be made: {error}. HINT: set trainer.default_root_dir."
            ) from error
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"The run {folder.name} is going on already: another process writes to {folder}. "
                "HINT: wait for it, stop it, or choose another --run."
            ) from None

    def begin(self, config: dict[str, Any], resume: str) -> tuple[Path, dict[str, Any]] | None:
        """The checkpoint to go on from and its facts, or None to begin at the beginning."""
        checkpoints = self.folder / "checkpoints"
        if resume == "never":
            if any(checkpoints.glob("step-*.ckpt")):
                raise ValueError(f"There is a run {self.folder.name} already. HINT: choose another --run, or --resume auto.")
            return None
        if resume != "auto":
            return self._from_path(Path(resume))
        if (found := newest_good(checkpoints)) is None:
            return None
        self._compare(config)
        return found

    def _from_path(self, path: Path) -> tuple[Path, dict[str, Any]]:
        if not path.is_file():
            raise ValueError(f"There is no checkpoint {path}. HINT: --resume is auto, never, or the path of one.")
        try:
            facts = read_facts(path)
        except ValueError as error:
            raise ValueError(f"Checkpoint {path} can't be used: {error}. HINT: take an older one, or --resume auto.") from error
        for newer in (self.folder / "checkpoints").glob("step-*.ckpt"):
            if newer.name > path.name:  # or the next 'auto' would go on from there
                log.info("%s is of a later step and is set aside.", newer)
                for part in (newer, facts_of(newer)):
                    part.replace(part.with_name(part.name + ".later"))
        return path, facts

    def _compare(self, config: dict[str, Any]) -> None:
        """Says what differs from the configuration that the run began with, and refuses what makes it another run."""
        try:
            before = yaml.safe_load((self.folder / "config.yaml").read_text())
        except (OSError, yaml.YAMLError):
            return
        changes = differences(before, config)
        if not changes:
            return
        text = "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in changes.items())
        if any(key.startswith(_IDENTITY) for key in changes):
            raise ValueError(
                f"The run {self.folder.name} began with another configuration: {text}. That makes it another run. "
                "HINT: choose another --run, or go back to the old values."
            )
        log.warning("The configuration of the run has changed: %s", text)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs between two configurations, by key, but for what has no say in the result."""
    old, new = flat(before), flat(now)
    return {
        key: (old.get(key), new.get(key))
        for key in {**old, **new}
        if old.get(key) != new.get(key) and not key.startswith(_CIRCUMSTANCE)
    }


def open_run(root: Path, name: str | None, kind: str, launch: Launch) -> Run:
    """The run of this name, new or not. Without a name: the one that this launcher began, before it started us again."""
    runs = root / RUNS
    if name is not None:
        if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise ValueError(f"A run's name is made of letters, digits, '.', '_' and '-', and {name!r} is not.")
        return Run(runs / name)
    if launch.name is not None:
        return Run(runs / f"{kind}-{launch.name}")
    stem = f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while True:
        folder = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)  # making it is what takes the name
        except FileExistsError:
            number += 1
        except OSError:
            return Run(folder)  # which says what is wrong
        else:
            return Run(folder)
